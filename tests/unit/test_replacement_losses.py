"""A module is replaced only if nothing that it carries is lost; one process, degree 1."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import smp
from smp.replacement import replace_marked
from tests.reference import hugging_face as hf
from tests.reference.hf_hooks import NAMES

IDS = torch.tensor([[3, 5, 7, 2], [4, 4, 9, 8]])


pytestmark = pytest.mark.usefixtures("running")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "smp")
    return caplog


def note(calls: list[Any], *_: Any) -> None:
    calls.append(None)


class OwnParameter(nn.Parameter):
    pass


def doubled(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear.weight, linear.bias) * 2


def give_attribute(linear: nn.Linear) -> None:
    linear.weight.no_decay = True  # type: ignore[attr-defined]


def give_smaller_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn(3, 4))
    linear.bias = nn.Parameter(torch.randn(3))


def give_own_forward(linear: nn.Linear) -> None:
    linear.forward = functools.partial(doubled, linear)  # type: ignore[method-assign]


def give_old_weight_norm(linear: nn.Linear) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(linear)


EXTRAS: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "forward hook": (
        lambda m: m.register_forward_hook(lambda *a: a[2] * 2),
        "a forward hook on it",
    ),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda _, a: (a[0] * 2,)), "pre-hook on it"),
    "backward hook": (
        lambda m: m.register_full_backward_hook(lambda *a: (a[1][0] * 2,)),
        "a backward hook on it",
    ),
    "backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(lambda *a: (a[1][0] * 2,)),
        "a backward pre-hook on it",
    ),
    "state-dict hook": (
        lambda m: m._register_state_dict_hook(lambda *a: a[1]),
        "a state-dict hook on it",
    ),
    "state-dict pre-hook": (
        lambda m: m.register_state_dict_pre_hook(lambda *_: None),
        "a state-dict pre-hook on it",
    ),
    "load hook": (
        lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
        "a hook on loading state dicts on it",
    ),
    "load post-hook": (
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
        "a hook on loading state dicts on it",
    ),
    "gradient hook": (
        lambda m: m.weight.register_hook(lambda grad: grad * 2),
        "a hook on its parameter 'weight'",
    ),
    "accumulated gradient hook": (
        lambda m: m.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
        "a hook on its parameter 'bias'",
    ),
    "attribute of a parameter": (give_attribute, "'weight' has an attribute 'no_decay'"),
    "class of a parameter": (
        lambda m: m.register_parameter("weight", OwnParameter(m.weight.data)),
        "'weight' is a OwnParameter",
    ),
    "dtype of a parameter": (
        lambda m: m.register_parameter("bias", nn.Parameter(m.bias.data.double())),
        "several dtypes (float32, float64)",
    ),
    "shape of a parameter": (give_smaller_weight, "'bias' has shape [3]"),
    "further parameter": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(4))),
        "there is a parameter 'scale'",
    ),
    "further buffer": (
        lambda m: m.register_buffer("mask", torch.ones(4)),
        "there is a buffer 'mask'",
    ),
    "further part": (lambda m: m.add_module("act", nn.ReLU()), "it has a part 'act'"),
    "own forward": (give_own_forward, "a forward of its own"),
    "further method": (
        lambda m: setattr(m, "measure", functools.partial(doubled, m)),
        "an attribute 'measure'",
    ),
    "old weight norm": (
        give_old_weight_norm,
        "a forward pre-hook on it (torch.nn.utils.weight_norm.WeightNorm)",
    ),
    "old spectral norm": (nn.utils.spectral_norm, "a forward pre-hook on it"),
    "pruning": (
        lambda m: prune.random_unstructured(m, "weight", amount=0.5),
        "a forward pre-hook on it",
    ),
    "parametrization": (parametrizations.weight_norm, "subclass of Linear"),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_linear_with_what_would_be_lost_stays(
    extra: str, warnings: pytest.LogCaptureFixture
) -> None:
    give, reason = EXTRAS[extra]
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    give(root[0])
    linear = root[0]
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert root[0] is linear, "it was replaced"
    assert isinstance(root[1], smp.nn.DistributedLinear)
    assert warnings.text.count("is not distributed") == 1 and reason in warnings.text


@pytest.mark.parametrize("extra", ["forward hook", "backward hook", "further buffer"])
def test_the_rule_holds_for_embeddings(extra: str, warnings: pytest.LogCaptureFixture) -> None:
    root = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    EXTRAS[extra][0](root[0])  # type: ignore[arg-type]
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert type(root[0]) is nn.Embedding and isinstance(root[1], smp.nn.DistributedLinear)


def test_values_on_a_module_go_along() -> None:
    """Sets values on a module, as scripts mark layers for their own initialisation."""
    root = nn.Sequential(nn.Linear(4, 4))
    root[0].is_residual = True
    root[0].group = ["a"]
    group = root[0].group
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedLinear)
    assert root[0].is_residual is True and root[0].group is group


def test_tensors_that_share_memory_stay_together(warnings: pytest.LogCaptureFixture) -> None:
    """Ties by data, which are no ties of parameters."""
    root = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 4))
    root[1].weight = nn.Parameter(root[0].weight.data)
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert type(root[0]) is nn.Embedding and type(root[1]) is nn.Linear
    assert isinstance(root[2], smp.nn.DistributedLinear)
    assert "shares parameters or buffers" in warnings.text
    with torch.no_grad():
        root[0].weight[2, 1] = 7.0
    assert root[1].weight[2, 1] == 7.0


class Listing(nn.Module):
    """Calls its layers by a list of its own, as many older models do."""

    def __init__(self, keep: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        for idx, layer in enumerate(layers):
            setattr(self, f"layer{idx}", layer)
        self.kept = keep(layers)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.kept() if callable(self.kept) else self.kept
        return self.last(second(first(x)))


class Holder:
    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def __call__(self) -> list[nn.Module]:
        return self.layers


def closure(layers: list[nn.Module]) -> Callable[[], Any]:
    return lambda: (layers[0], layers[1])


@pytest.mark.parametrize(
    "keep",
    [
        list, tuple, lambda layers: [m.forward for m in layers], Holder, closure,
        lambda layers: functools.partial(list, layers),
    ],
    ids=["list", "tuple", "methods", "object", "closure", "partial"],
)  # fmt: skip
def test_modules_that_attributes_refer_to_stay(
    keep: Callable[..., Any], warnings: pytest.LogCaptureFixture
) -> None:
    root = Listing(keep)
    smp.set_tensor_parallelism(root)
    model = smp.DistributedModel(root)
    assert type(root.layer0) is nn.Linear and type(root.layer1) is nn.Linear
    assert isinstance(root.last, smp.nn.DistributedLinear)
    assert "the attribute 'kept' of a Listing refers to it" in warnings.text
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_replaced_module_cannot_be_called() -> None:
    """Code that kept it outside of the model would train nothing."""
    root = nn.Sequential(nn.Linear(4, 4))
    kept = root[0]
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert isinstance(root[0], smp.nn.DistributedLinear)
    with pytest.raises(RuntimeError, match=r"a Linear \('0'\) was called whose place"):
        kept(torch.ones(1, 4))


# ---- nothing is split


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


def test_who_gets_nothing_is_told_why(warnings: pytest.LogCaptureFixture) -> None:
    root = nn.Sequential(OwnLinear(4, 4), OwnLinear(4, 4), nn.Conv1d(4, 4, 1), nn.ReLU())
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    (text,) = [r.getMessage() for r in warnings.records if "nothing of it is split" in r.message]
    assert "asked for Sequential" in text
    assert "OwnLinear (2 modules, 40 parameters) is not distributed: it is a subclass of" in text
    assert "Conv1d (1 modules, 20 parameters) has no distributed form" in text


def test_a_subclass_that_stays_is_named(warnings: pytest.LogCaptureFixture) -> None:
    root = nn.Sequential(OwnLinear(4, 4), OwnLinear(4, 4), nn.Linear(4, 4))
    smp.set_tensor_parallelism(root)
    smp.DistributedModel(root)
    assert "nothing of it is split" not in warnings.text
    assert warnings.text.count("OwnLinear ('0') is not distributed: it is a subclass") == 1


def test_who_asks_for_nothing_is_told_nothing(warnings: pytest.LogCaptureFixture) -> None:
    root = nn.Sequential(OwnLinear(4, 4))
    smp.set_tensor_parallelism(root, enabled=False)
    smp.DistributedModel(root)
    assert "smp" not in warnings.text


# ---- Hugging Face


def split(model: nn.Module) -> nn.Module:
    smp.set_tensor_parallelism(model)
    return replace_marked(model, torch.device("cpu"))[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_replacement_loses_a_hook(name: str) -> None:
    """A hook on any part of any family is called as often as in the plain model."""
    family = hf.family(name)
    plain = family.build().eval()
    places = [
        path
        for path, _ in plain.named_modules()
        # One layer represents all.
        if not any(part.isdigit() and part != "0" for part in path.split("."))
    ]
    assert len(places) > 10
    for path in places:
        expected: list[Any] = []
        handle = plain.get_submodule(path).register_forward_hook(functools.partial(note, expected))
        plain(IDS)
        handle.remove()
        calls: list[Any] = []
        model = family.build().eval()
        model.get_submodule(path).register_forward_hook(functools.partial(note, calls))
        split(model)(IDS)
        assert len(calls) == len(expected), path


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_model_of_a_family_is_split(name: str) -> None:
    """Against a rule that declines everything."""
    family = hf.family(name)
    made = split(family.build())
    kinds = smp.nn.DistributedTransformerLMHead | smp.nn.DistributedTransformer
    assert any(isinstance(module, kinds) for module in made.modules())


def first(model: nn.Module, cls: type[nn.Module]) -> Any:
    return next(module for module in model.modules() if isinstance(module, cls))


def change_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dropout": (change_dropout, "the attribute 'p' was changed of"),
    "epsilon": (
        lambda m: setattr(first(m, nn.LayerNorm), "eps", 0.5),
        "the attribute 'eps' was changed of",
    ),
    "activation": (
        lambda m: setattr(m.transformer.h[0].mlp, "act", nn.Tanh()),
        "its part 'transformer.h.0.mlp.act' is a Tanh instead of a",
    ),
    "part in evaluation mode": (
        lambda m: m.transformer.h[0].eval(),
        "its part 'transformer.h.0' is in evaluation mode",
    ),
    "norm of another kind": (
        lambda m: setattr(m.transformer, "ln_f", nn.Identity()),
        "its part 'transformer.ln_f' is a Identity instead of a LayerNorm",
    ),
    "further parameter": (
        lambda m: m.transformer.h[0].register_parameter("gate", nn.Parameter(torch.ones(1))),
        "there is a parameter 'gate' of 'transformer.h.0'",
    ),
    "configuration changed later": (
        lambda m: setattr(m.config, "layer_norm_epsilon", 0.5),
        "the attribute 'eps' was changed of",
    ),
    "hook on a parameter": (
        lambda m: m.transformer.wpe.weight.register_hook(lambda grad: grad * 2),
        "a hook on its parameter 'transformer.wpe.weight'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_taken_for_a_plain_one(
    change: str, warnings: pytest.LogCaptureFixture
) -> None:
    model = hf.family("gpt2").build().train()
    make, reason = CHANGES[change]
    make(model)
    others = copy.deepcopy(model)
    made = split(model)
    assert made is model, "it was replaced"
    assert reason in warnings.text
    torch.testing.assert_close(made.eval()(IDS)[0], others.eval()(IDS)[0])


def test_a_changed_forward_of_a_class_is_noticed(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """Changes a class of a family, as scripts do that bring attention of their own."""
    model = hf.family("gpt2").build()
    cls = type(model.transformer.h[0].mlp)  # type: ignore[union-attr, index]
    original = cls.forward

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return original(self, hidden_states) * 2

    monkeypatch.setattr(cls, "forward", forward)
    assert split(model) is model
    assert f"the forward of GPT2MLP was replaced by one of {__name__}" in warnings.text


def test_a_changed_buffer_is_noticed(warnings: pytest.LogCaptureFixture) -> None:
    model: Any = hf.family("gptneox").build()
    model.gpt_neox.rotary_emb.inv_freq.mul_(0.5)
    assert split(model) is model
    assert "the values of the buffer 'inv_freq' were changed" in warnings.text


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_was_used_is_split_all_the_same(name: str) -> None:
    """Splits a model in use: attributes that transformers leaves there are no user's extras."""
    family = hf.family(name)
    model: Any = family.build().train()
    model(IDS, output_hidden_states=True)
    model.gradient_checkpointing_enable()
    model.accepts_loss_kwargs = False
    made = split(model)
    kinds = smp.nn.DistributedTransformerLMHead | smp.nn.DistributedTransformer
    assert any(isinstance(module, kinds) for module in made.modules())
    assert made.accepts_loss_kwargs is False


