"""The check of the loss: what is no mean over samples is told once, and usual means are not.

Each case is a step function as scripts have them, on a batch whose pieces have other losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import Pool

WIDTH, CLASSES, SAMPLES, LENGTH = 8, 5, 8, 6
Config = dict[str, Any]
LAYOUTS: dict[str, tuple[int, Config]] = {
    "one process": (1, {"microbatches": 4}),
    "replicas": (2, {}),
    "one batch": (2, {"context_parallel_degree": 2, "microbatches": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "microbatches": 2}),
    "split": (2, {"tensor_parallel_degree": 2, "microbatches": 2}),
}


class Net(nn.Module):
    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh, out: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = between()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.between(self.first(x)))))


class Codebook(nn.Module):
    """Counts what is near to each code, and moves the codes there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH, generator=generator(3)))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        if self.training:
            for code in range(4):
                own = x.detach()[nearest == code]
                if len(own):
                    self.codes[code] = 0.9 * self.codes[code] + 0.1 * own.mean(0)
        return x + (self.codes[nearest] - x).detach() + 0.1 * (x - self.codes[nearest])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, WIDTH, generator=generator(1))


def classes(*shape: int) -> Tensor:
    return torch.randint(0, CLASSES, (SAMPLES, *shape), generator=generator(2))


def padded() -> Tensor:
    labels = classes(LENGTH)
    for sample in range(SAMPLES):
        labels[sample, 1 + sample * (LENGTH - 1) // (SAMPLES - 1) :] = -100
    return labels


# ---- losses that are no mean over samples: model, arguments, loss, words of the reason ---------

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], Callable[..., Tensor], str]


