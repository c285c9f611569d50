"""Modules that are replaced, their arguments and their weights; one process, degree 1."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.tensor_parallel import registry

pytestmark = pytest.mark.usefixtures("running")


@pytest.fixture(autouse=True)
def own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registrations", dict(registry._registrations))


class Scaled(nn.Module):
    """A module with arguments, and children that have a distributed form of their own."""

    def __init__(self, width: int, scale: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.inner(x) * self.scale + shift


class DistributedScaled(smp.nn.DistributedModule):
    def __init__(self, width: int, scale: float, note: str = "none") -> None:
        super().__init__()
        if width % 2:
            raise smp.nn.Unsupported(f"width {width} is odd")
        self.inner = nn.Linear(width, width)
        self.scale, self.note = scale, note

    def forward(self, inputs: tuple[Tensor, float]) -> list[Tensor]:
        return [self.inner(inputs[0]) * self.scale + inputs[1]]


def init_hook(width: int, scale: float = 2.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (width,), {"scale": scale}


def forward_hook(x: Tensor, shift: float = 0.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x, shift),), {}


def register() -> None:
    smp.tp_register_with_module(
        Scaled, DistributedScaled, init_hook, forward_hook, lambda output: output[0]
    )


def linears(module: nn.Module) -> int:
    return sum(isinstance(m, smp.nn.DistributedLinear) for m in module.modules())


def test_only_marked_modules_are_replaced() -> None:
    with smp.tensor_parallelism():
        inside = nn.Linear(4, 4)
        with smp.tensor_parallelism(False):
            switched_off = nn.Linear(4, 4)
    outside = nn.Linear(4, 4)
    root = nn.Sequential(inside, switched_off, outside)
    model = smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedLinear)
    assert root[1] is switched_off and root[2] is outside
    assert list(model.distributed_modules()) == [root[0]]


def test_a_replaced_module_computes_what_the_original_did() -> None:
    register()
    with smp.tensor_parallelism():
        root = nn.Sequential(Scaled(4, scale=3.0), nn.Linear(4, 2))
    plain = copy.deepcopy(root)
    x = torch.randn(5, 4)
    expected = plain[1](plain[0](x))
    model = smp.DistributedModel(root)
    assert type(root[0]) is DistributedScaled and root[0].scale == 3.0
    assert torch.equal(model(x), expected)
    assert torch.equal(root[0](x, shift=1.0), plain[0](x, shift=1.0))
    assert set(model.state_dict()) == set(plain.state_dict())


def test_the_outermost_supported_module_wins() -> None:
    register()
    with smp.tensor_parallelism():
        root = nn.ModuleDict({"outer": Scaled(4)})
    smp.DistributedModel(root)
    assert type(root["outer"]) is DistributedScaled
    assert linears(root) == 0


def test_the_root_may_be_replaced() -> None:
    register()
    with smp.tensor_parallelism():
        root = Scaled(4)
    model = smp.DistributedModel(root)
    assert type(model.get_module()) is DistributedScaled


def test_inner_modules_are_tried_when_the_outer_one_declines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    register()
    with smp.tensor_parallelism():
        root = nn.Sequential(Scaled(3), Scaled(3))
    with caplog.at_level(logging.WARNING, "smp"):
        smp.DistributedModel(root)
    assert [type(m) for m in root] == [Scaled, Scaled]
    assert linears(root) == 2
    told = [record.getMessage() for record in caplog.records if "width 3 is odd" in record.message]
    assert len(told) == 1, "one message per class and reason"
    assert "Scaled" in told[0]


def test_a_hook_declines_with_none() -> None:
    smp.tp_register_with_module(Scaled, DistributedScaled, lambda *args, **kwargs: None)
    with smp.tensor_parallelism():
        root = nn.Sequential(Scaled(4))
    smp.DistributedModel(root)
    assert type(root[0]) is Scaled


def test_modules_that_share_weights_with_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    with smp.tensor_parallelism():
        table, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = table.weight
    root = nn.Sequential(table, head)
    with caplog.at_level(logging.WARNING, "smp"):
        model = smp.DistributedModel(root)
    assert root[0] is table and root[1] is head
    assert "shares parameters" in caplog.text
    assert model(torch.tensor([[1]])).shape == (1, 1, 6)


@pytest.mark.parametrize(
    "options", [{"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str
)
def test_options_of_an_embedding_are_heeded(options: dict[str, Any]) -> None:
    plain = nn.Embedding(6, 4, **options)
    root = nn.Sequential(copy.deepcopy(plain))
    smp.set_tensor_parallelism(root)
    model = smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedEmbedding)
    ids, weights = torch.tensor([[1, 1, 5]]), torch.arange(12.0).view(3, 4)
    usual = nn.Embedding(6, 4, _weight=plain.weight.detach().clone())
    for table in (plain, model, usual):
        (table(ids) * weights).sum().backward()
    assert torch.equal(root[0].weight, plain.weight)
    assert torch.equal(root[0].weight.grad, plain.weight.grad)
    changed = not torch.equal(plain.weight.grad, usual.weight.grad)
    assert changed or not torch.equal(plain.weight, usual.weight), "the option has no effect"


def test_an_embedding_with_sparse_gradients_stays(caplog: pytest.LogCaptureFixture) -> None:
    root = nn.Sequential(nn.Embedding(6, 4, sparse=True))
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert type(root[0]) is nn.Embedding and "sparse is True" in caplog.text


def test_modules_whose_weights_others_read_stay(caplog: pytest.LogCaptureFixture) -> None:
    with smp.tensor_parallelism():
        root = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING, "smp"):
        smp.DistributedModel(root)
    assert type(root[0].linear1) is nn.Linear and type(root[0].linear2) is nn.Linear
    assert isinstance(root[1], smp.nn.DistributedLinear)
    assert caplog.text.count("the TransformerEncoderLayer around it reads its parameters") == 1


def test_options_of_the_context_override_the_hook() -> None:
    register()
    with smp.tensor_parallelism(note="mine", scale=7.0, flash_attention=False):
        root = nn.Sequential(Scaled(4))
    smp.DistributedModel(root)
    assert (root[0].note, root[0].scale) == ("mine", 7.0)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("flash_atention", "did you mean 'flash_attention'"),
        ("fused_sofmax", "did you mean 'fused_softmax'"),
        ("skale", "did you mean 'scale'"),
        ("qqqq", "expected one of"),
    ],
)
def test_a_misspelt_option_is_an_error_that_names_the_nearest(option: str, hint: str) -> None:
    register()
    message = f"tensor parallelism has no option '{option}'; {hint}"
    with pytest.raises(ValueError, match=message), smp.tensor_parallelism(**{option: True}):
        pass
    with pytest.raises(ValueError, match=message):
        smp.set_tensor_parallelism(nn.Linear(4, 4), **{option: True})
    with pytest.raises(ValueError, match=message), smp.model_creation(False, **{option: True}):
        pass


def test_options_without_effect_are_accepted() -> None:
    register()
    for option in ("fused_softmax", "fused_dropout", "fused_bias_gelu", "distribute_embedding"):
        for value in (False, True):
            with smp.tensor_parallelism(**{option: value}):
                root = nn.Sequential(Scaled(4))
            assert smp.DistributedModel(root) is not None


def test_a_tree_is_marked_after_it_was_made() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    smp.set_tensor_parallelism(root)
    smp.set_tensor_parallelism(root[1], enabled=False)
    smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedLinear)
    assert type(root[1][0]) is nn.Linear


def test_arguments_are_read_when_the_module_is_replaced() -> None:
    class Config:
        width = 4

    class Configured(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.inner = nn.Linear(config.width, config.width)

    seen = []

    def hook(config: Config) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen.append(config.width)
        return (config.width,), {"scale": 1.0}

    smp.tp_register_with_module(Configured, DistributedScaled, hook)
    config = Config()
    with smp.tensor_parallelism():
        root = nn.Sequential(Configured(config))
    config.width = 6
    smp.DistributedModel(root)
    assert seen == [6]


def test_a_decorated_class_is_registered() -> None:
    @smp.tp_register(DistributedScaled, init_hook)
    class Decorated(nn.Module):
        def __init__(self, width: int, scale: float = 2.0) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

    with smp.tensor_parallelism():
        root = nn.Sequential(Decorated(4))
    expected = {key: value.clone() for key, value in root.state_dict().items()}
    smp.DistributedModel(root)
    assert type(root[0]) is DistributedScaled
    for key, value in root.state_dict().items():
        assert torch.equal(value, expected[key])


def test_modules_whose_arguments_nobody_knows_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Scaled):
        pass

    early = Late(4)
    smp.tp_register_with_module(Late, DistributedScaled, init_hook)
    smp.set_tensor_parallelism(early)
    root = nn.Sequential(early)
    with caplog.at_level(logging.WARNING, "smp"):
        smp.DistributedModel(root)
    assert root[0] is early and linears(root) == 1
    assert "before its class was registered" in caplog.text


def test_dtype_mode_and_frozen_weights_are_kept() -> None:
    with smp.tensor_parallelism():
        root = nn.Sequential(nn.Linear(4, 4).double().eval())
    root[0].requires_grad_(False)
    smp.DistributedModel(root)
    weight = root[0].weight
    assert isinstance(root[0], smp.nn.DistributedLinear)
    assert weight.dtype == torch.float64 and not weight.requires_grad and not root[0].training


def test_a_partly_frozen_module_stays(caplog: pytest.LogCaptureFixture) -> None:
    with smp.tensor_parallelism():
        root = nn.Sequential(nn.Linear(4, 4))
    root[0].bias.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "smp"):
        smp.DistributedModel(root)
    assert type(root[0]) is nn.Linear and "freeze after wrapping" in caplog.text


def test_meta_modules_are_initialised_where_they_are_needed() -> None:
    with smp.model_creation(tensor_parallelism=True), smp.delay_param_initialization():
        root = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert root[0].weight.is_meta
    smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedLinear)
    assert not root[0].weight.is_meta and bool(root[0].weight.isfinite().all())


def test_model_creation_has_a_default_dtype() -> None:
    with smp.model_creation(dtype=torch.bfloat16):
        made = nn.Linear(2, 2)
    assert made.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_delayed_initialisation_by_the_configuration() -> None:
    smp.init({"delayed_parameter_initialization": True})
    with smp.model_creation():
        made = nn.Linear(2, 2)
    assert made.weight.is_meta


@pytest.mark.parametrize("classes", [(Scaled, nn.Linear), (int, DistributedScaled)])
def test_registration_refuses_other_classes(classes: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="expected a subclass of"):
        smp.tp_register_with_module(*classes)


def test_marking_refuses_what_is_no_module_or_wrapped() -> None:
    with pytest.raises(ValueError, match="expected an nn.Module"):
        smp.set_tensor_parallelism([nn.Linear(2, 2)])  # type: ignore[arg-type]
    root = nn.Sequential(nn.Linear(2, 2))
    model = smp.DistributedModel(root)
    with pytest.raises(RuntimeError, match="before the model is wrapped"):
        smp.set_tensor_parallelism(root[0])
    assert isinstance(model, nn.Module)


def test_a_deep_copy_of_a_replaced_module_is_its_own() -> None:
    register()
    with smp.tensor_parallelism():
        root = nn.Sequential(Scaled(4))
    smp.DistributedModel(root)
    other = copy.deepcopy(root)
    with torch.no_grad():
        other[0].inner.weight.zero_()
        other[0].inner.bias.zero_()
    x = torch.randn(2, 4)
    assert not other(x).any() and root(x).any()


def test_an_optimizer_with_replaced_parameters_is_refused_by_name() -> None:
    with smp.tensor_parallelism():
        root = nn.Sequential(nn.Linear(4, 4))
    early = torch.optim.SGD(root.parameters(), lr=0.1)
    smp.DistributedModel(root)
    with pytest.raises(ValueError, match="'0.weight' among them"):
        smp.DistributedOptimizer(early)
    smp.DistributedOptimizer(torch.optim.SGD(root.parameters(), lr=0.1))


def test_a_hook_that_returns_other_arguments_is_named() -> None:
    smp.tp_register_with_module(Scaled, DistributedScaled, lambda *args: ((4,), {"size": 1}))
    with smp.tensor_parallelism():
        root = nn.Sequential(Scaled(4))
    with pytest.raises(ValueError, match="Scaled was registered with DistributedScaled"):
        smp.DistributedModel(root)