# ---- what the distributed form has not


def test_what_the_original_had_is_missed_by_name() -> None:
    made: Any = split(hf.family("gpt2").build())
    with pytest.raises(
        AttributeError, match=r"taken the place of a GPT2LMHeadModel \('\(root\)'\)"
    ):
        made.get_input_embeddings()
    assert not hasattr(made, "generate")


def vision_model() -> Any:
    import transformers

    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = transformers.GPTNeoXConfig(**small, vocab_size=40, max_position_embeddings=32)
    vision = transformers.CLIPVisionConfig(**small, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=39)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_models_of_several_get_split_layers(warnings: pytest.LogCaptureFixture) -> None:
    """Splits models that read their text model's embedding and pass it arguments of other parts."""
    ids = torch.tensor([[39, 39, 39, 39, 3, 5, 7]])
    pixels = torch.randn(1, 3, 8, 8)
    plain, other = vision_model(), vision_model()
    more = {"logits_to_keep": 2}
    expected = plain(input_ids=ids, pixel_values=pixels, **more)
    made = split(other)
    got = made(input_ids=ids, pixel_values=pixels, **more)
    torch.testing.assert_close(got.logits, expected.logits)
    assert sum(isinstance(m, smp.nn.DistributedTransformerLayer) for m in made.modules()) == 2
    assert "('model.language_model') is not distributed: the LlavaModel" in warnings.text
    with pytest.raises(ValueError, match="argument 'softcap' has no effect"):
        made(input_ids=ids, pixel_values=pixels, softcap=1.0)
