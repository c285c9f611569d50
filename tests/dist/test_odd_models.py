"""Models whose code does what few models do: the numbers of one process, or a true reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.model import engine_of
from tests.dist.pool import Pool
from tests.harness import own_loss, train_step_of
from tests.reference.tolerances import assert_close

MICROBATCHES = 2


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def plain_gradients(make: Any, **options: Any) -> dict[str, Tensor]:
    """Mean over microbatches, in one process."""
    torch.manual_seed(0)
    model = make(**options)
    for piece in batch().chunk(MICROBATCHES):
        (model(piece) / MICROBATCHES).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(
    rank: int, make: Any, config: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """Returns this rank's gradients after one step, and the number of its remote calls."""
    import smp

    smp.init({"microbatches": MICROBATCHES, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(make(**options))
    train_step = train_step_of(model, own_loss)
    train_step(batch())
    grads = {
        name.removeprefix("module."): p.grad.clone()
        for name, p in model.local_named_parameters()
        if p.grad is not None
    }
    calls = smp.metrics.server_stats()["remote_calls"] if smp.pp_size() > 1 else 0
    smp.shutdown()
    return grads, int(calls)


def check_equal(pool: Pool, make: Any, pp: int = 2, **options: Any) -> None:
    config = {"pipeline_parallel_degree": pp, "ddp": False}
    parts = pool.run(pp, gradients, make, config, options)
    assert sum(calls for _, calls in parts) > 0, "all of it ran on one rank"
    got = {name: grad for part, _ in parts for name, grad in part.items()}
    expected = plain_gradients(make, **options)
    assert {n: g.dtype for n, g in got.items()} == {n: g.dtype for n, g in expected.items()}
    assert_close(_real(got), _real(expected), torch.float32, make.__name__)


def _real(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.view_as_real(v) if v.is_complex() else v for n, v in values.items()}


# ---- forwards that convert their layers ----------------------------------------------


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float64)
        return self.classifier(x.double()).softmax(-1).to(x.dtype)


class Mixture(nn.Module):
    """Two routers that cast, and experts; values decide what runs if asked for."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.routers = nn.ModuleList(Router() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.reads_values = reads_values

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for idx, router in enumerate(self.routers):
            weights = router(x)
            if self.reads_values and float(x.detach().abs().sum()) < 0:
                weights = weights * 2
            experts = list(self.experts)[3 * idx : 3 * idx + 3]
            x = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
        return x.pow(2).mean()


@pytest.mark.parametrize("reads_values", [False, True])
def test_routers_that_cast_their_classifier_train_like_one_process(
    pool: Pool, reads_values: bool
) -> None:
    # With values read the trace runs for real, and must not leave its casts to rank 0 alone.
    check_equal(pool, Mixture, reads_values=reads_values)


def test_a_parameter_that_is_cast_in_a_step_without_a_trace_is_refused(pool: Pool) -> None:
    outcomes = pool.outcomes(2, gradients, Mixture, {"ddp": True}, {})
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert "routers.0.classifier.weight" in outcome.message
        assert "model.get_submodule('routers.0.classifier').to(torch.float64)" in outcome.message


# ---- checkpointed modules that a cut could go through --------------------------------


class Half(nn.Module):
    """Part of a layer with modules of its own; notes its forwards."""

    runs: list[tuple[str, bool]] = []

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        from smp.activations.recompute import is_recomputing

        Half.runs.append((self.name, is_recomputing()))
        return x + self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(f"{name}.first", width), Half(f"{name}.second", width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Layered(nn.Module):
    """Layers of some widths; an even cut goes through the one in the middle."""

    def __init__(self, widths: tuple[int, ...] = (64, 16, 64)) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Layer(str(i), width) for i, width in enumerate(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def checkpointed(
    rank: int, widths: tuple[int, ...]
) -> tuple[dict[str, Tensor], list[int], dict[str, bool]]:
    """Gradients of this rank, partitions of the layers, and which halves ran twice here."""
    import smp

    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": 2, "ddp": False})
    torch.manual_seed(0)
    model = smp.DistributedModel(Layered(widths))
    for layer in model.get_module().layers:
        smp.set_activation_checkpointing(layer)

    train_step = train_step_of(model, own_loss)
    Half.runs = []
    train_step(batch())
    grads = {
        name.removeprefix("module."): p.grad.clone() for name, p in model.local_named_parameters()
    }
    partition_of = engine_of(model).partitioning.decision.partition_of
    placed = [
        len({partition_of[half] for half in (layer.first, layer.second)})
        for layer in model.get_module().layers
    ]
    here = {name.removeprefix("layers.").rpartition(".")[0] for name in grads}
    again = {
        half: (half, True) in Half.runs
        for half, _ in Half.runs
        if any(name.startswith(half) for name in here)
    }
    return grads, placed, again


@pytest.mark.parametrize(
    ("widths", "num_places"), [((64, 16, 64), [1, 1, 1]), ((64, 640, 64), [1, 2, 1])]
)
def test_a_marked_layer_is_cut_only_where_balance_asks_for_it_and_is_always_checkpointed(
    pool: Pool, widths: tuple[int, ...], num_places: list[int]
) -> None:
    parts = pool.run(2, checkpointed, widths)
    assert [places for _, places, _ in parts] == [num_places, num_places]
    again = {half: twice for _, _, halves in parts for half, twice in halves.items()}
    names = [f"{i}.{half}" for i in range(3) for half in ("first", "second")]
    assert again == dict.fromkeys(names, True)
    got = {name: grad for grads, _, _ in parts for name, grad in grads.items()}
    assert_close(got, plain_gradients(Layered, widths=widths), torch.float32, str(widths))


def switched_on(rank: int) -> tuple[list[int], list[bool]]:
    """Partitions per layer of a Llama of three layers, and whether it computed again here."""
    import transformers

    import smp
    from smp.activations.recompute import is_recomputing

    smp.init({"microbatches": 2, "pipeline_parallel_degree": 2, "ddp": False})
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config)
    plain.gradient_checkpointing_enable()
    seen: list[bool] = []

    class Spy(torch.nn.SiLU):  # no hook: what calls a hooked module has to be on partition 0
        def forward(self, x: Tensor) -> Tensor:
            seen.append(is_recomputing())
            return super().forward(x)

    for layer in plain.model.layers:
        layer.mlp.act_fn = Spy()
    model = smp.DistributedModel(plain.train())
    train_step = train_step_of(model, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    train_step(torch.randint(41, (4, 5), generator=torch.Generator().manual_seed(1)))
    partition_of = engine_of(model).partitioning.decision.partition_of
    owned = [m for layer in plain.model.layers for m in (layer.self_attn, layer.mlp)]
    places = [len({partition_of[m] for m in pair}) for pair in zip(*[iter(owned)] * 2, strict=True)]
    return places, seen


def test_layers_that_transformers_checkpoints_are_not_cut_without_need(pool: Pool) -> None:
    parts = pool.run(2, switched_on)
    assert [places for places, _ in parts] == [[1, 1, 1]] * 2
    assert any(again for _, seen in parts for again in seen)


# ---- code that uses parameters of other modules --------------------------------------


class Penalty(nn.Module):
    """Adds the squares of all parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean() + sum(p.pow(2).sum() for p in self.parameters())


class Momentum(nn.Module):
    """Moves one encoder after the other in its forward, as MoCo and BYOL do."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return (self.online(x) - self.target(x).detach()).pow(2).mean()


class Tied(nn.Module):
    """Decodes with the weight of its encoder; what is between them is free to go."""

    def __init__(self, num_between: int = 0) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.between = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_between)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(torch.tanh(self.encoder(x)))
        return (nn.functional.linear(hidden, self.encoder.weight.t()) - x).pow(2).mean()


class TiedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        back = torch.tanh(nn.functional.linear(hidden, self.second.weight.t()))
        return (nn.functional.linear(back, self.first.weight.t()) - x).pow(2).mean()


class Forces(nn.Module):
    """Returns the error of forces, which are gradients of an energy, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return forces.square().mean()


class Tangents(nn.Module):
    """Adds what its layers give along a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, first = torch.func.jvp(self.first, (x,), (torch.ones_like(x),))
        y, second = torch.func.jvp(self.second, (first,), (first,))
        return (y + second).square().mean()


class _Reversible(torch.autograd.Function):
    """Runs layers without a graph, and again in its backward, as Reformer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer.again(y)
        torch.autograd.backward(y, grads[0])
        return x.grad, None


class Noting(nn.Module):
    """Keeps in its forward what its code in the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.scale = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.5
        return torch.tanh(self.product(x)) * self.scale

    def again(self, x: Tensor) -> Tensor:
        assert self.scale is not None, "the forward ran elsewhere"
        return torch.tanh(self.product(x)) * self.scale


class Reversible(nn.Module):
    def __init__(self, num_ends: int = 6) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(num_ends)))
        self.layers = nn.ModuleList(Noting() for _ in range(4))
        self.end = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_ends)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Reversible.apply(self.begin(x), self.layers)
        return self.end(y).square().mean()


def test_layers_with_a_backward_of_their_own_stay_with_its_code(pool: Pool) -> None:
    check_equal(pool, Reversible)


class Duals(nn.Module):
    """Adds what its layers give along a direction, by numbers with a tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            y, along = torch.autograd.forward_ad.unpack_dual(self.layers(dual))
            return (y + along).square().mean()


def count_by_hooks(rank: int) -> tuple[dict[int, str], list[str]]:
    """Trains with hooks on all modules that keep a stack; what is open, and what ended."""
    import smp

    open_calls: dict[int, str] = {}
    ended: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        open_calls[len(open_calls)] = type(module).__name__

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        output.sum().item()  # no value in a trace
        ended.append(open_calls.pop(len(open_calls) - 1))

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "active_microbatches": 1})
    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave),
    ]
    try:
        model = smp.DistributedModel(TiedOnce())
        train_step = train_step_of(model, own_loss)
        train_step(torch.ones(4, 6))
    finally:
        for handle in handles:
            handle.remove()
    return open_calls, ended


