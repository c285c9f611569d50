"""PyTorch's own functions that clip gradients, on models of which ranks have parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad as torch_clip_grad
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.dist.pool import Pool
from tests.harness import (
    Config,
    Layers,
    assert_near,
    own_loss,
    own_samples,
    samples_of,
    train_step_of,
    wholes,
    wrapped,
)

STEPS = 4
CONFIGS: list[tuple[int, Config]] = [
    (1, {}),
    (2, {}),
    (2, {"pipeline_parallel_degree": 2}),
    (2, {"shard_optimizer_state": True}),
    (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
]
# Names that scripts have had since before the library was imported.
CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 0.05),
    "largest": lambda parameters: clip_grad_norm_(parameters, 0.01, norm_type=float("inf")),
    "value": lambda parameters: clip_grad_value_(parameters, 0.005),
    "one": lambda parameters: clip_grad_norm_(list(parameters)[-1], 0.01),
}


def reference(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters at the end, and what the function returned in each step."""
    net = Layers(has_loss=True).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    said = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).backward()  # type: ignore[no-untyped-call]
        said.append(_number(CLIPS[kind](net.parameters())))
        optimizer.step()
    return dict(net.state_dict()), said


def _number(returned: Tensor | None) -> float:
    return 0.0 if returned is None else float(returned)


def train(rank: int, kind: str, config: Config, dtype: torch.dtype) -> Any:
    import smp

    model = wrapped(config, Layers(has_loss=True).to(dtype))
    own = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer, _ = (smp.DistributedOptimizer(each, static_loss_scale=64.0) for each in (own, other))
    train_step = train_step_of(model, own_loss)
    said = []
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(own_samples(step, dtype))
        said.append(_number(CLIPS[kind](model.parameters())))
        optimizer.step()
    return wholes(model), said


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize(("size", "config"), CONFIGS)
def test_they_clip_as_in_one_process(pool: Pool, size: int, config: Config, kind: str) -> None:
    expected, norms = reference(kind)
    for values, said in pool.run(size, train, kind, config, torch.float64):
        assert said == pytest.approx(norms, rel=1e-9)
        assert_near([values], expected)


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("option", ["bf16", "fp16"])
def test_in_16_bits_they_clip_what_is_applied(pool: Pool, option: str, kind: str) -> None:
    expected, norms = reference(kind)
    config = {option: True, "shard_optimizer_state": True}
    for values, said in pool.run(2, train, kind, config, torch.float32):
        assert said == pytest.approx(norms, rel=0.05)
        assert_near([values], expected, 0.01)


def clip_after_the_end(rank: int) -> list[Any]:
    import smp

    functions = (clip_grad_norm_, torch_clip_grad.clip_grad_value_)
    before = [function.__closure__[0].cell_contents for function in functions]  # type: ignore
    for _ in range(2):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(Layers(has_loss=True))
        inside = functions[0].__closure__[0].cell_contents  # type: ignore
        assert inside is not before[0] and not model.partitioned
        stranger = nn.Parameter(torch.ones(4))
        stranger.grad = torch.ones(4) * (1 + smp.pp_rank())
        norm = float(clip_grad_norm_([stranger], 1.0))  # no parameter of a model: its own norm
        assert norm == pytest.approx(2.0 * (1 + smp.pp_rank()))
        smp.shutdown()
    after = [function.__closure__[0].cell_contents for function in functions]  # type: ignore
    return [one is other for one, other in zip(before, after, strict=True)]


def test_other_calls_are_pytorchs_own(pool: Pool) -> None:
    assert pool.run(2, clip_after_the_end) == [[True, True]] * 2
