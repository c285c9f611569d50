"""A mask that hides nothing does not reach attention; a mask that hides something always does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import smp
from smp.modules.host_values import upload
from smp.nn import attention as attention_layers
from smp.tensor_parallel import regions
from tests.reference import hugging_face as hf
from tests.reference.hf_parity import (
    BATCH,
    DECODERS,
    NAMES,
    SEQUENCE,
    compare,
    make_batch,
    pair,
    replaced,
)
from tests.reference.hugging_face import HIDDEN, LAYERS
from tests.reference.lifted_casts import lifted_casts
from tests.reference.tolerances import relative_difference

pytestmark = pytest.mark.usefixtures("running")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Returns the list of masks with which attention is called."""
    seen: list[Tensor | None] = []
    original = attention_layers.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any) -> Tensor:
        seen.append(mask)
        return original(query, key, value, mask, *args)

    monkeypatch.setattr(attention_layers, "attend", attend)
    return seen


def full_batch(name: str) -> dict[str, Tensor]:
    batch = make_batch(name)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_ones_is_left_out(name: str, masks: list[Tensor | None]) -> None:
    compare(name, pair(name, torch.float64), full_batch(name), torch.float64)
    assert masks == [None] * LAYERS


@pytest.mark.parametrize("name", NAMES)
def test_padding_stays_masked(name: str, masks: list[Tensor | None]) -> None:
    batch = make_batch(name)
    compare(name, pair(name, torch.float64), batch, torch.float64)
    assert len(masks) == LAYERS and all(mask is not None for mask in masks)
    one = full_batch(name)
    one["attention_mask"][2, -1] = 0
    masks.clear()
    compare(name, pair(name, torch.float64), one, torch.float64)
    assert len(masks) == LAYERS and all(mask is not None for mask in masks)


@pytest.mark.parametrize("name", NAMES)
def test_single_layers_get_no_mask_of_zeros(name: str, masks: list[Tensor | None]) -> None:
    models = pair(name, torch.float64, only=(hf.family(name).layer,))
    compare(name, models, full_batch(name), torch.float64, of_layers=True)
    # A causal mask, which transformers makes in some releases and for windows, says something.
    assert len(masks) == LAYERS
    assert all(mask is None or bool(mask.any()) for mask in masks)


@pytest.mark.parametrize("full", [True, False])
def test_masks_of_cross_attention(full: bool, masks: list[Tensor | None]) -> None:
    models = pair("gpt2", torch.float64, add_cross_attention=True)
    batch: dict[str, Any] = full_batch("gpt2")
    generator = torch.Generator().manual_seed(3)
    batch["encoder_hidden_states"] = torch.randn(
        BATCH, 5, HIDDEN, generator=generator, dtype=torch.float64
    )
    batch["encoder_attention_mask"] = torch.ones(BATCH, 5, dtype=torch.long)
    batch["encoder_attention_mask"][1, 3:] = int(full)
    compare("gpt2", models, batch, torch.float64)
    assert [mask is None for mask in masks] == [True, full] * LAYERS


def test_layers_by_themselves_leave_it_to_their_callers(masks: list[Tensor | None]) -> None:
    """An additive mask may be given for its gradient, or written to between two layers."""
    layer = smp.nn.DistributedTransformerLayer(2, 4, 8, 16, 0.0, 0.0, causal_mask_size=6)
    mask = torch.zeros(1, 1, 1, 5, requires_grad=True)
    layer((torch.randn(2, 5, 8), mask))[0].sum().backward()
    assert masks == [mask] and mask.grad is not None


# ---- on a device ---------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Returns a device without numbers.

    Its products are PyTorch's, because smp's own ask for the device's autocast.
    """

    def products(x: Tensor, weights: Any, biases: Any, *_: Any) -> list[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    monkeypatch.setattr(regions, "gathered_linears", products)
    return torch.device("meta")


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_nobody_looks_at_a_mask_on_a_device(
    name: str, full: bool, masks: list[Tensor | None], device: torch.device
) -> None:
    """Uses the host's values of uploaded masks; a mask from elsewhere remains a mask."""
    model = replaced(hf.family(name).build()).to(device)
    batch = full_batch(name) if full else make_batch(name)
    loss = model(**upload(batch, device)).loss
    assert loss.device == device
    assert [mask is None for mask in masks] == [full] * LAYERS
    masks.clear()
    elsewhere = {key: torch.empty_like(value, device=device) for key, value in batch.items()}
    assert model(**elsewhere).loss.device == device
    assert len(masks) == LAYERS and all(mask is not None for mask in masks)


def test_positions_are_looked_at_on_the_host(device: torch.device) -> None:
    if hf.is_older():
        pytest.skip("transformers 4.30.2 knows no packed samples")
    model = replaced(hf.family("gpt2").build()).to(device)
    batch = full_batch("gpt2")
    batch.pop("attention_mask")
    batch["position_ids"] = torch.arange(SEQUENCE).expand(BATCH, -1).contiguous()
    assert model(**upload(batch, device)).loss.device == device
    batch["position_ids"] = batch["position_ids"] % 3
    with pytest.raises(ValueError, match="starts anew inside of a sample"):
        model(**upload(batch, device))


# ---- why padding stays masked ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptj", "gptneox"])
def test_without_its_mask_right_padding_changes_what_a_caller_can_see(name: str) -> None:
    """Loss, gradients and real positions are those with the mask; outputs at padding are not."""
    batch = make_batch(name)
    kept = batch["attention_mask"].bool()
    bare = {key: value for key, value in batch.items() if key != "attention_mask"}
    results = []
    for arguments in (batch, bare):
        model = replaced(hf.family(name).build().double())
        output = model(**arguments)
        output.loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((output.loss.detach(), output.logits.detach(), grads))
    (loss, logits, grads), (bare_loss, bare_logits, bare_grads) = results
    assert relative_difference(bare_loss, loss) <= 1e-9
    assert relative_difference(bare_grads, grads) <= 1e-9
    assert relative_difference(bare_logits[kept], logits[kept]) <= 1e-9
    assert relative_difference(bare_logits[~kept], logits[~kept]) > 1e-3
    # ours with the mask equals theirs at padding, too
    with lifted_casts():
        theirs = hf.family(name).build().double()(**batch).logits
    assert relative_difference(logits[~kept], theirs[~kept]) <= 1e-9
