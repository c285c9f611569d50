"""Makes the code of one block after the other, such that plain autograd accepts it.

Autograd forbids to change a tensor in place whose value some earlier operation has saved for its
backward. So the builder follows which registers share memory (*groups*), which groups are saved,
and what a call does to its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.dist.programs.effects import Bookkeeping, Group, Leaf, Summary
from tests.dist.programs.language import Block, Structure, leaves_of

FACTORS = (0.5, -0.7, 1.5, -1.0)
THRESHOLDS = (0.13, -0.4, 1.1)
Draw = Callable[[int, int], int]
"""An integer between two bounds, both included."""


class BlockBuilder(Bookkeeping):
    """Builds one block.

    Args:
        draw: the source of decisions.
        kids: blocks that can be children, with their indices.
        is_root: whether the block takes the model's arguments and ends in a head.
        surprises: results may be missing or change their shape with the data.
        dropout: whether instructions may draw random numbers.
    """

    def __init__(
        self,
        draw: Draw,
        kids: Sequence[tuple[int, Summary]],
        is_root: bool = False,
        surprises: bool = False,
        dropout: bool = False,
    ) -> None:
        super().__init__()
        self._draw = draw
        self._surprises = surprises
        self._kids = [summary for _, summary in kids]
        self._is_root = is_root
        inputs = ["t", "i", "b"] if is_root else self._draw_inputs()
        self._inputs = inputs
        self.block = Block(len(inputs), children=[index for index, _ in kids])
        for kind in inputs:
            self._put(kind, fixed=is_root or kind != "t")
        self._menu = self._make_menu(dropout)

    def _draw_inputs(self) -> list[str]:
        return ["t"] + [
            kind
            for kind, one_in in (("t", 2), ("p", 5), ("b", 5), ("i", 5), ("o", 4))
            if self._draw(1, one_in) == one_in
        ]

    def build(self, num_instructions: int) -> Summary:
        """Writes the code; the block is in `block` afterwards."""
        for _ in range(num_instructions):
            self._pick(self._menu)()
        # Each child is called at least once.
        called = {line[operand] for line in self.block.code for operand in _callees(line)}
        for kid in range(len(self._kids)):
            if kid not in called:
                self._call(kid)
        if self._is_root or self._draw(0, 2):
            self._gather()
        if self._is_root:
            self._head()
        self.block.result = self._result()
        return self._summary()

    # ---- registers ---------------------------------------------------------

    def _one_of(self, kind: str) -> int:
        """A register of this kind; recent or unread ones are more likely. Made when missing."""
        if kind == "t" and self._unread and self._draw(0, 1):
            return self._unread.pop()
        found = [i for i, k in enumerate(self._kinds) if k == kind]
        if not found:
            return {"i": self._do_order, "b": self._do_positive, "p": self._do_param}[kind]()
        return found[max(self._draw(0, len(found) - 1), self._draw(0, len(found) - 1))]

    def _changeable(self) -> int:
        found = [i for i in range(len(self._kinds)) if self._can_change(i)]
        return self._pick(found) if found else self._do_scale()

    def _pick(self, options: Sequence[Any]) -> Any:
        return options[self._draw(0, len(options) - 1)]

    def _emit(self, name: str, *operands: Any) -> None:
        self.block.code.append([name, *operands])

    def _make(self, name: str, *operands: Any, kind: str = "t", saved: bool = False) -> int:
        self._emit(name, *operands)
        return self._put(kind, saved=saved)

    # ---- instructions ------------------------------------------------------

    def _make_menu(self, dropout: bool) -> list[Callable[[], Any]]:
        menu: list[Callable[[], Any]] = [
            self._do_affine, self._do_affine, self._do_tanh, self._do_sin, self._do_scale,
            self._do_add, self._do_mix, self._do_mul, self._do_gain, self._do_shift,
            self._do_by_param, self._do_where, self._do_permute, self._do_positive,
            self._do_order, self._do_strided, self._do_transposed, self._do_view,
            self._do_detach, self._change, self._change, self._change,
        ]  # fmt: skip
        if dropout:
            menu += [self._do_dropout] * 8
        if "o" in self._inputs:
            menu += [self._do_default] * 3
        if self._kids:
            menu += [self._do_call] * 12 + [self._do_call_no_grad]
            simple = [k for k, s in enumerate(self._kids) if s.usable_in_control_flow()]
            if simple:
                menu += [lambda: self._do_branch(simple), lambda: self._do_loop(simple)] * 3
                menu += [lambda: self._do_each(simple)] * 3
            per_row = [k for k in simple if self._kids[k].usable_on_some_rows()]
            if per_row:
                menu += [lambda: self._do_route(per_row)] * 3
        return menu

    def _do_affine(self) -> int:
        a = self._one_of("t")
        self._saves(a)
        if self.block.matrices == 0 or self._draw(0, 2):
            self.block.matrices += 1
        return self._make("affine", a, self._draw(0, self.block.matrices - 1))

    def _do_tanh(self) -> int:
        return self._make("tanh", self._one_of("t"), saved=True)

    def _do_sin(self) -> int:
        a = self._one_of("t")
        self._saves(a)
        return self._make("sin", a)

    def _do_scale(self) -> int:
        return self._make("scale", self._one_of("t"), self._pick(FACTORS))

    def _do_add(self) -> int:
        return self._make("add", self._one_of("t"), self._one_of("t"))

    def _do_mix(self) -> int:
        parts = [self._one_of("t") for _ in range(self._draw(1, 3))]
        return self._make("mix", parts, [self._pick(FACTORS) for _ in parts])

    def _do_mul(self) -> int:
        a, b = self._one_of("t"), self._one_of("t")
        self._saves(a, b)
        return self._make("mul", a, b)

    def _do_gain(self) -> int:
        a = self._one_of("t")
        self._saves(a)
        return self._make("gain", a, self._vector())

    def _vector(self) -> int:
        if self.block.vectors == 0 or self._draw(0, 1):
            self.block.vectors += 1
        return self._draw(0, self.block.vectors - 1)

    def _do_shift(self) -> int:
        self.block.buffers = max(self.block.buffers, 1)
        return self._make("shift", self._one_of("t"), 0)

    def _do_param(self) -> int:
        self._emit("param", self._vector())
        return self._put("p", fixed=True)

    def _do_by_param(self) -> int:
        a, p = self._one_of("t"), self._one_of("p")
        self._saves(a)
        return self._make("by_param", a, p)

    def _do_where(self) -> int:
        return self._make("where", self._one_of("b"), self._one_of("t"), self._one_of("t"))

    def _do_permute(self) -> int:
        return self._make("permute", self._one_of("i"), self._one_of("t"))

    def _do_positive(self) -> int:
        return self._make("positive", self._one_of("t"), kind="b")

    def _do_order(self) -> int:
        return self._make("order", self._one_of("t"), kind="i")

    def _do_strided(self) -> int:
        return self._make("strided", self._one_of("t"))

    def _do_transposed(self) -> int:
        return self._make("transposed", self._one_of("t"))

    def _do_dropout(self) -> int:
        return self._make("dropout", self._one_of("t"))

    def _do_view(self) -> None:
        a = self._one_of("t")
        self._emit("view", a)
        # Not of every layout is the result a view; then it only looks shared here.
        self._share("t", self._group_of[a])

    def _do_detach(self) -> None:
        a = self._one_of("t")
        self._emit("detach", a)
        self._share("t", self._group_of[a])

    def _do_default(self) -> None:
        optional, a = self._one_of("o"), self._one_of("t")
        self._emit("default", optional, a)
        for register in (optional, a):
            self._group(register).fixed = True
        self._put("t", fixed=True)

    def _change(self) -> None:
        a = self._changeable()
        name = self._pick(("scale_", "add_", "relu_", "mask_", "columns_", "unflat_", "copy_"))
        operands: tuple[Any, ...] = (a,)
        if name in ("scale_", "columns_", "unflat_"):
            operands = (a, self._pick(FACTORS))
        elif name in ("add_", "copy_"):
            operands = (a, self._one_of("t"))
        elif name == "mask_":
            operands = (self._one_of("b"), a)
        if not self._can_change(a):  # an operand had to be made from it
            return
        self._emit(name, *operands)
        self._group(a).mutated = True
        if name == "relu_":
            self._saves(a)

    # ---- calls -------------------------------------------------------------

    def _do_call(self) -> None:
        self._call(self._draw(0, len(self._kids) - 1))

    def _do_call_no_grad(self) -> None:
        kid = self._draw(0, len(self._kids) - 1)
        self._call(kid, "call" if any(self._kids[kid].mutates) else "call_no_grad")

    def _call(self, kid: int, name: str = "call") -> None:
        summary = self._kids[kid]
        arguments: list[int | None] = []
        for kind, mutates in zip(summary.kinds, summary.mutates, strict=True):
            arguments.append(self._argument(kind, mutates, arguments))
        leaves: list[Structure] = [["none"] if a is None else ["r", a] for a in arguments]
        self._emit(name, kid, *self._arrange(leaves))
        for a, saves, mutates in zip(arguments, summary.saves, summary.mutates, strict=True):
            if a is not None:
                self._group(a).saved |= saves
                self._group(a).mutated |= mutates
        self._take_results(summary, arguments)

    def _argument(self, kind: str, mutates: bool, others: list[int | None]) -> int | None:
        if kind == "o":
            found = [i for i, k in enumerate(self._kinds) if k in "ot"]
            return self._pick([None, *found])
        if not mutates:
            changed = {self._group_of[a] for a in others if a is not None}
            for _ in range(3):
                a = self._one_of(kind)
                if self._group_of[a] not in changed:
                    return a
            return self._do_tanh() if kind == "t" else a
        taken = {self._group_of[a] for a in others if a is not None}
        found = [
            i
            for i in range(len(self._kinds))
            if self._can_change(i)
            and self._group_of[i] not in taken
            and len(self._group(i).objects) == 1
        ]
        return self._pick(found) if found else self._do_scale()

    def _arrange(self, leaves: list[Structure]) -> tuple[list[Structure], dict[str, Structure]]:
        """Spreads leaves over positions, keywords and containers, in their order."""
        args: list[Structure] = []
        kwargs: dict[str, Structure] = {}
        rest = list(leaves)
        while rest:
            count = self._draw(1, len(rest))
            taken, rest = rest[:count], rest[count:]
            shape = self._draw(0, 3)
            part: Structure
            if count == 1 and shape < 2:
                part = taken[0]
            elif shape == 3:
                part = ["dict", {f"k{i}": leaf for i, leaf in enumerate(taken)}]
            else:
                part = ["tuple" if shape < 2 else "list", taken]
            if kwargs or self._draw(0, 3) == 0:
                kwargs[f"a{len(kwargs)}"] = part
            else:
                args.append(part)
        return args, kwargs

    def _take_results(self, summary: Summary, arguments: list[int | None]) -> None:
        groups: dict[int, int] = {}
        objects: dict[int, int] = {}
        for leaf in summary.leaves:
            origin = None if leaf.same_as_input is None else arguments[leaf.same_as_input]
            if origin is not None:
                self._group(origin).saved |= leaf.saved
                kind = self._kinds[origin]
                self._share(kind, self._group_of[origin], self._object_of[origin])
                continue
            if leaf.same_as_input is not None:  # an optional argument that was left out
                self._put("n")
                continue
            if leaf.views_input is not None:
                viewed = arguments[leaf.views_input]
                if viewed is not None:
                    self._group(viewed).fixed = True
            if leaf.group not in groups:
                self._groups.append(Group())
                groups[leaf.group] = len(self._groups) - 1
            group = groups[leaf.group]
            self._groups[group].saved |= leaf.saved
            self._groups[group].fixed |= leaf.fixed or leaf.views_input is not None
            register = self._share(leaf.kind, group, objects.get(leaf.object))
            objects[leaf.object] = self._object_of[register]
            if len(self._groups[group].objects) > 1:
                self._groups[group].fixed = True

    # ---- calls in control flow ---------------------------------------------

    def _simple_call(self, kid: int, first: int | None) -> tuple[int, list[Any], list[Any]]:
        """(leaf, registers, structures) of a call whose first argument is given or comes later."""
        summary = self._kids[kid]
        registers = [self._one_of(kind) for kind in summary.kinds[1:]]
        if first is None:
            first = self._one_of("t")
        return summary.first_tensor(), [first, *registers], [["r", a] for a in registers]

    def _finish_simple(self, kids: Sequence[int], registers: Sequence[int]) -> None:
        """Protects the arguments and the result of control flow against later changes.

        The result may be one of the arguments.
        """
        for a in registers:
            self._group(a).saved = self._group(a).fixed = True
        self._put("t", saved=True, fixed=True)

    def _do_branch(self, simple: list[int]) -> None:
        test = self._one_of("t")
        calls, used, kids = [], [], [self._pick(simple), self._pick(simple)]
        for kid in kids:
            leaf, registers, rest = self._simple_call(kid, None)
            calls.append([kid, leaf, [["r", registers[0]], *rest], {}])
            used += registers
        self._emit("branch", test, self._pick(THRESHOLDS), *calls)
        self._finish_simple(kids, used)

    def _do_loop(self, simple: list[int]) -> None:
        kid = self._pick(simple)
        leaf, registers, rest = self._simple_call(kid, None)
        coming = ["r", len(self._kinds)]
        self._emit("loop", registers[0], kid, leaf, [coming, *rest], {})
        self._finish_simple([kid], registers)

    def _do_each(self, simple: list[int]) -> None:
        kid = self._pick(simple)
        parts = [self._one_of("t") for _ in range(self._draw(1, 3))]
        leaf, registers, rest = self._simple_call(kid, parts[0])
        coming = ["r", len(self._kinds)]
        self._emit("each", parts, kid, leaf, [coming, *rest], {})
        self._finish_simple([kid], registers + parts)

    def _do_route(self, per_row: list[int]) -> None:
        kid = self._pick(per_row)
        leaf, registers, rest = self._simple_call(kid, None)
        coming = ["r", len(self._kinds)]
        threshold = self._pick(THRESHOLDS)
        self._emit("route", registers[0], threshold, kid, leaf, [coming, *rest], {})
        self._finish_simple([kid], registers)

    # ---- the end -----------------------------------------------------------

    def _gather(self) -> None:
        """Sums values that were not read so far, so that most parameters affect the result."""
        parts = self._unread[-6:] or [self._one_of("t")]
        self._unread = []
        self._make("mix", parts, [self._pick(FACTORS) for _ in parts])

    def _head(self) -> None:
        self.block.matrices += 1
        a = len(self._kinds) - 1
        self._saves(a)
        self._make("affine", a, self.block.matrices - 1)

    def _result(self) -> Structure:
        tensors = [i for i, kind in enumerate(self._kinds) if kind == "t"]
        leaves: list[Structure] = [["r", tensors[-1]]]
        for _ in range(self._draw(0, 3)):
            leaves.append(self._result_leaf(tensors))
        if len(leaves) == 1 and self._draw(0, 2):
            return leaves[0]
        shape = self._draw(0, 2)
        if shape == 2:
            return ["dict", {f"y{i}": leaf for i, leaf in enumerate(leaves)}]
        inner = leaves[1:]
        if len(inner) > 1 and self._draw(0, 1):
            return ["tuple", [leaves[0], ["list", inner]]]
        return ["tuple" if shape else "list", leaves]

    def _result_leaf(self, tensors: list[int]) -> Structure:
        choice = self._draw(0, 9)
        if choice == 0:
            return ["none"]
        if choice == 1:
            return ["const", self._draw(0, 5)]
        if self._surprises and not self._is_root and choice in (2, 3, 4):
            if choice == 4:
                return ["some", self._pick(tensors), self._pick(THRESHOLDS)]
            return ["maybe", self._pick(tensors), self._pick(tensors), self._pick(THRESHOLDS)]
        if choice == 5:
            found = [i for i, kind in enumerate(self._kinds) if kind in "bio"]
            return ["r", self._pick(found or tensors)]
        return ["r", self._pick(tensors)]

    def _summary(self) -> Summary:
        inputs = range(len(self._inputs))
        input_groups = {self._group_of[i]: i for i in inputs}
        input_objects = {self._object_of[i]: i for i in inputs}
        leaves = []
        for leaf in leaves_of(self.block.result):
            if leaf[0] in ("none", "const"):
                leaves.append(Leaf("n", -1 - len(leaves), -1 - len(leaves), None, None, True, True))
                continue
            a = leaf[1]
            if leaf[0] == "some":
                leaves.append(Leaf("v", -1 - len(leaves), -1 - len(leaves), None, None, True, True))
                continue
            group = self._group(a)
            same = input_objects.get(self._object_of[a])
            views = input_groups.get(self._group_of[a]) if same is None else None
            maybe = leaf[0] == "maybe"
            leaves.append(
                Leaf(
                    "o" if maybe else self._kinds[a],
                    self._group_of[a],
                    self._object_of[a],
                    None if maybe else same,
                    same if maybe and same is not None else views,
                    group.saved,
                    group.fixed or maybe or self._kinds[a] != "t",
                )
            )
        return Summary(
            tuple(self._inputs),
            tuple(self._groups[self._group_of[i]].saved for i in inputs),
            tuple(self._groups[self._group_of[i]].mutated for i in inputs),
            tuple(leaves),
            1 + max((kid.depth for kid in self._kids), default=0),
        )


def _callees(line: list[Any]) -> list[int]:
    """Positions of operands that name a child, of one instruction; branches are left out."""
    return {"call": [1], "call_no_grad": [1], "loop": [2], "each": [2], "route": [3]}.get(
        line[0], []
    )
