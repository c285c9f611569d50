"""A split model is cut between its layers: pipeline and tensor parallelism at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import strip
from tests.reference import transformer as plain
from tests.reference.split_modules import close, float64, load_slices

MICROBATCHES = 2
SAMPLES = 4  # of one call of the step function
_MODEL: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": 12,
    "intermediate_size": 10,
    "vocab_size": 17,
    "num_positions": 8,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "causal_mask_size": 8,
    "pre_layernorm": True,
    "post_layernorm": False,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "rotary": {
        "rotary_dim": 4,
        "use_position_embedding": False,
        "tie_word_embedding": False,
        "parallel_attn_output": True,
    },
    "cross_left_out": {"add_cross_attention": True},
}


def make_batch(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(50 + batch)
    ids = torch.randint(17, (SAMPLES, 5), generator=generator)
    kept = torch.randint(2, 6, (SAMPLES, 1), generator=generator)
    mask = (torch.arange(5)[None] >= kept).long()
    positions = torch.randint(8, (SAMPLES, 5), generator=generator)
    return {"ids": ids, "mask": mask, "positions": positions}


def call(model: Any, batch: dict[str, Tensor], variant: str) -> tuple[Tensor, Tensor]:
    ids = batch["ids"]
    cross = (None, None) if variant == "cross_left_out" else ()
    loss, logits = model((ids, batch["mask"], None, batch["positions"], *cross, ids))
    return loss, logits


def make_reference(variant: str) -> plain.LMHead:
    torch.manual_seed(1)
    model = plain.LMHead(**_MODEL, **_VARIANTS[variant])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def train(rank: int, pp: int, tp: int, prescaled: bool, optimize: str, variant: str) -> int:
    """Compares one step with the reference; returns the number of local parameters."""
    with float64():
        return _train(pp, tp, prescaled, optimize, variant)


def _train(pp: int, tp: int, prescaled: bool, optimize: str, variant: str) -> int:
    import smp
    from smp.tensor_parallel import sharding

    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "ddp": tp > 1,
            "microbatches": MICROBATCHES,
            "prescaled_batch": prescaled,
            "optimize": optimize,
        }
    )
    reference = make_reference(variant)
    split = smp.nn.DistributedTransformerLMHead(**_MODEL, **_VARIANTS[variant])
    load_slices(split, reference)
    model = smp.DistributedModel(split)

    @smp.step
    def step(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, logits = call(model, batch, variant)
        model.backward(loss)
        return loss, logits

    own = smp.rdp_rank() if prescaled else smp.tp_rank()
    losses, logits = step(make_batch(own))
    expected = []
    for batch in range(1 if prescaled else tp):
        whole = make_batch(batch)
        for idx in range(MICROBATCHES):
            part = {name: x.chunk(MICROBATCHES)[idx] for name, x in whole.items()}
            expected.append((batch, *call(reference, part, variant)))
    torch.stack([loss for _, loss, _ in expected]).mean().backward()
    mine = [(loss, out) for batch, loss, out in expected if batch == own]
    for idx, (loss, out) in enumerate(mine):
        close(losses.outputs[idx].detach(), loss.detach(), f"loss of microbatch {idx}")
        close(logits.outputs[idx].detach(), out.detach(), f"logits of microbatch {idx}")
    whole_grads = {name: p.grad for name, p in reference.named_parameters()}
    local = dict(model.local_named_parameters())
    for name, parameter in local.items():
        grad = whole_grads[strip(name)]
        if "cross_attention." in name:
            assert parameter.grad is None and grad is None, name
            continue
        assert parameter.grad is not None and grad is not None, name
        interval = sharding.interval_of(parameter)
        close(parameter.grad, sharding.slice_of(grad, interval), f"gradient of {name}")
    return len(local)


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize(
    ("pp", "tp", "prescaled"),
    [(2, 1, False), (1, 2, False), (2, 2, False), (2, 2, True)],
    ids=["pp2", "tp2", "pp2_tp2", "pp2_tp2_prescaled"],
)
def test_a_cut_model_equals_one_process(
    pool: Pool, pp: int, tp: int, prescaled: bool, optimize: str, variant: str
) -> None:
    held = pool.run(pp * tp, train, pp, tp, prescaled, optimize, variant)
    whole = len(list(make_reference(variant).parameters()))
    assert all(0 < number < whole for number in held) if pp > 1 else held == [whole] * tp
