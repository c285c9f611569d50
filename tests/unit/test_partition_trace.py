"""A trace's findings about a model; tracing leaves nothing behind in the model."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import _C
from smp.modules.materialize import make_placeholder
from smp.modules.tracing import is_tracing
from smp.partition.costs import ModuleCost, Trace
from smp.partition.trace import TraceError, trace
from smp.partition.trace_choice import TraceOptions, trace_for_partition
from smp.partition.tree import build_tree
from tests.patience import PATIENCE_S
from tests.reference.data import make_batch
from tests.reference.models import HF_MODELS, OWN_MODELS, build

CPU = torch.device("cpu")


def traced(model: nn.Module, *args: Any, **options: Any) -> Trace:
    return trace(model, args, {}, device=CPU, **options)


def costs(result: Trace) -> dict[str, ModuleCost]:
    return {
        name: result.cost_of(module)
        for name, module in result.modules[0].named_modules(remove_duplicate=False)
    }


def values(result: Trace) -> set[tuple[str, tuple[str, ...], int]]:
    """(producer, other consumers, bytes) by name."""
    name_of = {module: name for name, module in result.modules[0].named_modules()}
    found = set()
    for value in result.values:
        others = tuple(name_of[result.modules[c]] for c in value.consumers if c != value.producer)
        if others:
            found.add((name_of[result.modules[value.producer]], others, value.num_bytes))
    return found


# ---- costs ---------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_flops_of_products_are_those_of_their_shapes() -> None:
    linear = traced(nn.Linear(300, 500), torch.randn(200, 300)).costs[0]
    assert linear.forward_flops == 2 * 200 * 300 * 500
    assert linear.backward_flops == linear.forward_flops, "the input needs no gradient"
    x = torch.randn(200, 300, requires_grad=True)
    assert traced(nn.Linear(300, 500), x).costs[0].backward_flops == 2 * linear.forward_flops
    convolution = traced(nn.Conv2d(64, 96, 3, padding=1), torch.randn(2, 64, 16, 16)).costs[0]
    assert convolution.forward_flops == 2 * 2 * 16 * 16 * 64 * 96 * 9
    q = torch.randn(2, 4, 512, 64, requires_grad=True)
    attention = traced(Attention(), q, q, q).costs[0]
    assert attention.forward_flops == 2 * 2 * 4 * 512 * 512 * (64 + 64)
    assert attention.backward_flops == 2.5 * attention.forward_flops


def test_moving_memory_is_not_free_but_views_are() -> None:
    x = torch.randn(1000, 1000)
    assert traced(nn.Tanh(), x).costs[0].forward_flops >= 8e6, "reads and writes 8 MB"
    assert traced(nn.Flatten(), x).costs[0].forward_flops == 0
    table = nn.Embedding(1_000_000, 4)
    assert traced(table, torch.arange(8)).costs[0].forward_flops < 1e4, "8 rows of the table"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.nothing(self.used(x)))


def test_reused_modules_add_up_and_modules_never_called_cost_nothing() -> None:
    result = traced(Twice(), torch.randn(4, 32))
    once = traced(nn.Linear(32, 32), torch.randn(4, 32)).costs[0]
    found = costs(result)
    assert found["used"].num_calls == 2
    assert found["used"].forward_flops == 2 * once.forward_flops
    assert found["never"] == ModuleCost()
    assert found["nothing"].num_calls == 1 and found["nothing"].compute == 0
    assert [type(result.modules[i]).__name__ for i in result.order] == [
        "Twice",
        "Linear",
        "Identity",
    ]


def test_activations_count_once_and_parameters_do_not() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    found = costs(traced(Three(), torch.randn(4, 8)))
    assert (found["a"].activation_bytes, found["b"].activation_bytes) == (4 * 8 * 4, 0)
    frozen = Three().requires_grad_(False)
    assert sum(c.activation_bytes for c in traced(frozen, torch.randn(4, 8)).costs) == 0
    deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    kept = [c.activation_bytes for c in traced(deep, torch.randn(4, 8)).costs]
    assert kept == [0, 128, 128, 0], "the result of tanh is also the input of the next"


@pytest.mark.sample(keep=0)
def test_activations_are_those_of_training_without_gradients_as_well() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    expected = traced(model, x)
    with torch.no_grad():
        assert traced(model, x).costs == expected.costs
    with torch.inference_mode():
        y = torch.randn(4, 8)
        assert traced(model, y).costs == expected.costs
        assert traced(model, y, fake=False).costs == expected.costs


# The control flow of "branches" depends on data.
@pytest.mark.parametrize("case", [*sorted(OWN_MODELS.keys() - {"branches"}), "gptj"])
def test_shapes_alone_give_the_same_as_a_real_forward(case: str) -> None:
    model = build(case, torch.float64)
    batch = make_batch(case, torch.float64, 0, 0)
    call: Any = ((), batch) if case in HF_MODELS else ((batch["x"],), {})
    real = trace(model, *call, device=CPU, fake=False)
    fake = trace(model, *call, device=CPU)
    assert fake.costs == real.costs and sum(c.compute for c in fake.costs) > 0
    assert (fake.values, fake.order, fake.calls) == (real.values, real.order, real.calls)
    assert (fake.how, real.how) == ("fake", "cpu")


def test_checkpointed_blocks_keep_less() -> None:
    model = HF_MODELS["gpt2"]()
    batch = make_batch("gpt2", torch.float32, 0, 0)
    full = trace(model, (), batch, device=CPU)
    model.gradient_checkpointing_enable()
    less = trace(model.train(), (), batch, device=CPU)
    assert (
        0
        < sum(c.activation_bytes for c in less.costs)
        < 0.4 * sum(c.activation_bytes for c in full.costs)
    )


@pytest.mark.parametrize("strategy", ["each", "contiguous"])
def test_layers_that_smp_checkpoints_keep_less(strategy: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(3)))
    full = trace(model, (torch.randn(16, 8),), {}, device=CPU)
    smp.set_activation_checkpointing(model, strategy=strategy)
    less = trace(model, (torch.randn(16, 8),), {}, device=CPU)
    ours, theirs = (sum(c.activation_bytes for c in t.costs) for t in (less, full))
    assert 0 < ours < 0.5 * theirs


# ---- values --------------------------------------------------------------------------


class Wiring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.pass_through = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.pass_through(self.a(x))
        return self.c(y.t().t()[:, :]) + self.b(y)


def test_values_name_who_makes_and_who_reads_a_tensor() -> None:
    found = values(traced(Wiring(), torch.randn(8, 4)))
    assert ("", ("a",), 128) in found, "model inputs belong to the root"
    # The root makes views; they are still the result of `a`, and making them reads nothing.
    assert ("a", ("b", "c"), 128) in found
    assert not any(producer == "pass_through" for producer, _, _ in found)


def test_what_is_written_in_place_belongs_to_the_writer() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.relu(self.a(x)))

    found = values(traced(InPlace(), torch.randn(8, 4)))
    assert {("a", ("relu",), 128), ("relu", ("b",), 128)} <= found


def test_sums_of_a_module_that_may_be_split_are_made_of_their_terms() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = (self.b(y) + y) * 0.5
            return self.c(torch.cos(z))

    result = traced(Residual(), torch.randn(8, 4))
    y, by = (next(i for i, v in enumerate(result.values) if v.producer == m) for m in (1, 2))
    (total,) = (i for i, v in enumerate(result.values) if v.sources == (y, by))
    (half,) = (i for i, v in enumerate(result.values) if v.sources == (total,))
    assert result.values[y].consumers == (2,) and result.values[by].consumers == ()
    assert result.values[half].consumers == (0,), "the cosine reads it at the root"
    assert result.values[half].needs_grad and not result.values[0].needs_grad
    tree = build_tree(result.modules[0], result).tree
    assert 0 < tree.num_values <= len(result.values)


def test_outputs_stay_where_they_were_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    result = traced(model, torch.randn(8, 4))
    (output,) = (v for v in result.values if v.num_bytes == 64)
    assert result.modules[output.producer] is model[1] and output.consumers == ()


class Borrower(nn.Module):
    """Uses the weight of another module, by attribute or as an argument."""

    def __init__(self, other: nn.Linear, given: bool) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.__dict__["other"] = other
        self.given = given

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.own(x) @ (weight if self.given else self.other.weight)


@pytest.mark.parametrize("given", [False, True])
def test_who_takes_a_parameter_from_another_module_is_tied_to_it(given: bool) -> None:
    class Lender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.borrower = Borrower(self.linear, given)

        def forward(self, x: Tensor) -> Tensor:
            return self.borrower(self.linear(x), self.linear.weight if given else x)

    model = Lender()
    result = traced(model, torch.randn(8, 4))
    linear, borrower = (list(result.modules).index(m) for m in (model.linear, model.borrower))
    # An argument was taken from its holder by the code that gave it, which is the root's.
    assert result.parameter_reads.keys() == {(0 if given else borrower, linear)}
    weights = [v for v in result.values if v.producer == linear and v.num_bytes == 64]
    assert [v.consumers for v in weights] == ([(borrower,)] if given else [])
    assignment = _C.solve_partition(build_tree(model, result).tree, _C.PartitionOptions(2))
    places = assignment.partition_idxs
    assert places[linear] == (0 if given else places[borrower])


# ---- no trace left -------------------------------------------------------------------


class Stateful(nn.Module):
    flags: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(6, 6)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.flags.append(is_tracing())
        self.seen.append(x)
        self.last = self.drop(self.linear(self.norm(x)))
        x.zero_()
        return self.last


@pytest.mark.parametrize("fake", [True, False])
def test_model_inputs_and_random_numbers_are_as_before(fake: bool) -> None:
    model = Stateful()
    Stateful.flags.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    x = torch.randn(3, 6)
    kept = x.clone()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traced(model, x, fake=fake)
    assert torch.equal(torch.rand(3), expected) and torch.equal(x, kept)
    assert objects == {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.last is None and "forward" not in model.__dict__
    assert all(p.grad is None for p in model.parameters())
    assert set(model.flags) == {True} and not is_tracing()
    assert model.seen == []


_heard: list[int] = []


@pytest.mark.parametrize("fake", [True, False])
def test_hooks_that_a_forward_installs_and_what_hooks_collect_are_as_before(fake: bool) -> None:
    class Installing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.hooked = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.hooked:  # as transformers installs what captures hidden states
                self.linear.register_forward_hook(lambda *_: None)
                self.hooked = True
            return self.linear(x)

    class Collector:
        def __init__(self) -> None:
            self.kept: dict[str, list[Tensor]] = {"out": []}

        def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.kept["out"].append(out)

    _heard.clear()
    model = Installing()
    collector, closed_over = Collector(), {"first": torch.ones(1)}
    model.linear.register_forward_hook(collector.hook)
    model.linear.register_forward_hook(lambda m, args, out: closed_over.update(first=out))
    model.linear.register_forward_hook(lambda m, args, out: _heard.append(1))
    model.linear.register_forward_hook(lambda m, args, out: collector.kept["out"].append(out))
    first = closed_over["first"]
    traced(model, torch.randn(3, 4), fake=fake)
    assert len(model.linear._forward_hooks) == 4 and not model.hooked
    assert collector.kept == {"out": []} and closed_over["first"] is first and _heard == []
    model(torch.randn(3, 4))
    assert len(model.linear._forward_hooks) == 5 and len(collector.kept["out"]) == 2 and _heard


def test_a_model_that_fails_is_as_before_and_the_error_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(TraceError, match=r"RuntimeError: .* in module 1 \(Linear\)"):
        traced(model, torch.randn(2, 4))
    assert not is_tracing() and "forward" not in model[1].__dict__
    assert isinstance(model[1].weight.data, Tensor) and model[1](torch.ones(1, 5)).shape == (1, 5)


# ---- without weights -----------------------------------------------------------------


@pytest.mark.sample(keep=0)
def test_meta_parameters_and_placeholders_trace_like_real_ones() -> None:
    x = torch.randn(3, 8)
    real = traced(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 4)), x)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 4))
    assert traced(empty, x).costs == real.costs
    holder = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 4))
    for parameter in holder.parameters():
        make_placeholder(parameter, torch.device("cpu"), "elsewhere")
    assert traced(holder, x).costs == real.costs


_GPTJ_6B = """
import time, torch
from transformers import GPTJConfig, GPTJForCausalLM
from smp import _C
from smp.partition.trace import trace
from smp.partition.tree import build_tree