class TiedOnce(Tied):
    def __init__(self) -> None:
        super().__init__(num_between=4)


def test_hooks_on_all_modules_see_the_calls_of_the_script_only(pool: Pool) -> None:
    results = pool.run(2, count_by_hooks, env={"SMP_CHECK_FIRST_STEP": "0"})
    assert [still_open for still_open, _ in results] == [{}, {}]
    assert results[0][1].count("TiedOnce") == 2, "one per microbatch, and none of the trace"


_READ = "Call a module instead of reading its weight"
_GRAPH = "A gradient that has a graph of its own (create_graph=True"


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (Penalty, "Penalty) reads parameters of 'layers.0', 'layers.1', 'layers.2'.", _READ),
        (Momentum, "Momentum) reads parameters of 'online', 'target'.", _READ),
        (TiedTwice, "TiedTwice) reads parameters of 'first', 'second'.", _READ),
        (Forces, "Forces) differentiates inside of its forward (torch.autograd.grad) ", _GRAPH),
        (Tangents, "Tangents) calls inside of a transform of torch.func 'first',", "Transforms"),
        (Duals, "Duals) calls inside of a transform of torch.func 'layers'", "Transforms"),
    ],
)
def test_a_model_that_uses_parameters_of_its_modules_is_refused_with_that_reason(
    pool: Pool, make: Any, what: str, remedy: str
) -> None:
    config = {"pipeline_parallel_degree": 2, "ddp": False}
    for outcome in pool.outcomes(2, gradients, make, config, {}):
        assert outcome.error == "ValueError", outcome
        assert f"(root) ({what}" in outcome.message, outcome.message
        others = {_READ, _GRAPH, "Transforms"} - {remedy}
        assert remedy in outcome.message and not any(o in outcome.message for o in others)


