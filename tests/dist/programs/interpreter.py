"""The module that runs a block of a program."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.programs.language import WIDTH, Block, Program, Structure
from tests.reference.models import Place, nowhere, randomise_


class Delays:
    """Sleeps for a random time before and after each forward and before each backward.

    Set as `Interpreter.delays`; each rank has a random stream of its own, so arrival orders vary.
    """

    def __init__(self, seed: int, rank: int, max_us: int) -> None:
        self._random = random.Random(seed * 1009 + rank)
        self._max_us = max_us

    def __call__(self) -> None:
        # Most calls go through at once: uneven times make more orders than uniform ones.
        if self._random.random() < 0.3:
            time.sleep(self._random.randrange(self._max_us) * 1e-6)


def no_delays() -> None:
    pass


class Registers(list[Any]):
    """Values of one call."""

    def put(self, value: Any) -> None:
        self.append(value)


def flatten(value: Any) -> Iterator[Any]:
    """Leaves of nested arguments or results."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flatten(item)
    else:
        yield value


def assemble(structure: Structure, registers: Registers) -> Any:
    """The value that a structure describes."""
    kind, *rest = structure
    if kind == "r":
        return registers[rest[0]]
    if kind == "none":
        return None
    if kind == "const":
        return rest[0]
    if kind == "maybe":
        register, test, threshold = rest
        return registers[register] if above(registers[test], threshold) else None
    if kind == "some":
        register, threshold = rest
        value = registers[register]
        return value[value.detach()[:, 0] > threshold]
    if kind == "dict":
        return {name: assemble(part, registers) for name, part in rest[0].items()}
    parts = [assemble(part, registers) for part in rest[0]]
    return tuple(parts) if kind == "tuple" else parts


def above(value: Tensor, threshold: float) -> bool:
    """A decision of the program that depends on data."""
    return bool(value.detach().sum() > threshold)


