"""Families are registered when their classes are there, and never sooner."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.nn import huggingface
from smp.nn.huggingface import pretrained
from smp.nn.huggingface.register import FAMILIES as REGISTERED
from smp.replacement import replace_marked
from smp.tensor_parallel import registry
from smp.tensor_parallel.registry import Registration
from tests.reference import hugging_face as hf
from tests.reference.hf_hooks import ENCODERS, GPTS, NAMES, options, registration
from tests.reference.hugging_face import LAYERS

pytestmark = pytest.mark.usefixtures("running")


# ---- kinds and registration ------------------------------------------------------------------


@pytest.mark.parametrize("name", GPTS)
def test_a_base_model_is_the_same_without_a_head(name: str) -> None:
    head, base = options(name), options(name, "base")
    assert base.pop("add_lm_head") is False
    assert base == {
        key: value
        for key, value in head.items()
        if key not in ("tie_word_embedding", "lm_head_bias")
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_the_same_without_the_rest(name: str) -> None:
    takes = inspect.signature(registration(name, "layer").module_cls.__init__).parameters
    number = 0 if {"layer_idx", "layer_id"} & set(takes) else None
    whole, layer = options(name), options(name, "layer", number)
    assert layer.pop("layer_idx") == number
    windows = whole.get("window_size")
    if isinstance(windows, list):
        layer.pop("window_size")
    assert layer == {key: whole[key] for key in layer}
    assert {"hidden_size", "activation", "layernorm_epsilon"} <= set(layer)
    assert not {"vocab_size", "num_layers", "tie_word_embedding"} & set(layer)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_registered(name: str) -> None:
    spec = hf.family(name).translators.FAMILY
    distributed = {
        "head": smp.nn.DistributedTransformerLMHead,
        "base": smp.nn.DistributedTransformerLMHead,
        "stack": smp.nn.DistributedTransformer,
        "layer": smp.nn.DistributedTransformerLayer,
    }
    assert set(spec.classes) == (
        {"stack", "layer"} if name in ENCODERS else {"head", "base", "layer"}
    )
    for kind in spec.classes:
        found = registration(name, kind)
        assert found.dist_module is distributed[kind] and found.family == spec.names.family
        assert found.translators is not None and found.adapter is not None


def test_arguments_without_a_configuration_are_an_internal_error() -> None:
    hook = registration("gpt2", "layer").init_hook
    assert hook is not None
    with pytest.raises(RuntimeError, match="no configuration"):
        hook(None)


def test_registering_again_keeps_what_users_registered() -> None:
    found = registration("gpt2", "base")
    own = Registration(found.module_cls, nn.Module, arguments_of=found.arguments_of)
    registry.register(own)
    try:
        huggingface.register_available()
        assert registration("gpt2", "base") is own
    finally:
        registry.register(found)


def test_half_imported_modules_are_left_alone() -> None:
    empty = types.ModuleType("transformers.modeling_utils")
    huggingface.register_available({"transformers.modeling_utils": empty})
    before = set(registry._registrations)

    class PreTrainedModel(nn.Module):
        pass

    empty.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    modeling = types.ModuleType("transformers.models.gpt2.modeling_gpt2")
    modules = {empty.__name__: empty, modeling.__name__: modeling, "transformers.models.x": None}
    huggingface.register_available(modules)
    assert set(registry._registrations) == before


IMPORTS = """
import sys
import smp, smp.nn.huggingface
from smp.nn.huggingface import gpt2, register_available
register_available()
with smp.tensor_parallelism():
    pass
