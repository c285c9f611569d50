"""Training with optimizers that read whole matrices, on any layout and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import train_step_of

SAMPLES = 8
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
NO_CLIP = {"sdp_gradient_clipping": 1e9}
#: Number of processes and configuration by layout.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "sdp2": (2, {**SHARDED, **NO_CLIP}),
    "state2": (2, {"shard_optimizer_state": True}),
    "state3": (3, {"shard_optimizer_state": True}),
    "pp2-tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "tp2-state2": (4, {"tensor_parallel_degree": 2, "shard_optimizer_state": True}),
    "tp2-sdp2": (4, {"tensor_parallel_degree": 2, **SHARDED, **NO_CLIP}),
    "pp2-state2": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
    "sdp2-dp2": (4, {**SHARDED, **NO_CLIP}),
}
#: Layouts in which ranks hold parts of parameters.
SPREAD = [name for name in LAYOUTS if name not in ("pp2", "dp2")]


class Shampoo(torch.optim.Optimizer):
    """Multiplies gradients of matrices with roots of the sums of their squares on both sides."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                    if p.dim() == 2:
                        for dim in (0, 1):
                            state[f"factor{dim}"] = torch.eye(p.shape[dim], dtype=p.dtype)
                state["step"] += 1
                if p.dim() == 2:
                    state["factor0"] += update @ update.T
                    state["factor1"] += update.T @ update
                    update = _root(state["factor0"]) @ update @ _root(state["factor1"])
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.add_(state["momentum"], alpha=-group["lr"] / state["step"])
        return loss


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lamb(torch.optim.Optimizer):
    """Scales Adam's update of a parameter by the norms of parameter and update."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + 0.1 * p
                p.sub_(update * (p.norm() / update.norm()), alpha=group["lr"])
        return loss


class EightBits(torch.optim.Optimizer):
    """Keeps momentum in codes of 8 bits, with a scale for each 16 elements of a large parameter."""

    LEAST, BLOCK = 64, 16

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = p.grad.clone()
                if state:
                    momentum += group["momentum"] * self._decoded(state, p)
                p.add_(momentum, alpha=-group["lr"])
                self._encode(state, momentum)
        return loss

    def _encode(self, state: dict[str, Any], momentum: Tensor) -> None:
        if momentum.numel() < self.LEAST:
            state["momentum"] = momentum
            return
        flat = nn.functional.pad(momentum.flatten(), (0, -momentum.numel() % self.BLOCK))
        blocks = flat.view(-1, self.BLOCK)
        state["scale"] = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        codes = (blocks / state["scale"] * 127).round().to(torch.int8)
        state["codes"] = codes.flatten()[: momentum.numel()].view_as(momentum)

    def _decoded(self, state: dict[str, Any], p: Tensor) -> Tensor:
        if "momentum" in state:
            return state["momentum"]  # type: ignore[no-any-return]
        scales = state["scale"].expand(-1, self.BLOCK).flatten()[: p.numel()].view_as(p)
        return state["codes"] * scales / 127


def make_optimizers(name: str, parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
    """Makes the optimizers of a script: Muon updates matrices, and AdamW the rest."""
    own = list(parameters)
    if name == "Muon":
        matrices = [p for p in own if p.dim() == 2]
        rest = [p for p in own if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.02, eps=1e-3)]
    if name == "Adafactor":
        return [torch.optim.Adafactor(own, lr=0.05)]
    if name == "AdamW":
        return [torch.optim.AdamW(own, lr=0.02, eps=1e-3)]
    return [{"Shampoo": Shampoo, "LAMB": Lamb, "8 bits": EightBits}[name](own)]


def make_net(dtype: torch.dtype, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    sizes = (8, 12, 6, 10, 8)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    parts = [part for layer in layers for part in (layer, nn.Tanh())]
    return nn.Sequential(*parts).to(dtype)


def batch_of(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


@dataclass
class Job:
    """A training run.

    Attributes:
        layout: name in `LAYOUTS`.
        optimizer: name for `make_optimizers`.
        config: further keys for ``smp.init``.
        dtype: dtype of the model.
        clip: largest norm of the gradients, or None.
    """

    layout: str
    optimizer: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    clip: float | None = None

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    def __str__(self) -> str:
        return "-".join([self.layout, self.optimizer, *map(str, self.config.values())])


class Run:
    """The model and optimizers of a job on this rank, after `smp.init`."""

    def __init__(self, job: Job, seed: int = 5) -> None:
        import smp

        common = {"ddp": True, "microbatches": 2, "prescaled_batch": True}
        smp.init({**common, **LAYOUTS[job.layout][1], **job.config})
        self.job = job
        net = make_net(job.dtype, seed + smp.rdp_rank())  # the first replica's values count
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(net, True)
        self.model = smp.DistributedModel(net)
        inner = make_optimizers(job.optimizer, self.model.parameters())
        self.optimizers = [smp.DistributedOptimizer(each) for each in inner]
        self._train_step = train_step_of(self.model, loss_of)

    def backward(self, step: int) -> float:
        import smp

        own = batch_of(step, self.job.dtype).chunk(smp.rdp_size())[smp.rdp_rank()]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return float(self._train_step(own).reduce_mean())

    def train(self, steps: Iterable[int]) -> None:
        import smp

        for step in steps:
            self.backward(step)
            if self.job.clip is not None:
                smp.clip_grad_norm_(self.model.parameters(), self.job.clip)
            for optimizer in self.optimizers:
                optimizer.step()

    @property
    def bytes_sent(self) -> int:
        return sum(optimizer.whole_tensors.bytes_sent for optimizer in self.optimizers)

    def owned(self) -> list[dict[int, bool]]:
        """Flags of tensors that are updated whole, by optimizer and index."""
        from smp.precision.holdings import parameters_of

        result = []
        for optimizer in self.optimizers:
            owned = optimizer.whole_tensors.owned
            numbered = enumerate(parameters_of(optimizer.optimizer))
            result.append({index: owned[p] for index, p in numbered if p in owned})
        return result

    def whole(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


class Alone:
    """The plain script in one process, on the batches of all replicas."""

    def __init__(self, job: Job) -> None:
        self.net = make_net(job.dtype)
        self.optimizers = make_optimizers(job.optimizer, self.net.parameters())
        self._job = job

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss_of(self.net, batch_of(step, self._job.dtype)).backward()
            if self._job.clip is not None:
                nn.utils.clip_grad_norm_(self.net.parameters(), self._job.clip)
            for optimizer in self.optimizers:
                optimizer.step()


def distance(state: dict[str, Tensor], net: nn.Module) -> float:
    """Returns the largest difference of a value from that of one process."""
    expected = net.state_dict()
    assert set(state) == set(expected) != set()
    return max(float((state[name].cpu() - value).abs().max()) for name, value in expected.items())
