"""Initial values depend on seed and name alone, and values that were given stay; one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.initial.initialise import initialise_delayed
from smp.modules.materialize import make_placeholder
from tests.reference.families import FAMILIES, build_family

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("delayed", [False, True], ids=["at_once", "delayed"])
State = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("running")


def created(make: Callable[[], nn.Module], delayed: bool, creation_seed: int = 1) -> nn.Module:
    torch.manual_seed(creation_seed)
    with smp.delay_param_initialization(delayed):
        return make()


def wrapped(module: nn.Module, seed: int = 7) -> State:
    """Values after wrapping."""
    torch.manual_seed(seed)
    model = smp.DistributedModel(module)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def differing(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("case", FAMILIES)
def test_values_are_bitwise_the_same_delayed_or_not(case: str) -> None:
    plain = created(lambda: build_family(case), False)
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    at_once = wrapped(plain)
    delayed = created(lambda: build_family(case), True, creation_seed=2)
    assert all(p.is_meta for p in delayed.parameters())
    assert not differing(at_once, wrapped(delayed))
    matrices = {name for name, value in before.items() if value.dim() > 1}
    drawn_again = {name.removeprefix("module.module.") for name in at_once if "." in name}
    assert matrices <= drawn_again
    unchanged = [n for n in matrices if torch.equal(before[n], at_once[f"module.module.{n}"])]
    assert not unchanged, "values of the creation are still there, so nothing was compared"


def rnn() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 5, num_layers=2), nn.Bilinear(2, 3, 4), nn.PReLU())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_modules_of_torch_in_each_dtype(dtype: torch.dtype) -> None:
    states = []
    for delayed in (False, True):
        smp.shutdown()
        smp.init({"delayed_parameter_initialization": delayed})
        with smp.model_creation(dtype=dtype):
            module = rnn()
        assert all(p.is_meta == delayed and p.dtype == dtype for p in module.parameters())
        states.append(wrapped(module))
    assert not differing(*states)


def test_another_seed_or_name_gives_other_values() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    one = wrapped(created(make, False), seed=1)
    two = wrapped(created(make, False), seed=2)
    assert len(differing(one, two)) == 4
    values = [value for name, value in one.items() if name.endswith("weight")]
    assert len(values) == 2 and not torch.equal(*values)


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    module = created(rnn, True)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    smp.DistributedModel(module)
    assert torch.equal(torch.rand(4), expected)


# ---- values that were given stay -------------------------------------------------------


class Careful(nn.Module):
    """Initialises by a method as Hugging Face's, then some of it in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.rand(3))
        self.apply(self._init_weights)
        nn.init.normal_(self.second.weight, std=1e-3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=5.0)
            module.bias.data.zero_()


def test_what_a_constructor_did_otherwise_stays() -> None:
    module = created(Careful, False)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    after = wrapped(module)
    assert torch.equal(after["module.module.own"], before["own"])
    assert torch.equal(after["module.module.second.weight"], before["second.weight"])
    assert not torch.equal(after["module.module.first.weight"], before["first.weight"])
    assert after["module.module.first.weight"].std() > 1, "by the method, not by nn.Linear"


@pytest.mark.parametrize("how", ["in_place", "data", "exchanged", "load_inside", "load_outside"])
def test_given_values_stay_and_others_of_the_module_are_drawn(how: str) -> None:
    given = torch.full((4,), 3.0)

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4))
        if how == "load_inside":
            module.load_state_dict({"0.bias": given}, strict=False)
        return module

    module = created(make, False)
    linear = module[0]
    assert isinstance(linear, nn.Linear)
    drawn = linear.weight.detach().clone()
    if how == "in_place":
        nn.init.constant_(linear.bias, 3.0)
    elif how == "data":
        linear.bias.data.fill_(3.0)
    elif how == "exchanged":
        linear.bias = nn.Parameter(given.clone())
    elif how == "load_outside":
        module.load_state_dict({"0.bias": given}, strict=False)
    wrapped(module)
    assert torch.equal(linear.bias, given)
    assert not torch.equal(linear.weight, drawn)