def resident_kb(kind):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind + ":"))

def plan(length, **shape):
    with torch.device("meta"):
        model = GPTJForCausalLM(GPTJConfig(**shape))
    ids = torch.zeros(4, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    before = time.process_time()
    result = trace(model, (), batch, device=torch.device("cpu"))
    tree = build_tree(model, result).tree
    places = _C.solve_partition(tree, _C.PartitionOptions(4)).partition_idxs
    return time.process_time() - before, result, places

# The same number of layers with a ten-thousandth of the parameters.
small_s = [plan(16, n_embd=64, n_head=4, rotary_dim=16, vocab_size=64)[0] for _ in range(2)][-1]
resident_before_kb = resident_kb("VmRSS")
cpu_s, result, places = plan(2048)
print(cpu_s / small_s, (resident_kb("VmHWM") - resident_kb("RssFile")) * 1024,
      (resident_kb("VmHWM") - resident_before_kb) * 1024,
      sum(cost.forward_flops for cost in result.costs), len(set(places)))
"""


@pytest.mark.sample(keep=0)
@pytest.mark.alone
def test_gptj_6b_is_traced_and_partitioned_as_fast_as_a_small_one_and_in_1_gb() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _GPTJ_6B], capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = run.stdout
    assert run.returncode == 0, run.stderr
    ratio, peak_bytes, growth_bytes, flops, num_partitions = map(float, output.split()[-5:])
    # How much of torch's libraries is resident (RssFile) is the kernel's choice, not ours.
    assert ratio < 3.0 and peak_bytes < 1e9 and growth_bytes < 0.2e9, output
    assert 1.0 < flops / (2 * 6.05e9 * 4 * 2048) < 1.2, "two per weight and token, and attention"
    assert num_partitions == 4


# ---- falling back --------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Chooser())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum().item() < 1e9 else x


OPTIONS = TraceOptions(CPU, CPU)


def test_control_flow_on_values_runs_on_the_cpu_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        result = trace_for_partition(Branching(), (torch.randn(2, 4),), {}, OPTIONS)
    assert result is not None and result.how == "cpu"
    found = costs(result)
    assert found["inner.0"].data_dependent and not found["inner"].data_dependent
    (record,) = caplog.records
    text = record.getMessage()
    assert "_local_scalar_dense" in text and "inner.0 (Chooser)" in text and "CPU" in text


def test_control_flow_on_values_without_weights_leaves_parameter_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with torch.device("meta"):
        model = Branching()
    assert trace_for_partition(model, (torch.randn(2, 4),), {}, OPTIONS) is None
    assert "parameter sizes alone" in caplog.text and "inner.0 (Chooser)" in caplog.text


def test_a_forward_that_raises_leaves_parameter_sizes_to_the_partition(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(4, 4)
    assert trace_for_partition(model, (torch.randn(2, 5),), {}, OPTIONS) is None
    assert "parameter sizes alone" in caplog.text


def test_measurements_need_weights(caplog: pytest.LogCaptureFixture) -> None:
    options = TraceOptions(CPU, CPU, measure_times=True)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    result = trace_for_partition(model, (torch.randn(2, 4),), {}, options)
    assert result is not None and result.how == "fake" and "meta device" in caplog.text


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


@pytest.mark.alone
def test_measured_times_are_own_times_in_milliseconds() -> None:
    model = nn.Sequential(Slow(0.03), Slow(0.0))
    began_s = time.perf_counter()
    options = TraceOptions(CPU, CPU, measure_times=True, measure_memory=True)
    result = trace_for_partition(model, (torch.randn(2, 2),), {}, options)
    assert result is not None and (result.how, result.unit) == ("cpu", "ms")
    own = {name: cost.time_ms or 0.0 for name, cost in costs(result).items()}
    assert 29 < own["0"] < 1000 * (time.perf_counter() - began_s)
    assert all(own[name] < own["0"] / 2 for name in ("", "0.linear", "1"))
    assert costs(result)["0"].compute == own["0"], "no operators, so the forward is all there is"
    assert costs(result)["0.linear"].compute > own["0.linear"], "its backward is not free"
    assert result.cost_per_link_byte > 0
    tree = build_tree(model, result).tree
    assert tree.compute(1) == own["0"] and tree.compute_per_byte == result.cost_per_link_byte


# ---- into the tree -------------------------------------------------------------------


def test_mixture_of_experts_is_traced_without_values() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    ids = torch.randint(0, 64, (2, 8))
    result = trace_for_partition(model, (), {"input_ids": ids, "labels": ids}, OPTIONS)
    assert result is not None and result.how == "fake"
    experts = costs(result)["model.layers.0.mlp.experts"]
    # Two experts per token, three products each.
    assert experts.forward_flops >= 2 * (2 * 8 * 2) * 3 * 16 * 32


def test_tree_has_costs_order_and_the_places_of_reused_modules() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)
            self.first = nn.Sequential(nn.Linear(4, 4))
            self.again = nn.Sequential(self.first[0])

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.again(self.first(x)))

    model = Backwards()
    result = traced(model, torch.randn(8, 4))
    tree = build_tree(model, result).tree
    names = [tree.name(i) for i in range(len(tree))]
    found = costs(result)
    for idx, name in enumerate(names):
        assert tree.compute(idx) == found[name].compute
        assert tree.activation_bytes(idx) == found[name].activation_bytes
    assert found["first.0"].num_calls == 2
    assert [names[result.modules.index(result.modules[i])] for i in result.order] == [
        "",
        "first",
        "first.0",
        "again",
        "last",
    ]


class _Sealed(dict[str, Any]):
    def __delitem__(self, key: str) -> None:
        raise RuntimeError("outputs of transformers do not let go of what they were given")


def test_error_of_a_trace_is_told_though_an_output_cannot_be_emptied() -> None:
    class Matching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = _Sealed(logits=super().forward(x))
            return output["logits"] * float(output["logits"].sum())

    with pytest.raises(TraceError):
        traced(Matching(4, 4), torch.randn(3, 4))