def test_a_tied_autoencoder_trains_with_its_layers_between_elsewhere(pool: Pool) -> None:
    check_equal(pool, Tied, num_between=4)


class Mapped(nn.Module):
    """Calls some of its layers inside of a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for idx, layer in enumerate(self.layers):
            x = x + (torch.func.vmap(layer)(x) if idx >= 3 else layer(x))
        return x.pow(2).mean()


def test_layers_that_are_called_inside_of_vmap_stay_with_their_caller(pool: Pool) -> None:
    check_equal(pool, Mapped)


def test_vmap_of_a_layer_that_is_elsewhere_is_refused(pool: Pool) -> None:
    config = {"pipeline_parallel_degree": 2, "ddp": False, "skip_tracing": True}
    outcomes = pool.outcomes(2, gradients, Mapped, config, {})
    (refused,) = [o for o in outcomes if o.error == "ValueError"]
    assert "called inside of a transform of torch.func" in refused.message
    assert "'layers." in refused.message


class Spectral(nn.Module):
    """Complex weights and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(6, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.complex64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(self.begin(x))
        for layer in self.layers:
            y = y + layer(y)
        return self.end(torch.fft.ifft(y).real).pow(2).mean()


def test_complex_parameters_train_like_one_process(pool: Pool) -> None:
    check_equal(pool, Spectral)


# ---- tensor parallelism --------------------------------------------------------------


def images_and_text() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    text = transformers.LlamaConfig(
        **sizes, vocab_size=41, num_attention_heads=4, num_key_value_heads=2
    )
    vision = transformers.CLIPVisionConfig(
        **sizes, num_attention_heads=2, image_size=8, patch_size=4, projection_dim=8
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=40, image_seq_length=4
        )
    )


def split_llava(rank: int) -> tuple[float, int]:
    """The loss, and how many layers of attention were split."""
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    plain = images_and_text()
    smp.set_tensor_parallelism(plain, True)
    model = smp.DistributedModel(plain)
    evaluate = train_step_of(model, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    ids = torch.arange(10).view(2, 5)
    loss = evaluate(ids).outputs[0].item()
    queries = [p for name, p in model.named_parameters() if name.endswith("q_proj.weight")]
    return loss, sum(p.shape == (8, 16) for p in queries)


def test_a_language_model_that_gets_vectors_is_split_by_its_plan(pool: Pool) -> None:
    ids = torch.arange(10).view(2, 5)
    expected = images_and_text()(input_ids=ids, labels=ids).loss.item()
    for loss, num_split in pool.run(2, split_llava):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert num_split == 2