@BOTH
def test_modules_of_other_places_stay_what_they_are(delayed: bool) -> None:
    loaded = nn.Linear(4, 4)
    before = loaded.weight.detach().clone()
    module = created(lambda: nn.Sequential(loaded, nn.Linear(4, 4)), delayed)
    wrapped(module)
    assert torch.equal(loaded.weight, before)


@BOTH
def test_pretrained_weights_stay(delayed: bool, tmp_path: Path) -> None:
    import transformers

    saved = build_family("hf/gpt2")
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    expected = {name: value.clone() for name, value in saved.named_parameters()}
    model = created(lambda: transformers.GPT2LMHeadModel.from_pretrained(tmp_path), delayed)
    for name, value in wrapped(model).items():
        assert torch.equal(value, expected[name.removeprefix("module.module.")]), name


@BOTH
def test_a_new_head_on_pretrained_weights_is_drawn(delayed: bool, tmp_path: Path) -> None:
    import transformers

    saved = build_family("hf/gpt2")
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    cls = transformers.GPT2ForSequenceClassification
    model = created(lambda: cls.from_pretrained(tmp_path, num_labels=3), delayed)
    state = wrapped(model)
    base = saved.transformer.h[0].mlp.c_fc.weight
    assert torch.equal(state["module.module.transformer.h.0.mlp.c_fc.weight"], base)
    head = state["module.module.score.weight"]
    assert head.isfinite().all() and 0.01 < head.std() < 0.03
    again = wrapped(created(lambda: cls.from_pretrained(tmp_path, num_labels=3), delayed, 5))
    assert torch.equal(again["module.module.score.weight"], head)


class Scaled(nn.BatchNorm1d):
    """A normalization whose own code would reset values that a checkpoint gave."""


@BOTH
def test_buffers_are_never_touched(delayed: bool) -> None:
    module = created(lambda: nn.Sequential(Scaled(4), nn.Linear(4, 4)), delayed)
    module[0].running_mean.fill_(2.5)
    wrapped(module)
    assert torch.equal(module[0].running_mean, torch.full((4,), 2.5))
    assert torch.equal(module[0].weight, torch.ones(4))


def test_ties_and_frozen_parameters_stay_what_they_are() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        module[1].weight = module[0].weight
        return module.requires_grad_(False)

    states = []
    for delayed in (False, True):
        module = created(make, delayed)
        parameter = module[0].weight
        states.append(wrapped(module))
        assert module[0].weight is module[1].weight is parameter
        assert not parameter.requires_grad and not parameter.is_meta
    assert not differing(*states)


class OddlyInitialised(nn.Linear):
    """Reads another module's values, which are not there when it is initialised alone."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "inner"):
            with torch.no_grad():
                self.weight.copy_(2 * self.inner.weight)


def test_what_cannot_be_drawn_alone_keeps_its_values(caplog: pytest.LogCaptureFixture) -> None:
    module = created(OddlyInitialised, False)
    before = module.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "smp"):
        wrapped(nn.Sequential(module))
    assert torch.equal(module.weight, before)
    assert "'0' keep the values of their creation" in caplog.text


class Blocks(nn.Linear):
    """Draws its weight block by block, unless transformers' mark says that it has its values."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not getattr(self.weight, "_is_hf_initialized", False):
            self.weight.data.zero_()
            for part in (self.weight.data[:2, :2], self.weight.data[2:, 2:]):
                part.normal_()
            self.weight._is_hf_initialized = True


def test_own_code_that_draws_parts_once_runs_again() -> None:
    at_once, delayed = (created(lambda: nn.Sequential(Blocks()), d) for d in (False, True))
    weight = wrapped(at_once)["module.module.0.weight"]
    assert torch.equal(weight, wrapped(delayed)["module.module.0.weight"])
    assert weight[:2, 2:].eq(0).all() and weight[2:, :2].eq(0).all()
    assert not torch.equal(weight[:2, :2], weight[2:, 2:]), "both parts have the same numbers"


@BOTH
def test_a_copy_of_drawn_values_is_drawn_too(delayed: bool) -> None:
    """Values do not depend on whether a constructor took a copy, delayed or not."""

    def make(copies: bool) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if copies:
            module[1].weight = nn.Parameter(module[0].weight.clone())  # type: ignore[operator]
        return module

    plain, copied = (wrapped(created(lambda c=c: make(c), delayed)) for c in (False, True))
    assert not differing(plain, copied)