def tokens(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


def class_weights(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.linspace(0.2, 3, CLASSES))


def smoothing(model: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.2, 3, CLASSES)
    return F.cross_entropy(model(x), y, weight=weight, label_smoothing=0.1)


def contrastive(model: Any, x: Tensor, y: Tensor) -> Tensor:
    a = F.normalize(model(x), dim=-1)
    b = F.normalize(model(x + 0.1), dim=-1)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def vicreg(model: Any, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    z = z - z.mean(0)
    cov = z.T @ z / max(len(z) - 1, 1)
    off = cov - cov.diagonal().diag()
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off.square().sum() / CLASSES


def dice(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p, t = model(x).sigmoid(), F.one_hot(y, CLASSES).float()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def ppo(model: Any, x: Tensor, y: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    logp = model(x).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (logp - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def ppo_arguments() -> tuple[Any, ...]:
    x, y = batch(), classes()
    with torch.no_grad():
        old = Net()(x).log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return x, y, torch.randn(SAMPLES, generator=generator(4)), old


def mixup(model: Any, x: Tensor, y: Tensor) -> Tensor:
    share = float(torch.distributions.Beta(1.0, 1.0).sample())
    order = torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


def dpo(model: Any, x: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    """The first half of the batch is chosen, the second rejected."""
    logp = model(x).log_softmax(-1).gather(-1, y[:, None])[:, 0] - reference
    chosen, rejected = logp.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo_arguments() -> tuple[Any, ...]:
    x, y, _, old = ppo_arguments()
    return x, y, old


def summed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def mean(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def flat() -> tuple[Any, ...]:
    return batch(), classes()


def net_of_zeros() -> nn.Module:
    net = Net()
    nn.init.zeros_(net.last.weight)
    nn.init.zeros_(net.last.bias)
    return net


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0])


def balanced(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss that is 1 for every batch, as one of several that count equally."""
    loss = F.cross_entropy(model(x), y)
    return loss / loss.detach()


TOLD: dict[str, Case] = {
    "divided by its own value": (Net, flat, balanced, "a value of the batch counts as a constant"),
    "token mean": (Net, lambda: (batch(LENGTH), padded()), tokens, "'labels' has negative entries"),
    "token mean of a head of zeros": (
        net_of_zeros,
        lambda: (batch(LENGTH), padded()),
        tokens,
        "'labels' has negative entries",
    ),
    "class weights": (Net, flat, class_weights, "@smp.step(weight=...)"),
    "smoothing with weights": (Net, flat, smoothing, "@smp.step(weight=...)"),
    "contrastive": (Net, flat, contrastive, "compares samples of the batch"),
    "VICReg": (Net, flat, vicreg, "compares samples of the batch"),
    "dice": (Net, flat, dice, "divides by something"),
    "normalised advantages": (Net, ppo_arguments, ppo, "compares samples of the batch"),
    "mixup": (Net, flat, mixup, "permutes the samples"),
    "DPO that concatenates": (Net, dpo_arguments, dpo, "compares samples of the batch"),
    "sum": (Net, flat, summed, "a sum over samples"),
    "BatchNorm": (
        lambda: Net(lambda: nn.BatchNorm1d(WIDTH)),
        flat,
        mean,
        "between.running_mean",
    ),
    "codebook": (lambda: Net(Codebook), flat, mean, "between.codes"),
    "time-major": (
        TimeMajor,
        lambda: (batch(LENGTH), classes(LENGTH)),
        tokens,
        "input_split_axes",
    ),
}


# ---- usual means ---------------------------------------------------------------------------------


class RoutedNoise(nn.Module):
    """Draws noise for what is routed here, which depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        is_here = x[..., 0] > 0
        return x.masked_scatter(is_here[..., None], x[is_here] * torch.rand_like(x[is_here]))


class Attention(nn.Module):
    """Attends with a mask, in whose operator the chance of dropout has its default."""

    def forward(self, x: Tensor) -> Tensor:
        # A mask of which pieces of one sample have as much as the whole.
        mask = torch.zeros(1, 1, x.shape[1], x.shape[1])
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)


def active(model: Any, x: Tensor, y: Tensor, old: Tensor) -> Tensor:
    """The mean over the samples that have a loss, which are all of them at first."""
    losses = F.relu(model(x).square().sum(1) / old - 0.7)
    return losses.sum() / (losses > 0).sum().clamp(min=1)


def active_arguments() -> tuple[Any, ...]:
    with torch.no_grad():
        return (*flat(), Net()(batch()).square().sum(1))


def answers(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """A mean over those that have an answer."""
    return F.cross_entropy(model(x), labels)


TOLD |= {
    "token mean behind noise for what is routed": (
        lambda: Net(RoutedNoise),
        lambda: (batch(LENGTH), padded()),
        tokens,
        "'labels' has negative entries",
    ),
    "token mean behind attention with a mask": (
        lambda: Net(Attention),
        lambda: (batch(LENGTH), padded()),
        tokens,
        "'labels' has negative entries",
    ),
    "mean over those with a loss": (Net, active_arguments, active, "divides by something"),
    "pieces without an answer": (
        Net,
        lambda: (batch(), classes().masked_fill(torch.arange(SAMPLES) % 4 > 0, -100)),
        answers,
        "'labels' has negative entries",
    ),
}


def fine_tuning(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Draws noise for each sample, and drops paths of some."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), *(1,) * (x.dim() - 1)).bernoulli_(0.8)
        return x + torch.randn_like(x) * F.dropout(x, 0.3) * kept


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    assert config.resid_pdrop > 0
    net = GPT2LMHeadModel(config)
    net.__dict__["last"] = net.transformer.h[1]  # what pipelines have on their second rank
    return net


def ids() -> Tensor:
    return torch.randint(0, 32, (SAMPLES, LENGTH), generator=generator(2))


def padded_ids() -> tuple[Any, ...]:
    labels = ids()
    labels[padded() < 0] = -100
    return ids(), labels


class Masking(nn.Module):
    """Gives out which features count: as many for each sample, and none are positive for some."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > x.median(-1, keepdim=True).values).float()
        return F.relu(x - x.amax(-1, keepdim=True) * (x[..., :1] > 0)), mask


def masked(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out, mask = model(x)
    return (out.square() * mask).sum() / mask.sum()


def numpy_share(model: Any, x: Tensor, y: Tensor) -> Tensor:
    share = float(np.random.beta(1.0, 1.0))
    return F.cross_entropy(model(x), y, label_smoothing=share)


def numpy_noise(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x + torch.from_numpy(np.random.rand(*x.shape)).float()), y)


def with_eval_norm() -> nn.Module:
    net = Net(lambda: nn.BatchNorm1d(WIDTH))
    net.between.eval()
    return net


class WithoutTangents(torch.autograd.Function):
    """A function of a user, for which forward mode is not written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def without_tangents(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cast(Tensor, WithoutTangents.apply(F.cross_entropy(model(x), y)))


def ratio(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mean with values of samples that count as constants, and roots at zero."""
    out = model(x)
    logp = out.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return -((logp - logp.detach()).exp() * x.sum(-1) - (out - out.detach()).norm(dim=-1)).mean()


USUAL: dict[str, Case] = {
    "function without forward mode": (Net, flat, without_tangents, ""),
    "ratio to its own value": (Net, flat, ratio, ""),
    "mean": (Net, flat, mean, ""),
    "uneven batch": (Net, lambda: (batch()[:7], classes()[:7]), mean, ""),
    "token mean without padding": (Net, lambda: (batch(LENGTH), classes(LENGTH)), tokens, ""),
    "noise and dropout": (lambda: Net(Noisy), flat, mean, ""),
    "noise for what is routed": (lambda: Net(RoutedNoise), flat, mean, ""),
    "one number of NumPy": (Net, flat, numpy_share, ""),
    "outputs with a mask, some are zero": (lambda: with_last(Masking), flat, masked, ""),
    "GPT-2 with dropout": (gpt2, lambda: (ids(), ids()), fine_tuning, ""),
    "padded GPT-2, weighed by itself": (gpt2, padded_ids, fine_tuning, ""),
    "BatchNorm in evaluation": (with_eval_norm, flat, mean, ""),
}
HALF = {"fp16": {"fp16": True}, "bf16": {"bf16": True}}


class Sized(nn.Module):
    """Works with microbatches of its size alone."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 2:
            raise ValueError("expected 2 samples")
        return x


UNKNOWN: dict[str, Case] = {
    "noise of NumPy": (Net, flat, numpy_noise, "random numbers"),
}
FAILING: dict[str, Case] = {
    "in the first module": (lambda: Net(Sized), flat, mean, ""),
    "in the last module": (lambda: with_last(Sized), flat, mean, ""),
}


def with_last(make: Callable[[], nn.Module]) -> nn.Module:
    net = Net()
    net.last = nn.Sequential(net.last, make())  # type: ignore[assignment]
    return net


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self.lines.append(record.getMessage())


def check(
    rank: int,
    config: Config,
    name: str,
    cases: str = "TOLD",
    plain: bool = False,
    weight: Any = "auto",
) -> tuple[list[str], list[str], list[float]]:
    return check_case(globals()[cases][name], config, plain, weight)


def check_case(
    case: Case, config: Config, plain: bool = False, weight: Any = "auto", num_steps: int = 2
) -> tuple[list[str], list[str], list[float]]:
    """Returns outcomes, warnings, and the losses of the steps and the numbers of calls."""
    import smp

    make, arguments, loss_of, _ = case
    listener = Listener()
    logging.getLogger("smp").addHandler(listener)
    logging.getLogger("smp").setLevel(logging.INFO)
    try:
        smp.init({"ddp": True, **config})
        net = make()
        if smp.tp_size() > 1:
            net = with_split_layer(net)
        model = smp.DistributedModel(net)
        if smp.pp_size() > 1:
            smp.set_partition(net.last, 1)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        calls = [0, 0]

        @smp.step(weight=weight)
        def train(x: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
            calls[smp.is_tracing()] += 1
            loss = loss_of(model, x, labels, *others)
            if plain:
                loss.backward()
            else:
                model.backward(loss)
            return loss

        losses = []
        for _ in range(num_steps):
            optimizer.zero_grad()
            losses.append(float(train(*arguments()).reduce_mean()))
            optimizer.step()
        from smp.observe.batch_check.check import BatchCheckObserver
        from smp.world import runtime

        outcomes = list(runtime.current().observers.of_kind(BatchCheckObserver).outcomes.values())
        lines = [line for line in listener.lines if " of step" in line]
        return outcomes, lines, [*losses, *calls]
    finally:
        logging.getLogger("smp").removeHandler(listener)


def with_split_layer(net: nn.Module) -> nn.Module:
    import smp

    if hasattr(net, "transformer"):
        smp.set_tensor_parallelism(net)
    if hasattr(net, "second"):
        net.second = smp.nn.DistributedLinear(WIDTH, WIDTH)  # type: ignore[attr-defined]
    return net


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_that_is_no_mean_over_samples_is_told_once(pool: Pool, layout: str, name: str) -> None:
    size, config = LAYOUTS[layout]
    results = pool.run(size, check, {"auto_partition": False, **config}, name)
    outcomes = [outcome for outcomes, _, _ in results for outcome in outcomes]
    assert len(outcomes) == size and all(o.startswith("differs: ") for o in outcomes), outcomes
    told = [line for _, lines, _ in results for line in lines]
    assert len(told) == 1 and TOLD[name][3] in told[0], told


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_mean_is_not_told(pool: Pool, layout: str, name: str) -> None:
    size, config = LAYOUTS[layout]
    results = pool.run(size, check, {"auto_partition": False, **config}, name, "USUAL")
    assert [outcomes for outcomes, _, _ in results] == [["equal"]] * size
    assert not [line for _, lines, _ in results for line in lines]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas"])
@pytest.mark.parametrize("name", ["mean", "GPT-2 with dropout"])
def test_mean_in_16_bits_is_not_told_and_token_mean_is(
    pool: Pool, layout: str, dtype: str, name: str
) -> None:
    size, config = LAYOUTS[layout]
    config = {"auto_partition": False, **config, **HALF[dtype]}
    results = pool.run(size, check, config, name, "USUAL")
    assert [outcomes for outcomes, _, _ in results] == [["equal"]] * size
    results = pool.run(size, check, config, "token mean")
    assert all(o.startswith("differs: ") for outcomes, _, _ in results for o in outcomes), results


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("layout", ["one process", "pipeline", "replicas"])
def test_what_cannot_be_checked_is_told_once(pool: Pool, layout: str, name: str) -> None:
    size, config = LAYOUTS[layout]
    results = pool.run(size, check, {"auto_partition": False, **config}, name, "UNKNOWN")
    told = [line for _, lines, _ in results for line in lines]
    assert len(told) == 1 and "could not check" in told[0] and UNKNOWN[name][3] in told[0], told


def num_labels(x: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_mean_with_its_weight_is_equal(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    config = {"auto_partition": False, **config}
    results = pool.run(size, check, config, "token mean", "TOLD", False, num_labels)
    assert [outcomes for outcomes, _, _ in results] == [["equal"]] * size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strict_setting_raises_on_all_ranks(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    config = {"auto_partition": False, **config}
    env = {"SMP_CHECK_FIRST_STEP": "1"}
    outcomes = pool.outcomes(size, check, config, "token mean", env=env)
    assert {outcome.error for outcome in outcomes} == {"FirstStepDifference"}
    assert all("-100" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_failure_in_the_check_is_no_failure_of_the_step(pool: Pool, layout: str, name: str) -> None:
    size, config = LAYOUTS[layout]
    config = {"auto_partition": False, **config, "microbatches": 4}
    results = pool.run(size, check, config, name, "FAILING")
    outcomes = {outcome for outcomes, _, _ in results for outcome in outcomes}
    assert len(outcomes) == 1 and "expected 2 samples" in outcomes.pop()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["BatchNorm", "codebook"])
def test_training_is_the_same_with_and_without_the_check(
    pool: Pool, layout: str, name: str
) -> None:
    size, config = LAYOUTS[layout]
    config = {"auto_partition": False, **config}
    runs = [
        pool.run(size, check, config, name, env={"SMP_CHECK_FIRST_STEP": setting})
        for setting in ("auto", "0")
    ]
    assert [outcomes for outcomes, _, _ in runs[1]] == [["off: SMP_CHECK_FIRST_STEP is 0"]] * size
    # Losses, and calls that a counter of the script has seen.
    assert [numbers for *_, numbers in runs[0]] == [numbers for *_, numbers in runs[1]]


def test_plain_backward_is_noted(pool: Pool) -> None:
    config = {"microbatches": 4}
    results = pool.run(1, check, config, "token mean", "TOLD", True)
    assert results[0][0][0].startswith("differs: ")
