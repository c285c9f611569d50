"""Parameters that hold their values in several tensors: quantized weights.

bitsandbytes keeps packed bytes in the parameter and their scales in attributes of it
(``Params4bit.quant_state``, ``Int8Params.SCB``). torchao has subclasses of tensors that name their
parts (``__tensor_flatten__``). No other module distinguishes them: others map, move, count, or
exchange a parameter's parts by the functions here.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

import smp._C as _C

# Tables of a few numbers, which stay on ranks without the values.
_TABLES = frozenset({"code", "offset", "state2.code"})
_STATE = ("absmax", "code", "offset")
_DATA = ""
_DIGEST = "_smp_digest"


def is_packed(tensor: Tensor) -> bool:
    """Returns whether a tensor is a quantized weight with its values in several tensors."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return False
    return is_wrapper(tensor) or _is_of_bitsandbytes(tensor)


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors that hold the values, by name; the tensor itself if it is ordinary.

    Parts share their memory with `tensor`.
    """
    if not is_packed(tensor):
        return {_DATA: tensor}
    found = {} if is_wrapper(tensor) else {_DATA: _plain(tensor)}
    for name, part in _further(tensor):
        found[name] = part
    return found


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of all values of a tensor, wherever they are."""
    parts = (tensor,) if type(tensor) in (Tensor, nn.Parameter) else parts_of(tensor).values()
    return sum(part.numel() * part.element_size() for part in parts)


def num_elements(tensor: Tensor) -> int:
    """Returns the number of values that a tensor holds, packed or not."""
    shape = getattr(getattr(tensor, "quant_state", None), "shape", None)
    return tensor.numel() if shape is None else math.prod(shape)


def detached(tensor: Tensor) -> Tensor:
    """Returns a tensor without graph, as a state dict has it: packed bytes of bitsandbytes plain.

    Tensors of torchao keep their class, which has all parts.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) or is_wrapper(tensor)
    return tensor.detach() if is_plain or not is_packed(tensor) else _plain(tensor)


def is_table(name: str) -> bool:
    """Returns whether a part is a small table that ranks without the values keep, too."""
    return name in _TABLES


def waits_for_device(tensor: Tensor) -> bool:
    """Returns whether a weight of bitsandbytes is quantized by its first move to a device."""
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return not tensor.__dict__["bnb_quantized"]
    is_float = tensor.is_floating_point()
    return kind == "Int8Params" and is_float and not tensor.__dict__["has_fp16_weights"]


def mapped(parameter: Tensor, function: Callable[[str, Tensor], Tensor]) -> Any:
    """Returns a parameter of the same kind whose parts are made by a function.

    Args:
        parameter: packed parameter, which stays as it is.
        function: function of the name and the tensor of a part.
    """
    if is_wrapper(parameter):
        names, context = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: function(name, getattr(parameter, name)) for name in names}
        whole = type(parameter).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, parameter.shape, parameter.stride()
        )
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    data = function(_DATA, _plain(parameter))
    made: Any
    if type(data) in (Tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    else:  # a fake tensor keeps its operators, and PEFT asks for the name of the class
        made = nn.Parameter(data, parameter.requires_grad)
        base: type = type(made)
        made.__class__ = _named(base, type(parameter).__name__)
    made.__dict__.update(parameter.__dict__)
    state = parameter.__dict__.get("quant_state")
    if state is not None:
        made.quant_state = copy.copy(state)
        made.quant_state.state2 = copy.copy(state.state2)
        for name, holder, attribute in _of_state(made.quant_state):
            setattr(holder, attribute, function(name, getattr(holder, attribute)))
    if parameter.__dict__.get("SCB") is not None:
        made.CB, made.SCB = data, function("SCB", made.SCB)
    return made


def put(parameter: nn.Parameter, value: nn.Parameter) -> None:
    """Puts the values of another parameter into one, whose object and marks are kept.

    Args:
        parameter: parameter of a module, on any device.
        value: packed parameter, which is used up. `parameter` gets its class.
    """
    marks = {k: v for k, v in parameter.__dict__.items() if k.startswith("_smp_")}
    held = parameter.__dict__.get("quant_state")
    module = parameter.__dict__.get("module")
    torch.utils.swap_tensors(parameter, value)
    parameter.__dict__.update(marks)
    state = parameter.__dict__.get("quant_state")
    if state is None:
        return
    if held is not None:  # the layer may have this object, too
        held.__dict__.update(state.__dict__)
        parameter.quant_state = state = held  # type: ignore[attr-defined]
    parameter.module = module  # type: ignore[attr-defined]
    if module is not None:
        module.quant_state = state


def prepare(root: nn.Module, half: torch.dtype | None) -> None:
    """Checks quantized weights, and gives layers of bitsandbytes the form of training.

    Scales that 8-bit layers took at their first forward are put into the weights; the next forward
    takes them again. On CPUs with AVX512-BF16, an evaluation packs 4-bit weights again, with
    16-bit scales and for products without a backward; layers are kept from it.

    Args:
        root: the user's model.
        half: 16-bit dtype of training, or None.

    Raises:
        ValueError: a weight requires gradients, unpacks to another dtype than that of training, or
            was packed again by an evaluation.
    """
    for name, module in root.named_modules():
        for weight in _packed_in(module):
            problem = _problem_of(weight, half)
            if problem is not None:
                raise ValueError(
                    f"{_C.rank_prefix()}the quantized weight of '{name}' ({type(weight).__name__}) "
                    f"{problem}"
                )
            _take_back(weight, module.__dict__.get("state"))
        if "support_avx512bf16_for_cpu" in module.__dict__:
            module.support_avx512bf16_for_cpu = False


def _problem_of(weight: nn.Parameter, half: torch.dtype | None) -> str | None:
    """Returns why a model with a weight cannot be trained, or None."""
    if weight.requires_grad:
        return (
            "requires gradients, which its packed values have no place for; freeze it by "
            "requires_grad_(False), and train adapters beside it"
        )
    if is_wrapper(weight) and half is not None and weight.dtype != half:
        return (
            f"unpacks to {weight.dtype}, and training is in {half}; make the model in this dtype "
            f"before it is quantized (dtype={half})"
        )
    if getattr(weight.__dict__.get("quant_state"), "packing_format_for_cpu", False):
        return (
            "was packed again by an evaluation on this CPU, in a form without gradients that has "
            "lost digits of its scales; wrap the model before it is evaluated, or load it again"
        )
    return None


def _take_back(weight: Any, state: Any) -> None:
    """Puts the scales of an 8-bit layer of bitsandbytes back into its weight."""
    if type(weight).__name__ == "Int8Params" and getattr(state, "SCB", None) is not None:
        if getattr(weight, "SCB", None) is None:
            weight.CB, weight.SCB = _plain(weight), state.SCB
        state.reset_grads()


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two packed parameters are of one class and share the memory of all parts."""
    if type(one) is not type(other) or one is None or not is_packed(one):
        return False
    if is_wrapper(one):
        return False
    first, second = _plain(one), _plain(other)
    return first.shape == second.shape and first.untyped_storage()._cdata == (
        second.untyped_storage()._cdata
    )