def test_sparse_and_lazy_tensors_may_be_made_inside() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4))
        module.register_buffer("table", torch.eye(4).to_sparse())
        module.lazy = nn.LazyLinear(3)
        return module

    assert created(make, False).get_buffer("table").is_sparse


def test_contexts_leave_no_trace_in_classes() -> None:
    methods = (nn.Module.__init__, nn.Module.__setstate__, nn.Linear.reset_parameters)
    registered = nn.Module.register_parameter
    with smp.delay_param_initialization(), smp.model_creation():
        nn.Linear(2, 2)
        assert nn.Linear.reset_parameters is not methods[2], "nothing was noted"
    assert methods == (nn.Module.__init__, nn.Module.__setstate__, nn.Linear.reset_parameters)
    assert nn.Module.register_parameter is registered


def test_a_deep_copy_after_wrapping_has_the_values() -> None:
    module = created(lambda: nn.Sequential(nn.Linear(4, 4)), True)
    smp.DistributedModel(module)
    assert torch.equal(copy.deepcopy(module)[0].weight, module[0].weight)


# ---- memory ----------------------------------------------------------------------------


def num_real(root: nn.Module) -> int:
    return sum(p.numel() for p in root.parameters() if not p.is_meta and p.stride() != (0, 0))


def test_one_module_at_a_time_is_real() -> None:
    module = created(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), True)
    most, ready = 0, []

    def let_go(parameter: nn.Parameter) -> None:
        nonlocal most
        assert parameter.isfinite().all()
        most = max(most, num_real(module))
        ready.append(parameter)
        make_placeholder(parameter, CPU, "elsewhere")

    initialise_delayed(module, lambda _: True, CPU, on_ready=let_go)
    assert most <= 8 * 8 + 8
    assert [id(p) for p in ready] == [id(p) for p in module.parameters()]


def test_local_parameters_alone_are_made() -> None:
    module = created(lambda: build_family("hf/gptj"), True)
    local = {p for n, p in module.named_parameters() if n.startswith("transformer.h.1.")}
    initialise_delayed(module, local.__contains__, CPU, seed=4)
    assert local and all(p.is_meta == (p not in local) for p in module.parameters())
    whole = created(lambda: build_family("hf/gptj"), True)
    initialise_delayed(whole, lambda _: True, CPU, seed=4)
    for (name, one), other in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert one.is_meta or torch.equal(one, other), name


# ---- replaced modules ------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("case", ["hf/gpt2", "hf/gptj", "hf/llama", "hf/bert"])
def test_distributed_modules_get_the_values_of_plain_ones(case: str, delayed: bool) -> None:
    plain = created(lambda: build_family(case), delayed)
    torch.manual_seed(7)
    expected = dict(smp.DistributedModel(plain).state_dict())
    with smp.tensor_parallelism():
        split = created(lambda: build_family(case), delayed)
    torch.manual_seed(7)
    model = smp.DistributedModel(split)
    assert any(True for _ in model.distributed_modules()), "nothing was replaced"
    state = model.state_dict()
    for manager in smp.state.module_manager.translate_functions:
        state = manager[0](state)
    assert expected.keys() <= state.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_an_original_has_values_one_module_at_a_time() -> None:
    with smp.tensor_parallelism():
        root = created(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), True)
    originals = list(root)
    most = 0

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal most
            most = max(most, sum(num_real(m) for m in originals))
            return func(*args, **(kwargs or {}))

    with Watching():
        smp.DistributedModel(root)
    assert not any(module in originals for module in root)
    assert most == 8 * 8 + 8 and all(p.is_meta for m in originals for p in m.parameters())
    assert all(p.isfinite().all() for p in root.parameters())


# ---- zero_init -------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "zero_init", "is_meta"), [(2, True, True), (2, False, False),
                                                              (1, True, False)])  # fmt: skip
def test_zero_init_acts_with_sharded_data_parallelism(
    degree: int, zero_init: bool, is_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smp.world.runtime.current().rank.config
    monkeypatch.setitem(config.__dict__, "sharded_data_parallel_degree", degree)
    with smp.model_creation(tensor_parallelism=False, zero_init=zero_init):
        made = nn.Linear(2, 2)
    assert made.weight.is_meta == is_meta
