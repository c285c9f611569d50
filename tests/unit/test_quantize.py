"""Quantized layers are made of files as transformers makes them, and what cannot be is named."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import Tensor, nn

import smp
from smp.checkpoint import exporting
from smp.config.schema import Config
from smp.modules import packed
from smp.partition.room import state_factor
from smp.planning.estimate import estimate
from smp.planning.run_cuts import Run
from smp.replacement.fp8_layers import choose_layers
from tests.clients import quantized_training as training
from tests.conftest import REPO
from tests.docs.pages import blocks_of

pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

Start = Callable[..., None]
BY_BITSANDBYTES = ("nf4", "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    training.write_base(folder)
    return folder


def bare(**options: Any) -> Any:
    """Returns a small model without values."""
    from transformers import LlamaForCausalLM

    with smp.delay_param_initialization():
        sizes = training.sizes()
        sizes.update(options)
        return LlamaForCausalLM(sizes)


def layer_of(kind: str) -> Any:
    """Returns a quantized layer with a bias."""
    torch.manual_seed(3)
    made: Any = {
        "nf4": lambda: bitsandbytes.nn.Linear4bit(
            128, 64, compute_dtype=torch.float32, quant_type="nf4"
        ),
        "int8": lambda: bitsandbytes.nn.Linear8bitLt(128, 64, has_fp16_weights=False),
    }[kind]()
    made.bias.requires_grad_(False)
    return made.to("cpu")


def unpacked(layer: Any) -> Tensor:
    """Returns the values of a layer's weight, as the papers define them."""
    weight = layer.weight
    if type(weight).__name__ == "Int8Params":
        return weight.data.double() * weight.SCB.double()[:, None] / 127
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        table, blocks = state.state2.code, state.state2.absmax.repeat_interleave(256)
        scales = table[scales.long()] * blocks[: scales.numel()] + state.offset
    bytes_ = weight.data.reshape(-1)
    digits = torch.stack((bytes_ >> 4, bytes_ & 15), 1).reshape(-1).long()
    values = state.code.double()[digits] * scales.double().repeat_interleave(state.blocksize)
    return values.reshape(state.shape)


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("kind", BY_BITSANDBYTES)
def test_products_and_gradients_of_the_cpu_are_those_of_unpacked_weights(kind: str) -> None:
    layer = layer_of(kind)
    weight = unpacked(layer)
    x = torch.randn(5, 128, requires_grad=True)
    out = layer(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert x.grad is not None and x.grad.abs().max() > 0.1
    expected = x.detach().double() @ weight.T + layer.bias.double()
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("kind", BY_BITSANDBYTES)
def test_checksums_do_not_change_with_forwards_and_do_with_values(kind: str) -> None:
    layer, again, other = layer_of(kind), layer_of(kind), layer_of(kind)
    for part in list(packed.parts_of(other.weight).values())[:1]:
        part[0] += 1
    layer(torch.randn(2, 128, requires_grad=True))
    assert packed.digest(layer) == packed.digest(again) != packed.digest(other)
    assert type(layer.weight).__name__ in packed.digest(layer)


def test_an_evaluation_leaves_the_gradients_of_the_next_step(start: Start, base: str) -> None:
    start()
    model = smp.DistributedModel(training.loaded(base, "nf4", False))
    ids = training.batch(0)

    @smp.step
    def train_step(model: Any) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def grads() -> dict[str, Tensor]:
        model.zero_grad()
        train_step(model)
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert len(found) == 24 and all(grad.abs().max() > 0 for grad in found.values())
        return found

    before = grads()
    model.eval()
    with torch.no_grad():
        model.get_module()(input_ids=ids)
    model.train()
    for name, grad in grads().items():
        assert torch.equal(grad, before[name]), name


def test_weights_that_an_evaluation_has_packed_again_are_refused(start: Start) -> None:
    start()
    root = nn.Sequential(layer_of("nf4"))
    root[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="'0' .Params4bit. was packed again by an evaluation"):
        smp.DistributedModel(root)


def test_packed_weights_that_require_gradients_are_refused(start: Start) -> None:
    start()
    root = nn.Sequential(layer_of("nf4"))
    root[0].weight = packed.mapped(root[0].weight, lambda _, part: part.float())
    root[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="requires gradients.*freeze it"):
        smp.DistributedModel(root)


# ---- what smp.quantize refuses


def test_other_models_and_configurations_are_refused(base: str) -> None:
    from transformers import BitsAndBytesConfig, GPTQConfig

    config = training.config_of("nf4")
    for model in (nn.Linear(2, 2), training.loaded(base, "nf4", False)):
        with pytest.raises(ValueError, match="expected a PreTrainedModel without adapters"):
            smp.quantize(model, config)
    for refused, why in (
        (BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True), "16 bits"),
        (BitsAndBytesConfig(), "neither load_in_4bit nor load_in_8bit"),
        (GPTQConfig(bits=4), "GPTQConfig cannot be used, because it is of another kind"),
    ):
        with pytest.raises(ValueError, match=why):
            smp.quantize(bare(), refused)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = training.config_of("nf4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="BitsAndBytesConfig needs the package bitsandbytes"):
        smp.quantize(bare(), config)


def test_files_that_do_not_fit_are_refused(base: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config = training.config_of("int8")
    with pytest.raises(FileNotFoundError):
        smp.quantize(bare(), config, weights=tmp_path)
    with pytest.raises(ValueError, match="lacks 9 tensors of the model, 'model.layers.4"):
        smp.quantize(bare(num_hidden_layers=5), config, weights=base)
    with pytest.raises(ValueError, match="is for a model on the meta device, and this one has"):
        smp.quantize(LlamaForCausalLM(training.sizes()), config, weights=base)


def test_values_that_do_not_fit_are_refused_when_they_are_read(start: Start, base: str) -> None:
    start()
    config = training.config_of("int8")
    model = smp.quantize(bare(intermediate_size=96), config, weights=base)
    with pytest.raises(ValueError, match=r"has shape \(128, 64\) in the files, and \(96, 64\) in"):
        smp.DistributedModel(model)
    with pytest.raises(ValueError, match="has no values to quantize; pass weights="):
        smp.DistributedModel(smp.quantize(bare(), config))


def test_layers_tied_to_others_are_refused() -> None:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["nothing"])
    model = bare(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="'lm_head.weight' cannot be quantized, because it is the"):
        smp.quantize(model, config)


def test_a_method_that_cannot_pack_a_layer_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("sizes have to be divisible by 48")

    monkeypatch.setattr(bitsandbytes.nn.Params4bit, "_quantize", fails)
    text = "'model.layers.0.self_attn.q_proj.weight' of shape (64, 64) cannot be quantized on "
    text += "meta by Linear4bit: AssertionError: sizes have to be divisible by 48"
    with pytest.raises(ValueError, match=re.escape(text)):
        smp.quantize(bare(), training.config_of("nf4"), weights=base)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; pip install -r requirements/torchao.txt",
)
@pytest.mark.parametrize("is_late", [True, False])
def test_packings_of_torchao_that_do_not_fit_are_refused_by_name(base: str, is_late: bool) -> None:
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        IntxWeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup
    from transformers import LlamaForCausalLM, TorchAoConfig

    def quantize(config: Any) -> None:
        if is_late:
            smp.quantize(bare(), TorchAoConfig(config), weights=base)
        else:
            smp.quantize(LlamaForCausalLM(training.sizes()), TorchAoConfig(config))

    by_48 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(48))
    with pytest.raises(ValueError, match="q_proj.weight.*by IntxWeightOnlyConfig: .*divisible"):
        quantize(by_48)
    # torchao leaves such a layer as it is, and says nothing.
    with pytest.raises(ValueError, match="Int4WeightOnlyConfig: it is left in full precision"):
        quantize(Int4WeightOnlyConfig(group_size=256))
    with pytest.raises(ValueError, match="quantizes more than weights"):
        quantize(Int8DynamicActivationInt8WeightConfig())


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; pip install -r requirements/torchao.txt",
)
def test_weights_of_torchao_in_another_dtype_than_training_are_refused(
    start: Start, base: str
) -> None:
    start(bf16=True)
    with pytest.raises(ValueError, match="unpacks to torch.float32, and training is in torch.bf"):
        smp.DistributedModel(training.loaded(base, "ao-int4", False))


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; pip install -r requirements/torchao.txt",
)
def test_quantized_layers_keep_their_own_products_with_fp8(start: Start, base: str) -> None:
    start(fp8="rowwise", fp8_skip="none")
    plain = training.loaded(base, "ao-int8", False)
    choice = choose_layers(plain, "none")
    assert len(choice.left["with quantized weights"]) == 28
    smp.DistributedModel(plain)
    for layer in plain.modules():
        if any(p is not None and packed.is_packed(p) for p in layer._parameters.values()):
            assert type(layer) is nn.Linear


