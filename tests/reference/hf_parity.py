"""A model of Hugging Face beside one with the same weights and split layers. After ``smp.init``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp.nn import huggingface
from smp.replacement import replace_marked
from tests.reference import hugging_face as hf
from tests.reference.hugging_face import FAMILIES, VOCABULARY
from tests.reference.lifted_casts import lifted_casts
from tests.reference.tolerances import assert_close, relative_difference

NAMES = list(FAMILIES)
DECODERS = [name for name in NAMES if not FAMILIES[name].is_encoder]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
BATCH, SEQUENCE = 4, 7


def make_batch(name: str, *, left: bool = False) -> dict[str, Tensor]:
    """Padded samples; some labels are left out, and those of padding."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    lengths = torch.tensor([[7], [3], [5], [4]])
    mask = (torch.arange(SEQUENCE) < lengths).long()
    mask = mask.flip(1) if left else mask
    ids = ids * mask + (1 - mask) * (1 if name == "roberta" else 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 2] = labels[2, 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def replaced(model: nn.Module, *names: str) -> nn.Module:
    """The model with its outermost layers that can be replaced; or those of some classes only."""
    if not names:
        smp.set_tensor_parallelism(model)
    for module in list(model.modules()):
        if type(module).__name__ in names:
            smp.set_tensor_parallelism(module)
    new, used = replace_marked(model, torch.device("cpu"))
    assert used, "nothing was replaced"
    assert any(isinstance(part, smp.nn.DistributedModule) for part in new.modules())
    return new


def pair(
    name: str, dtype: torch.dtype, kind: str = "head", only: tuple[str, ...] = (), **changes: Any
) -> tuple[nn.Module, nn.Module]:
    """A plain model and one with the same weights and split layers."""
    family = hf.family(name)
    with lifted_casts(dtype == torch.float64):
        plain = family.build(kind, **changes).to(dtype)
        huggingface.register_available()  # from now on layers note what they are made with
        # Around layers of ours there may be theirs.
        made = family.build(kind, **changes).to(dtype)
    return plain, replaced(made, *only)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def difference_of_logits(got: Any, expected: Any, batch: Mapping[str, Any]) -> float:
    """Compares logits except at padding, which may have nothing to attend to."""
    a, b = got["logits"], expected["logits"]
    if a.dim() == 3:
        counted = batch["attention_mask"].bool()
        a, b = a[counted], b[counted]
    return relative_difference(a.to(b.dtype), b)


def compare(
    name: str,
    models: tuple[nn.Module, nn.Module],
    arguments: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    of_layers: bool = False,
) -> None:
    """Loss, logits and all gradients.

    Args:
        name: name of the family.
        models: the plain one and ours.
        arguments: arguments of the call.
        dtype: dtype of the models.
        of_layers: whether only the layers were replaced.
    """
    plain, ours = models
    limit = TOLERANCES[dtype]
    with lifted_casts(dtype == torch.float64):
        expected, got = plain(**arguments), ours(**arguments)
    assert isinstance(got, type(expected)) and isinstance(got, dict)
    assert set(got.keys()) == {key for key in expected if key != "past_key_values"}
    assert relative_difference(got["loss"].to(dtype), expected["loss"].to(dtype)) <= limit
    assert difference_of_logits(got, expected, arguments) <= limit
    expected["loss"].backward()
    got["loss"].backward()
    family = FAMILIES[name]
    to_hf = family.translators.FAMILY.translators("layer")[0] if of_layers else family.to_hf
    whole = to_hf(gradients(ours))
    wanted = {key: grad for key, grad in gradients(plain).items()}
    assert_close({key: whole[key] for key in wanted}, wanted, dtype, name, limit)