class Interpreter(nn.Module):
    """Runs the code of one block; parameters are ``w<k>``, ``b<k>``, ``v<k>``."""

    delays: Callable[[], None] = staticmethod(no_delays)

    def __init__(self, block: Block, children: list[nn.Module]) -> None:
        super().__init__()
        self.block = block
        for k in range(block.matrices):
            self.register_parameter(f"w{k}", _parameter(WIDTH, WIDTH))
            self.register_parameter(f"b{k}", _parameter(WIDTH))
        for k in range(block.vectors):
            self.register_parameter(f"v{k}", _parameter(WIDTH))
        for k in range(block.buffers):
            constants = torch.linspace(-0.5, 0.7, WIDTH, dtype=torch.float64) * (k + 1)
            self.register_buffer(f"c{k}", constants)
        self.kids = nn.ModuleList(children)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Interpreter.delays()
        registers = Registers(flatten((args, kwargs)))
        assert len(registers) == self.block.num_inputs
        for name, *operands in self.block.code:
            getattr(self, f"do_{name}")(registers, *operands)
        result = assemble(self.block.result, registers)
        if Interpreter.delays is not no_delays:
            self._delay_backward(result)
        Interpreter.delays()
        return result

    def _delay_backward(self, result: Any) -> None:
        for leaf in flatten(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda grad: Interpreter.delays())

    # ---- new values --------------------------------------------------------

    def do_affine(self, r: Registers, a: int, k: int) -> None:
        r.put(F.linear(r[a], getattr(self, f"w{k}"), getattr(self, f"b{k}")))

    def do_tanh(self, r: Registers, a: int) -> None:
        r.put(torch.tanh(r[a]))

    def do_sin(self, r: Registers, a: int) -> None:
        r.put(torch.sin(r[a]))

    def do_scale(self, r: Registers, a: int, factor: float) -> None:
        r.put(r[a] * factor)

    def do_add(self, r: Registers, a: int, b: int) -> None:
        r.put(r[a] + r[b])

    def do_mix(self, r: Registers, parts: list[int], factors: list[float]) -> None:
        r.put(sum(r[a] * factor for a, factor in zip(parts, factors, strict=True)))

    def do_mul(self, r: Registers, a: int, b: int) -> None:
        r.put(torch.sin(r[a]) * r[b])

    def do_gain(self, r: Registers, a: int, k: int) -> None:
        r.put(r[a] * getattr(self, f"v{k}"))

    def do_shift(self, r: Registers, a: int, k: int) -> None:
        r.put(r[a] + getattr(self, f"c{k}"))

    def do_param(self, r: Registers, k: int) -> None:
        r.put(getattr(self, f"v{k}"))

    def do_by_param(self, r: Registers, a: int, p: int) -> None:
        r.put(r[a] * r[p])

    def do_where(self, r: Registers, mask: int, a: int, b: int) -> None:
        r.put(torch.where(r[mask], r[a], r[b]))

    def do_permute(self, r: Registers, rows: int, a: int) -> None:
        r.put(r[a][r[rows]])

    def do_positive(self, r: Registers, a: int) -> None:
        r.put(r[a] > 0.05)

    def do_order(self, r: Registers, a: int) -> None:
        r.put(r[a].detach()[:, 0].argsort(stable=True))

    def do_strided(self, r: Registers, a: int) -> None:
        r.put(torch.stack([r[a], -r[a]], -1)[..., 0])

    def do_transposed(self, r: Registers, a: int) -> None:
        r.put(r[a].t().clone(memory_format=torch.contiguous_format).t())

    def do_dropout(self, r: Registers, a: int) -> None:
        r.put(F.dropout(r[a], 0.3, self.training))

    # ---- other objects for the same memory ---------------------------------

    def do_view(self, r: Registers, a: int) -> None:
        r.put(r[a].unflatten(1, (2, 2)).flatten(1))

    def do_detach(self, r: Registers, a: int) -> None:
        r.put(r[a].detach())

    # ---- in place ----------------------------------------------------------

    def do_scale_(self, r: Registers, a: int, factor: float) -> None:
        r[a].mul_(factor)

    def do_add_(self, r: Registers, a: int, b: int) -> None:
        r[a] += r[b]

    def do_relu_(self, r: Registers, a: int) -> None:
        r[a].relu_()

    def do_mask_(self, r: Registers, mask: int, a: int) -> None:
        r[a].masked_fill_(r[mask], 0.25)

    def do_columns_(self, r: Registers, a: int, factor: float) -> None:
        r[a][:, 1:3].mul_(factor)

    def do_unflat_(self, r: Registers, a: int, term: float) -> None:
        r[a].unflatten(1, (2, 2))[:, 0].add_(term)

    def do_copy_(self, r: Registers, a: int, b: int) -> None:
        r[a][:, 0] = r[b][:, 1]

    # ---- calls -------------------------------------------------------------

    def _call(
        self, r: Registers, kid: int, args: list[Structure], kwargs: dict[str, Structure]
    ) -> list[Any]:
        values = [assemble(part, r) for part in args]
        named = {name: assemble(part, r) for name, part in kwargs.items()}
        return list(flatten(self.kids[kid](*values, **named)))

    def do_call(self, r: Registers, kid: int, args: Any, kwargs: Any) -> None:
        r.extend(self._call(r, kid, args, kwargs))

    def do_call_no_grad(self, r: Registers, kid: int, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            r.extend(self._call(r, kid, args, kwargs))

    def do_branch(self, r: Registers, test: int, threshold: float, *calls: Any) -> None:
        """Calls one of two children, as a value of a result tells."""
        kid, leaf, args, kwargs = calls[0 if above(r[test], threshold) else 1]
        r.put(self._call(r, kid, args, kwargs)[leaf])

    def do_loop(self, r: Registers, a: int, kid: int, leaf: int, args: Any, kwargs: Any) -> None:
        """Calls a child as often as the data tell; the newest value is the register to come."""
        value = r[a]
        for _ in range(1 + int(value.detach().abs().sum() * 8) % 3):
            value = self._call(Registers([*r, value]), kid, args, kwargs)[leaf]
        r.put(value)

    def do_each(self, r: Registers, parts: list[int], kid: int, leaf: int, *rest: Any) -> None:
        """A sum over calls in a generator expression."""
        args, kwargs = rest
        r.put(sum(self._call(Registers([*r, r[a]]), kid, args, kwargs)[leaf] for a in parts))

    def do_route(self, r: Registers, a: int, threshold: float, kid: int, *rest: Any) -> None:
        """Sends the rows above a threshold through a child, perhaps none."""
        leaf, args, kwargs = rest
        rows = (r[a].detach()[:, 0] > threshold).nonzero().squeeze(1)
        routed = self._call(Registers([*r, r[a][rows]]), kid, args, kwargs)[leaf]
        r.put((r[a] * 0.5).index_add(0, rows, routed))

    # ---- values that may be missing ----------------------------------------

    def do_default(self, r: Registers, optional: int, a: int) -> None:
        r.put(r[a] if r[optional] is None else r[optional])

    def do_collapse(self, r: Registers, rows: int, a: int) -> None:
        r.put(r[a] + r[rows].sum(0))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float64))


def build(program: Program, place: Place = nowhere) -> tuple[nn.Module, list[Interpreter]]:
    """The root and all blocks, randomised; `place` gives the context of a partition."""
    modules: list[Interpreter] = []
    for block, owner in zip(program.blocks, program.owners, strict=True):
        with place(owner) if block is not program.blocks[-1] else contextlib.nullcontext():
            module = Interpreter(block, [modules[child] for child in block.children])
        if block.tie is not None:
            module.w0 = modules[block.tie].w0
        modules.append(module)
    randomise_(modules[-1], program.seed)
    for module in modules:
        if module.block.frozen:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
    return modules[-1].train(), modules
