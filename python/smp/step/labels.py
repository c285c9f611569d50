"""Finds the labels of Hugging Face models: the argument with them, and those that count.

The losses of transformers are means over the labels that are not ignored. If sequences are padded,
microbatches have different numbers of these. The code of a class and of its loss function decides
which labels count; tests/zoo/test_label_rules.py compares that with the divisor of PyTorch's loss,
over the families of the zoo.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.model import DistributedModel, engine_of
from smp.modules.tracing import running_again
from smp.nn import DistributedTransformerLMHead
from smp.nn.vocabulary_head import IGNORE_INDEX
from smp.partition.capture import CallSeen
from smp.partition.stand_in import reads_number
from smp.step.batches import Batch, MicrobatchArguments
from smp.world import runtime
from smp.world.log import first_rank_log

_log = logging.getLogger("smp")

_LABELS, _NUM_ITEMS = "labels", "num_items_in_batch"

Path = tuple[Any, ...]


@dataclass(frozen=True)
class LabelRule:
    """The rule by which the loss of a model counts labels.

    Attributes:
        shifts: whether the first label of each sequence does not count, as tokens predict the next.
        ignored: value of labels that do not count.
    """

    shifts: bool
    ignored: int

    def count(self, labels: Tensor) -> Tensor:
        """Returns how many labels count in a tensor of integers of any shape."""
        counted = labels[..., 1:] if self.shifts else labels
        return (counted != self.ignored).sum()


def rule_of(model: nn.Module) -> LabelRule | None:
    """Returns the rule by which the loss of a Hugging Face model counts labels, or None."""
    base: Any = getattr(model, "get_base_model", lambda: model)()  # the base model of PEFT
    if isinstance(base, DistributedTransformerLMHead):
        return LabelRule(shifts=True, ignored=IGNORE_INDEX)
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(base, library.PreTrainedModel):
        return None
    loss = getattr(base, "loss_function", None)
    found: LabelRule | None = _rule(type(base), loss if callable(loss) else None)  # type: ignore[arg-type]
    if found is not None and getattr(base.config, "is_encoder_decoder", False):
        return LabelRule(False, found.ignored)  # inputs of the decoder are shifted instead
    return found


@functools.lru_cache(maxsize=128)
def _rule(cls: Hashable, loss: Hashable) -> LabelRule | None:
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    if _LABELS not in inspect.signature(forward).parameters:
        return None
    try:
        text = inspect.getsource(forward)
        if loss is not None and "self.loss_function(" in text:
            text += inspect.getsource(inspect.unwrap(loss))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    counts = re.search("cross_entropy|CrossEntropyLoss", text) is not None
    if not counts or "argmax(labels" in text:  # a label consists of several numbers
        return None
    shifts = re.search(r"labels\[(\.\.\.|:), 1:", text) is not None
    known = re.search(r"ignore_index(?:: int)?\s*=\s*(-?\d+)", text)
    return LabelRule(shifts, int(known.group(1)) if known else IGNORE_INDEX)


@dataclass(frozen=True)
class CountedLabels:
    """The labels of a step function.

    Attributes:
        rule: rule by which labels count.
        path: place of the labels among the arguments.
        divisor: place, among the arguments, of the number by which the model divides instead of
            counting labels; None: there is none.
    """

    rule: LabelRule
    path: Path
    divisor: Path | None

    def are_in(self, bound: inspect.BoundArguments) -> bool:
        """Returns whether a call of the step function has them."""
        wanted = [path for path in (self.path, self.divisor) if path is not None]
        return all(_at(bound, path) is not None for path in wanted)

    def count(self, pieces: MicrobatchArguments, count: int) -> tuple[list[float], float]:
        """Returns the weight of each microbatch, and their part of the sum over all batches."""
        each = [pieces.of(mb) for mb in range(count)]
        labels = [_at(own, self.path) for own in each]
        counts: list[float] = torch.stack([self.rule.count(one) for one in labels]).tolist()
        if self.divisor is None:
            return counts, sum(counts)
        # The model computes a sum, and divides it by this argument.
        return [float(_at(own, self.divisor)) for own in each], sum(counts)


def find_labels(
    current: runtime.Runtime,
    models: Sequence[DistributedModel],
    batch: Batch,
    step: str,
    run_body: Callable[[], object],
) -> CountedLabels | None:
    """Runs a step function up to its call of a model, and finds its labels among the arguments.

    Args:
        current: the runtime.
        models: partitioned models that take part.
        batch: batch of this rank.
        step: name of the step function.
        run_body: runs it on the first microbatch, in which `smp.is_tracing` is true.

    Returns:
        the labels; None if the loss counts samples, or labels are not found.
    """
    rules = {model: rule for model in models if (rule := rule_of(model.get_module())) is not None}
    if not rules or not any(_integers(batch.bound)):
        return None
    seen: list[tuple[LabelRule, dict[str, Any]]] = []

    def on_call(model: DistributedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model in rules:
            seen.append((rules[model], _given(model.get_module(), args, kwargs, device)))
        raise CallSeen

    device = current.rank.device
    outside = _C.RandomState.capture(str(device))
    for model in models:
        engine_of(model).on_next_call = functools.partial(on_call, model)
    try:
        with running_again():
            run_body()
    except CallSeen:
        pass
    except Exception as error:
        _log.debug("smp: step '%s' failed before it called a model", step, exc_info=error)
    finally:
        for model in models:
            engine_of(model).on_next_call = None
        outside.restore()
    if not seen:
        return None
    return _located(batch, step, *seen[0])


def _given(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Returns the arguments of a call by name, without a number of labels that changes nothing."""
    names = list(inspect.signature(root.forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get(_NUM_ITEMS) is None:
        return given

    def loss_of(faked: Callable[[Any], Any], number: Tensor) -> Tensor:
        outputs = root(*faked(args), **(faked(kwargs) | {_NUM_ITEMS: number}))
        loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return loss

    try:
        if not reads_number(root, device, loss_of):
            del given[_NUM_ITEMS]  # the losses of BERT are means, whatever it is told
    except Exception as error:  # some models need values
        _log.debug("smp: the divisor of a loss is not known without values", exc_info=error)
    return given


def _located(
    batch: Batch, step: str, rule: LabelRule, given: Mapping[str, Any]
) -> CountedLabels | None:
    labels = given.get(_LABELS)
    if not isinstance(labels, Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    first = batch.pieces(batch.count).of(0)
    path = next((p for p, leaf in _by_name(first, _LABELS) if _is_same(leaf, labels)), None)
    num_items = given.get(_NUM_ITEMS)
    divisor = None
    if path is not None and num_items is not None:
        divisor = next((p for p, leaf in _by_name(first, _NUM_ITEMS) if leaf is num_items), None)
        rule = LabelRule(False, rule.ignored)  # the Trainer's count does not shift
    is_known = path is not None and (num_items is None or divisor is not None)
    if not is_known and (num_items is not None or bool((labels == rule.ignored).any())):
        first_rank_log.warning(
            "smp: the model of step '%s' gets %s that the step function creates, so its "
            "microbatches are weighted by samples, not by the labels that count. Pass them to the "
            "step function as an argument, or state what the loss of a microbatch is a mean over: "
            "@smp.step(weight=lambda ...: ...)",
            step,
            _LABELS if path is None else _NUM_ITEMS,
        )
    return CountedLabels(rule, path, divisor) if is_known and path is not None else None


def _is_same(leaf: Any, tensor: Tensor) -> bool:
    """Returns whether an argument is the model's, perhaps as a copy on another device."""
    if leaf is tensor:
        return True
    if not isinstance(leaf, Tensor) or leaf.shape != tensor.shape or leaf.dtype != tensor.dtype:
        return False
    return bool((leaf.to(tensor.device) == tensor).all())


def _integers(bound: inspect.BoundArguments) -> Iterator[bool]:
    for _, leaf in _leaves(dict(bound.arguments), ()):
        yield isinstance(leaf, Tensor) and leaf.dim() > 0 and not leaf.is_floating_point()


def _by_name(bound: inspect.BoundArguments, name: str) -> list[tuple[Path, Any]]:
    """Returns all leaves with their paths, first those with the given name."""
    leaves = list(_leaves(dict(bound.arguments), ()))
    return sorted(leaves, key=lambda item: item[0][-1] != name)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping | UserDict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for idx, item in enumerate(value):
            yield from _leaves(item, (*path, idx))
    else:
        yield path, value


def _at(bound: inspect.BoundArguments, path: Path) -> Any:
    value: Any = bound.arguments
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
