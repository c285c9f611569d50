"""Step time of a mixture of experts on two ranks with batches of their own.

`experts` has half of the experts on each rank and sends tokens there, `features` half of each
expert and the tokens of both, `replicas` has all of them on both and sums all gradients; attention
and routers are replicas in all. `exchange` is what `experts` spends on finding out who sends what,
on sending tokens and weights and on bringing results back, forward and backward, with the routes of
the same layers and nothing in between. A step is forward, backward and the reduction of gradients.
The losses must agree, or the run fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timer import Timing, compare, measure
from torch import Tensor, distributed, nn
from transformers import MixtralConfig, MixtralForCausalLM
from workers import Worker

import smp
from smp.tensor_parallel import regions, tokens

BASE = {"tensor_parallel_degree": 2, "ddp": True}
_EXPERTS = "model.layers.*.mlp.experts"
FEATURES = {
    _EXPERTS: "moe_tp_experts",
    f"{_EXPERTS}.gate_up_proj": "packed_colwise",
    f"{_EXPERTS}.down_proj": "rowwise",
}


def make_model(shape: dict[str, int]) -> Any:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(use_cache=False, **shape))


def training(
    shape: dict[str, int], how: str, batch: dict[str, Tensor]
) -> tuple[Callable[[], Tensor], nn.Module]:
    smp.init({**BASE, "expert_parallel_degree": 2 if how == "experts" else 1})
    plain = make_model(shape)
    if how == "features":
        smp.set_tensor_parallelism(plain, plan=FEATURES)
    if how == "experts":
        for layer in plain.model.layers:
            smp.set_tensor_parallelism(layer.mlp.experts)
    model = smp.DistributedModel(plain)

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss.detach()

    def run() -> Tensor:
        loss = train_step(batch).outputs[0]
        model.zero_grad()
        return loss

    return run, plain


def choices_of(plain: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Numbers of experts [tokens, k] that each layer chooses."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
        for layer in plain.model.layers
    ]
    with torch.no_grad():
        plain(**batch)
    for hook in hooks:
        hook.remove()
    return found


def exchange(choices: list[Tensor], shape: dict[str, int]) -> Callable[[], None]:
    """The communication of all layers, forward and backward."""
    sizes = [shape["num_local_experts"] // 2] * 2
    x = torch.randn(choices[0].shape[0], shape["hidden_size"], requires_grad=True)
    weights = torch.rand(choices[0].shape, requires_grad=True)
    dy = torch.randn_like(x)

    def run() -> None:
        for ids in choices:
            routes = tokens.route(ids, sizes)
            rows, factors, _ = tokens.dispatch((x, weights, ids), routes)
            y = tokens.combine(rows, routes)
            torch.autograd.backward([y, factors], [dy, torch.ones_like(factors)])

    return run


def bytes_of(plain: nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in plain.parameters()) / 1e6


def main() -> None:
    worker = Worker("experts")
    shape, samples = dict(worker.config["mixtral"]), worker.config["batch_size"]
    length = worker.config["sequence"]
    worker.start(BASE)
    generator = torch.Generator().manual_seed(1 + smp.tp_rank())
    ids = torch.randint(2, shape["vocab_size"], (samples, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    replicas, whole = training(shape, "replicas", batch)
    features, split = training(shape, "features", batch)
    experts, spread = training(shape, "experts", batch)
    expected = replicas()
    for run in (features, experts):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    before = regions.traffic()[1]
    experts()
    sent_mb = (regions.traffic()[1] - before) / 1e6
    contenders: dict[str, Callable[[], object]] = {
        "replicas": replicas,
        "features": features,
        "experts": experts,
        "exchange": exchange(choices_of(spread, batch), shape),
    }
    timings = measure(contenders, worker.repeats, worker.warmup, distributed.barrier)
    models = {"replicas": whole, "features": split, "experts": spread}
    held = {name: bytes_of(model) for name, model in models.items()}
    emit(worker, timings, held, sent_mb)
    smp.shutdown()


def emit(
    worker: Worker, timings: dict[str, Timing], held: dict[str, float], sent_mb: float
) -> None:
    """Times, ratios to replicas and to the step with spread experts in the same repeat."""
    for name, timing in timings.items():
        values = timing.summary() | compare(timing, timings["replicas"])
        values["ratio_to_experts"] = compare(timing, timings["experts"])["ratio_median"]
        if name in held:
            values["parameters_mb"] = held[name]
        if name == "experts":
            values["sent_mb"] = sent_mb
        worker.emit(name, values)


if __name__ == "__main__":
    main()