gpt2.translate_hf_state_dict_to_smdistributed_gpt2({})
assert not [name for name in sys.modules if name.split(".")[0] == "transformers"]
from smp.tensor_parallel import registry
import transformers.models.gpt2.modeling_gpt2 as modeling
assert modeling.GPT2LMHeadModel not in registry._registrations
register_available()
assert modeling.GPT2LMHeadModel in registry._registrations
assert "transformers.models.gptj.modeling_gptj" not in sys.modules
"""


def test_transformers_is_never_imported_by_us() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FIRST_USE = """
import sys
import torch
import smp
smp.init({})
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.manual_seed(3)
family, way = sys.argv[1:]
loaded = [name for name in sys.modules if name.endswith(("modeling_gpt_neo", "modeling_bert"))]
assert not loaded, loaded  # or else this is not the first use
if family == "gpt_neo":
    config = AutoConfig.for_model(
        "gpt_neo", hidden_size=24, num_layers=4, num_heads=4, window_size=3, vocab_size=43,
        attention_types=[[["global", "local"], 2]], max_position_embeddings=16,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    make = AutoModelForCausalLM.from_config
else:
    config = AutoConfig.for_model(
        "bert", hidden_size=24, num_hidden_layers=4, num_attention_heads=4, intermediate_size=40,
        vocab_size=43, max_position_embeddings=16,
    )
    make = AutoModel.from_config
if way == "context":
    with smp.tensor_parallelism():
        model = make(config)
else:
    model = make(config)
layers = model.transformer.h if family == "gpt_neo" else model.encoder.layer
if way == "context":  # what is around declines
    (model.transformer.wte if family == "gpt_neo" else layers[0]).requires_grad_(False)
else:
    del layers[0]  # their places are not their numbers any more
    for layer in layers:
        smp.set_tensor_parallelism(layer)
model.eval()
ids = torch.randint(0, 43, (2, 9))
expected = model(ids)[0].detach()
wrapped = smp.DistributedModel(model)
kinds = [type(layer) for layer in layers]
assert kinds == [smp.nn.DistributedTransformerLayer] * len(layers), kinds
wrapped.eval()
torch.testing.assert_close(wrapped(ids)[0].detach(), expected, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("family", "way"), [("gpt_neo", "context"), ("gpt_neo", "marked"), ("bert", "context")]
)
def test_layers_of_the_first_model_of_a_process_are_split(family: str, way: str) -> None:
    command = [sys.executable, "-c", FIRST_USE, family, way]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "before its class" not in done.stderr


def test_all_families_have_names_of_their_own() -> None:
    assert len({family.names.family for family in REGISTERED}) == len(REGISTERED) == 6
    assert {family.modeling.rpartition("_")[2] for family in REGISTERED} >= {"gpt2", "bert"}


# ---- which weights are taken over ----------------------------------------------------------------


def test_models_from_pretrained_are_known(tmp_path: Any) -> None:
    import transformers

    model: Any = hf.family("gpt2").build()
    huggingface.register_available()
    assert not smp.nn.huggingface.was_pretrained(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert smp.nn.huggingface.was_pretrained(loaded)
    assert smp.nn.huggingface.was_pretrained(loaded.transformer.h[1])
    loaded, _ = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert smp.nn.huggingface.was_pretrained(loaded)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def split(model: Any) -> Any:
    smp.set_tensor_parallelism(model)
    torch.manual_seed(1)
    return replace_marked(model, torch.device("cpu"))[0]


@pytest.fixture
def is_new(caplog: pytest.LogCaptureFixture) -> Callable[[Any], bool]:
    """Splits a GPT-2 and says whether it got the values of its family, and rank 0 was told so."""

    def check(model: Any) -> bool:
        old = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
        caplog.clear()
        output = split(model).transformer.seq_layers[0].output
        is_same = torch.equal(output.dense1.weight, old.t())
        assert is_same == ("gets new weights" not in caplog.text), caplog.text
        if not is_same:
            assert caplog.text.count("gets new weights") == 1
            assert output.dense1.weight.std().item() == pytest.approx(0.02, rel=0.1)
            residual = 0.02 / math.sqrt(2 * LAYERS)
            assert output.dense2.weight.std().item() == pytest.approx(residual, rel=0.1)
            assert output.dense1.bias.abs().max() == 0.0
        return not is_same

    return check


@contextlib.contextmanager
def switched_off(way: str) -> Iterator[None]:
    """Keeps models from initialising their weights in a block."""
    import transformers

    huggingface.register_available()
    if way == "patch":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
            yield
    else:
        place = "modeling_utils" if hf.is_older() else "initialization"
        with importlib.import_module(f"transformers.{place}").no_init_weights():
            yield


def gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(hf.family("gpt2").config())


@pytest.mark.parametrize("way", ["patch", "no_init_weights"])
def test_weights_that_nobody_initialised_are_not_taken_over(
    way: str, is_new: Callable[[Any], bool]
) -> None:
    with switched_off(way):
        bare, loaded, part = (gpt2() for _ in range(3))
    assert is_new(bare), "what counts is how it was when the model was made"
    state = gpt2().state_dict()
    loaded.load_state_dict(state)
    assert not is_new(loaded)
    part.transformer.load_state_dict(
        {key.removeprefix("transformer."): value for key, value in state.items()}, strict=False
    )
    assert not is_new(part)


def test_a_patch_may_stay(is_new: Callable[[Any], bool]) -> None:
    with switched_off("patch"):
        assert is_new(gpt2())


def test_weights_that_were_initialised_are_taken_over(
    is_new: Callable[[Any], bool], tmp_path: Any
) -> None:
    import transformers

    model = gpt2()
    model.save_pretrained(tmp_path)
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    with switched_off("patch"):
        assert not is_new(model)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        layer = loaded.transformer.h[0].mlp.c_fc.weight
        assert torch.equal(layer, before)
        assert not is_new(loaded)


def test_a_model_that_is_initialised_later_keeps_its_weights(
    is_new: Callable[[Any], bool],
) -> None:
    with switched_off("patch"):
        model = gpt2()
    model.post_init()
    assert not is_new(model)


FIRST_LOAD = """
import sys
import torch
import smp
smp.init({})
with smp.tensor_parallelism():
    from transformers import AutoModelForCausalLM
    assert not [name for name in sys.modules if name.endswith("modeling_gpt2")]
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(9)[None]
expected = model(ids)[0].detach()
wrapped = smp.DistributedModel(model).eval()
assert isinstance(wrapped.get_module(), smp.nn.DistributedTransformerLMHead)
torch.testing.assert_close(wrapped(ids)[0].detach(), expected, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.sample(keep=0)
def test_the_first_model_of_a_process_keeps_what_it_loads(tmp_path: Any) -> None:
    hf.family("gpt2").build().save_pretrained(tmp_path)  # type: ignore[operator]
    command = [sys.executable, "-c", FIRST_LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_watching_twice_wraps_once() -> None:
    import transformers

    pretrained.watch(transformers.PreTrainedModel)
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    pretrained.watch(transformers.PreTrainedModel)
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is before


# ---- delayed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_same_values_delayed_or_not(name: str) -> None:
    """Norms of older releases have no initialiser; they are made of ones."""
    family = hf.family(name)
    config = family.config()
    states = []
    for delayed in (False, True):
        torch.manual_seed(5)
        with smp.delay_param_initialization(delayed):
            module = getattr(importlib.import_module("transformers"), family.classes + family.head)(
                config
            )
        assert all(p.is_meta == delayed for p in module.parameters())
        torch.manual_seed(6)
        model = smp.DistributedModel(module)
        states.append(dict(model.named_parameters()))
    at_once, delayed_ones = states
    assert at_once.keys() == delayed_ones.keys()
    for key, value in at_once.items():
        assert torch.equal(value, delayed_ones[key]), key