# ---- values


class Counted(nn.Module):
    """A layer whose buffer is part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)


def test_buffers_are_read_from_the_files(start: Start, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    def counted(model: Any) -> Any:
        model.model.layers[1].counted = Counted()
        return model

    torch.manual_seed(5)
    whole = counted(LlamaForCausalLM(training.sizes()))
    whole.model.layers[1].counted.count += 7
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    start()
    late = smp.quantize(counted(bare()), training.config_of("nf4"), weights=tmp_path)
    module = smp.DistributedModel(late).get_module()
    assert module.model.layers[1].counted.count.tolist() == [7, 7, 7]
    assert module.model.layers[1].counted.hidden.tolist() == [0, 0, 0]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("kind", BY_BITSANDBYTES)
def test_late_layers_have_the_bytes_of_transformers(start: Start, base: str, kind: str) -> None:
    from transformers import LlamaForCausalLM

    start()
    late = smp.quantize(bare(), training.config_of(kind), weights=base)
    late = smp.DistributedModel(late).get_module()
    plain = LlamaForCausalLM.from_pretrained(
        base, quantization_config=training.config_of(kind), device_map="cpu", dtype=torch.float32
    )
    assert late.hf_quantizer.is_trainable and late.is_quantized
    ours, theirs = dict(late.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    num_packed = 0
    for name, parameter in theirs.items():
        num_packed += packed.is_packed(parameter)
        parts = packed.parts_of(ours[name])
        assert parts.keys() == packed.parts_of(parameter).keys()
        for part, value in packed.parts_of(parameter).items():
            assert torch.equal(parts[part], value), (name, part)
    assert num_packed == 28


# ---- checkpoints


def test_checkpoints_of_other_quantized_weights_are_refused(
    start: Start, base: str, tmp_path: Path
) -> None:
    start()
    ids = training.batch(0)

    def wrapped(folder: str) -> smp.DistributedModel:
        return smp.DistributedModel(training.loaded(folder, "nf4", False))

    first = wrapped(base)
    smp.save_checkpoint(str(tmp_path / "ckpt"), "first", model=first)
    with pytest.raises(ValueError, match="a whole model is written in full precision.*Params4bit"):
        smp.save_checkpoint(str(tmp_path / "ckpt"), "whole", partial=False, model=first)
    with pytest.raises(ValueError, match="lacks the quantized weights of its model"):
        exporting.export(next((tmp_path / "ckpt").glob("first*")), tmp_path / "exported")
    given = first.state_dict()
    smp.shutdown()

    from transformers import LlamaForCausalLM

    torch.manual_seed(50)
    LlamaForCausalLM(training.sizes()).save_pretrained(tmp_path / "other")
    start()
    other = wrapped(str(tmp_path / "other"))
    with pytest.raises(RuntimeError, match="saved beside other quantized weights: those of 'base"):
        smp.resume_from_checkpoint(str(tmp_path / "ckpt"), tag="first")
    smp.resume_from_checkpoint(str(tmp_path / "ckpt"), tag="first", strict=False)
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_A.default.weight"
    assert torch.equal(other.state_dict()[name], given[name])
    with pytest.raises(ValueError, match="differs from the quantized weight of the model"):
        other.load_state_dict(given)
    other.get_module()(input_ids=ids)
    smp.shutdown()

    start()
    plain = training.with_adapters(LlamaForCausalLM.from_pretrained(base), False)
    whole = smp.DistributedModel(plain)
    with pytest.raises(RuntimeError, match="the checkpoint has nothing for 'base_model"):
        smp.resume_from_checkpoint(str(tmp_path / "ckpt"), tag="first")
    assert whole.partitioned


def test_only_adapters_are_saved_as_adapters(start: Start, tmp_path: Path) -> None:
    start()
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="expected a model of PEFT, got Sequential"):
        smp.save_adapters(model, tmp_path)


# ---- predictions


def test_predictions_count_the_bytes_of_packed_weights() -> None:
    model = training.with_adapters(smp.quantize(bare(), training.config_of("nf4")), False)
    ids = torch.zeros(1, 12, dtype=torch.long)
    packed_bytes = sum(packed.num_bytes(p) for p in model.parameters() if packed.is_packed(p))
    rest = [p for p in model.parameters() if not packed.is_packed(p)]
    others, trained = sum(p.numel() for p in rest), sum(p.numel() for p in rest if p.requires_grad)
    for values, digits in (({}, 4), ({"sharded_data_parallel_degree": 2}, 4)):
        config = Config.from_dict({"ddp": True, **values})
        num_ranks = values.get("sharded_data_parallel_degree", 1)
        run = Run(config, frozenset(values), num_ranks)
        held = estimate(model, (), {"input_ids": ids, "labels": ids}, run).stages[0].held
        assert held.parameters == packed_bytes + digits * others / num_ranks
        assert held.optimizer == 8 * trained / num_ranks
    # 4 bits each, a byte of scale for 64 of them, and tables.
    assert packed_bytes < 28 * 64 * 128 * 0.6


def test_packed_weights_have_no_state() -> None:
    linear, layer = nn.Linear(128, 64), layer_of("nf4")
    config = Config.from_dict({})
    assert state_factor(linear.parameters(), config, 1) == 4
    assert state_factor([layer.weight], config, 1) == 1
    num_packed, num_bytes = packed.num_bytes(layer.weight), 4 * (128 * 64 + 64)
    expected = (num_packed + 4 * num_bytes) / (num_packed + num_bytes)
    assert state_factor([*linear.parameters(), layer.weight], config, 1) == expected


@pytest.mark.sample(keep=0)
def test_command_counts_a_large_packed_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = blocks_of(REPO / "docs" / "gallery.md")
    source = next(block for block in page if block.marks.get("file") == "big_quantized.py")
    command = next(block for block in page if "big_quantized:model" in block.source)
    printed = page[page.index(command) + 1].source
    (tmp_path / "big_quantized.py").write_text(source.source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = shlex.split(command.source.replace("\\\n", " "))
    assert words[0] == "smp" and main(words[1:]) == 0
    assert capsys.readouterr().out.split() == printed.split()
