"""Losses that are no mean over samples, against the plain script on the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import Pool

Config = dict[str, Any]
BATCH, LENGTH, VOCABULARY, IGNORED = 8, 12, 31, -100

LAYOUTS: dict[str, tuple[int, Config]] = {
    "one process": (1, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "replicas": (2, {}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "own batches": (2, {"tensor_parallel_degree": 2}),
    "common batch": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "pipeline and replicas": (4, {"pipeline_parallel_degree": 2}),
    "common batch and replicas": (4, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        bos_token_id=0, eos_token_id=0, n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def padded_batch(replica: int, num_samples: int = BATCH) -> dict[str, Tensor]:
    """Sequences of very different lengths, labels ignored behind their end."""
    generator = torch.Generator().manual_seed(100 + replica)
    ids = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (num_samples,), generator=generator)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, IGNORED),
    }


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1), ignore_index=IGNORED)


Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


def of_model(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def of_script(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return shifted_loss(logits, batch["labels"])


def masked_mean(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """0 / 0 where nothing counts, with gradients that are NaN."""
    logits = model(batch["input_ids"]).logits
    counts = (batch["labels"] != IGNORED).to(logits.dtype)
    return (logits.square().mean(-1) * counts).sum() / counts.sum()


def tokens_behind_the_first(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def all_tokens(model: Any, batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORED).sum())


def plain_run(loss_of: Loss, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = gpt2()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def train(
    rank: int,
    config: Config,
    batches: list[dict[str, Tensor]],
    loss_of: Loss,
    options: dict[str, Any],
    microbatches: int,
    *,
    passes: int = 1,
    average: bool = True,
) -> tuple[float, float, dict[str, Tensor], float]:
    """One update by SGD: reduce_mean, in evaluation too, the parameters, and the norm."""
    import smp

    smp.init({"ddp": True, "microbatches": microbatches, **config})
    if smp.tp_size() > 1:
        with smp.tensor_parallelism():
            plain = gpt2()
    else:
        plain = gpt2()
    model = smp.DistributedModel(
        plain, backward_passes_per_step=passes, average_grads_across_microbatches=average
    )
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step(**options)
    def step(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    common = config.get("prescaled_batch", False)
    replica = smp.rdp_rank() if common else smp.dp_rank()
    optimizer.zero_grad()
    mean = 0.0
    for number in range(passes):
        mean = step(model, batches[replica * passes + number]).reduce_mean().item()
    norm = float(smp.clip_grad_norm_(model.parameters(), 1e9))
    optimizer.step()
    with torch.no_grad():
        evaluated = step(model, batches[replica]).reduce_mean().item()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return mean, evaluated, state, norm


def num_batches_of(layout: str) -> int:
    size, config = LAYOUTS[layout]
    tp = config.get("tensor_parallel_degree", 1) if config.get("prescaled_batch") else 1
    return size // config.get("pipeline_parallel_degree", 1) // tp


def check(
    pool: Pool,
    layout: str,
    loss_of: Loss,
    options: dict[str, Any],
    *,
    microbatches: int = 4,
    batches: list[dict[str, Tensor]] | None = None,
) -> None:
    size, config = LAYOUTS[layout]
    num = num_batches_of(layout)
    batches = batches or [padded_batch(replica) for replica in range(num)]
    # transformers computes losses in float32.
    bound = 1e-12 if loss_of is not of_model else 16 * torch.finfo(torch.float32).eps
    expected, grads = plain_run(loss_of, joined(batches))
    before = gpt2()
    results = pool.run(size, train, config, batches, loss_of, options, microbatches)
    seen = [mean for mean, _, _, _ in results]
    assert len({round(mean, 9) for mean in seen}) == num or num == 1
    assert sum(seen) / size == pytest.approx(expected, rel=bound)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    for _, _, state, total in results:
        assert total == pytest.approx(norm, rel=bound)
        for name, parameter in before.named_parameters():
            found = parameter.detach() - state[name]
            assert grads[name].norm() > 0
            rounding = 2 * torch.finfo(torch.float64).eps * parameter.norm()
            error = (found - grads[name]).norm()
            assert error <= bound * max(grads[name].norm(), 1e-3 * norm) + rounding, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_trains_as_in_the_plain_script(pool: Pool, layout: str) -> None:
    check(pool, layout, of_model, {})


@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas", "sharded"])
def test_a_weight_of_the_script_counts_what_it_says(pool: Pool, layout: str) -> None:
    check(pool, layout, of_script, {"weight": tokens_behind_the_first})


@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas"])
def test_uneven_microbatches_and_replicas_weigh_by_their_labels(pool: Pool, layout: str) -> None:
    sizes = [7, 5]
    batches = [padded_batch(r, sizes[r]) for r in range(num_batches_of(layout))]
    check(pool, layout, of_model, {}, microbatches=3, batches=batches)


@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas"])
def test_a_microbatch_without_labels_counts_nothing(pool: Pool, layout: str) -> None:
    batches = [padded_batch(replica) for replica in range(num_batches_of(layout))]
    batches[0]["labels"][:2] = IGNORED
    check(pool, layout, masked_mean, {"weight": all_tokens}, batches=batches)
    check(pool, layout, of_model, {}, batches=batches)