def keys_of_parts(module: nn.Module) -> set[str]:
    """Returns the keys that a layer's state dict has for parts of its packed weight, and only so.

    They have the layer's own names: ``weight.absmax``, ``SCB``.
    """
    return set(_saved(module)) - set(module._parameters) if _packed_in(module) else set()


def digest(module: nn.Module) -> str:
    """Returns a checksum of a layer's packed weights, by which checkpoints recognize them.

    The layer's state dict has all parts, wherever they are between forwards. The bytes are read
    once, since nothing changes these weights.

    Args:
        module: layer with packed weights that has their values.
    """
    holder = _packed_in(module)[0]
    if _DIGEST not in holder.__dict__:
        found = 0
        for _, value in sorted(_saved(module).items()):
            for part in parts_of(detached(value)).values():
                flat = part.detach().cpu().reshape(-1).view(torch.uint8)
                numbers: Any = flat.numpy()
                found = zlib.crc32(numbers, found)
        setattr(holder, _DIGEST, f"{type(holder).__name__} {found:08x}")
    return str(holder.__dict__[_DIGEST])


def _packed_in(module: nn.Module) -> list[nn.Parameter]:
    kinds = (type(None), nn.Parameter)  # nearly all
    found = (p for p in module._parameters.values() if type(p) not in kinds)
    return [p for p in found if p is not None and is_packed(p)]


def _saved(module: nn.Module) -> dict[str, Tensor]:
    """Returns the entries of a layer's packed weights in its state dict, without a prefix."""
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", True)
    ordinary = {name for name, p in module._parameters.items() if p is None or not is_packed(p)}
    ordinary |= set(module._buffers)
    return {name: value for name, value in saved.items() if name not in ordinary}


def has_adapters(module: nn.Module) -> bool:
    """Returns whether a module has adapters (PEFT) around a layer with packed weights.

    Their code may read the weights past the layer, to unpack them.
    """
    base = module._modules.get("base_layer")
    return base is not None and bool(_packed_in(base))


def name_in(root: nn.Module) -> str | None:
    """Returns name and class of a packed weight in a module, or None if there is none."""
    for name, _, weight in layers_in(root):
        return f"'{name}.weight' ({type(weight).__name__})".replace("'.", "'")
    return None


def keys_in(root: nn.Module) -> set[str]:
    """Returns the keys of a model's state dict that belong to packed weights."""
    found: set[str] = set()
    for prefix, module in root.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        if _packed_in(module):
            found |= {dot + key for key in _saved(module)}
    return found


def layers_in(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yields the layers with packed weights: name, layer, and the first of its weights."""
    for name, module in root.named_modules():
        for parameter in _packed_in(module)[:1]:
            yield name, module, parameter


@functools.cache
def _named(base: type, name: str) -> type:
    return type(name, (base,), {})


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether a tensor has no memory of its own, but parts that it names."""
    return is_traceable_wrapper_subclass(tensor)


def _is_of_bitsandbytes(tensor: Tensor) -> bool:
    if type(tensor).__name__ == "Params4bit":
        return tensor.__dict__.get("quant_state") is not None
    # The layer has the scales between its first forward and `bring_back`.
    return type(tensor).__name__ == "Int8Params" and tensor.dtype == torch.int8


def _plain(tensor: Tensor) -> Tensor:
    """Returns the packed bytes of a parameter of bitsandbytes as an ordinary tensor."""
    # A mode of fake tensors refuses operators of a class that it does not know.
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # type: ignore
        return tensor.data


def _further(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the parts besides the tensor's own memory."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield name, getattr(tensor, name)
        return
    state = tensor.__dict__.get("quant_state")
    if state is not None:
        for name, holder, attribute in _of_state(state):
            yield name, getattr(holder, attribute)
    scales = tensor.__dict__.get("SCB")
    if scales is not None:
        yield "SCB", scales


def _of_state(state: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields the tensors of a ``QuantState``: name, object that has it, and attribute."""
    holders = [("", state)] + ([] if state.state2 is None else [("state2.", state.state2)])
    for prefix, holder in holders:
        for attribute in _STATE:
            if isinstance(getattr(holder, attribute), Tensor):
                yield prefix + attribute, holder, attribute
