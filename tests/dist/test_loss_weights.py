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
    """Returns a model whose head has the table of the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        bos_token_id=0, eos_token_id=0, n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY,
        n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
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
    passes: int = 1,
    average: bool = True,
    is_plain: bool = False,
) -> tuple[float, float, dict[str, Tensor], float]:
    """Makes one update by SGD.

    Returns:
        reduce_mean in training and in evaluation, the parameters, and the norm.
    """
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
        loss.backward() if is_plain else model.backward(loss)
        return loss

    @smp.step(**options)
    def evaluate(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return loss_of(model, batch)

    common = config.get("prescaled_batch", False)
    replica = smp.rdp_rank() if common else smp.dp_rank()
    optimizer.zero_grad()
    mean = 0.0
    for number in range(passes):
        mean = step(model, batches[replica * passes + number]).reduce_mean().item()
    norm = float(smp.clip_grad_norm_(model.parameters(), 1e9))
    optimizer.step()
    with torch.no_grad():
        evaluated = evaluate(model, batches[replica]).reduce_mean().item()
    state = model.state_dict()
    for to_theirs, _ in smp.state.module_manager.translate_functions:
        state = to_theirs(state)
    state = {name: v.clone() for name, v in state.items() if isinstance(v, Tensor)}
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
    is_plain: bool = False,
) -> None:
    size, config = LAYOUTS[layout]
    num = num_batches_of(layout)
    batches = batches or [padded_batch(replica) for replica in range(num)]
    # transformers computes losses in float32.
    bound = 1e-12 if loss_of is not of_model else 16 * torch.finfo(torch.float32).eps
    expected, grads = plain_run(loss_of, joined(batches))
    before = gpt2()
    results = pool.run(
        size, train, config, batches, loss_of, options, microbatches, 1, True, is_plain
    )
    seen = [mean for mean, _, _, _ in results]
    assert len({round(mean, 9) for mean in seen}) == num or num == 1
    assert sum(seen) / size == pytest.approx(expected, rel=bound)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    for mean, evaluated, state, total in results:
        assert total == pytest.approx(norm, rel=bound)
        updated = gpt2()
        updated.load_state_dict(state, strict=False)
        with torch.no_grad():
            own = loss_of(updated, batches[seen.index(mean) * num // size]).item()
        assert evaluated == pytest.approx(own, rel=bound, abs=bound)
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


@pytest.mark.parametrize(
    "layout", ["one process", "pipeline", "replicas", "sharded", "own batches"]
)
def test_a_microbatch_without_labels_counts_nothing(pool: Pool, layout: str) -> None:
    batches = [padded_batch(replica) for replica in range(num_batches_of(layout))]
    batches[0]["labels"][:2] = IGNORED
    check(pool, layout, masked_mean, {"weight": all_tokens}, batches=batches)
    check(pool, layout, of_model, {}, batches=batches)


@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas", "sharded"])
def test_a_plain_backward_in_the_step_function_begins_alike(pool: Pool, layout: str) -> None:
    check(pool, layout, of_model, {}, is_plain=True)
    check(pool, layout, of_script, {"weight": tokens_behind_the_first}, is_plain=True)


@pytest.mark.parametrize("layout", ["one process", "replicas", "pipeline and replicas"])
def test_gradients_of_several_passes_are_means_of_global_batches(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    num = num_batches_of(layout)
    batches = [padded_batch(number) for number in range(2 * num)]
    total = {name: torch.zeros_like(p) for name, p in gpt2().named_parameters()}
    for number in range(2):
        own = [batches[replica * 2 + number] for replica in range(num)]
        for name, grad in plain_run(of_script, joined(own))[1].items():
            total[name] += grad
    before = dict(gpt2().named_parameters())
    options = {"weight": tokens_behind_the_first}
    for _, _, state, _ in pool.run(size, train, config, batches, of_script, options, 4, 2):
        for name, parameter in before.items():
            error = (parameter.detach() - state[name] - total[name]).norm()
            assert error <= 1e-12 * total[name].norm() + 1e-15 * parameter.norm(), name


def constant_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return net


def hooked_gradients(rank: int, config: Config, is_plain: bool) -> list[Tensor]:
    """Returns the gradients that hooks on the hidden states see in this rank's microbatches."""
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    model = smp.DistributedModel(constant_net())
    seen: list[Tensor] = []

    @smp.step
    def step(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        loss = y.square().mean()
        loss.backward() if is_plain else model.backward(loss)
        return loss

    step(torch.arange(12.0, dtype=torch.float64).view(4, 3) + 12 * smp.dp_rank())
    smp.shutdown()
    return seen


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("layout", ["one process", "replicas", "sharded"])
def test_hooks_on_tensors_see_gradients_of_the_global_loss(
    pool: Pool, layout: str, is_plain: bool
) -> None:
    size, config = LAYOUTS[layout]
    plain = constant_net()
    y = plain(torch.arange(12.0 * size, dtype=torch.float64).view(-1, 3))
    y.retain_grad()
    y.square().mean().backward()
    found = pool.run(size, hooked_gradients, config, is_plain)
    torch.testing.assert_close(torch.cat([grad for own in found for grad in own]), y.grad)


def negative(x: Tensor) -> float:
    return -1.0


def not_a_number(x: Tensor) -> float:
    return float("nan")


def by_sample(x: Tensor) -> Tensor:
    return x.sum(1)


def weigh(rank: int, weight: Any, average: bool) -> str:
    import smp

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(3, 1), average_grads_across_microbatches=average)

    def step(x: Tensor) -> None:
        model.backward(model(x).mean())

    try:
        smp.step(step, weight=weight)(torch.ones(4, 3))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        smp.shutdown()
    return ""


@pytest.mark.parametrize(
    ("weight", "average", "words"),
    [
        ("tokens", True, "TypeError: weight of step function"),
        (negative, True, "returned -1; return how much the microbatch counts"),
        (not_a_number, True, "returned nan"),
        (by_sample, True, "a tensor of shape (2,); return one number"),
        (len, False, "average_grads_across_microbatches=False"),
    ],
)
def test_weights_that_are_not_usable_are_refused(
    pool: Pool, weight: Any, average: bool, words: str
) -> None:
    (text,) = pool.run(1, weigh, weight, average)
    assert words in text
