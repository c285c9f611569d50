"""Distributed modules in a group of one rank, against plain PyTorch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import smp
from smp import _C
from smp.initial.initialise import initialise_delayed
from smp.nn import attention
from smp.nn import layout as layouts
from smp.nn.attention import rotary_tables
from smp.nn.linear import RowLinear
from smp.partition.tree import kind_of
from tests.reference.split_modules import CASES, Case, compare, float64

_LM: dict[str, Any] = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 11,
    "num_positions": 8,
}


@pytest.fixture(autouse=True)
def runtime() -> Iterator[None]:
    smp.init({})
    torch.manual_seed(0)
    yield
    smp.shutdown()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_module_equals_the_plain_one(case: Case) -> None:
    compare(case, 0, 1, False)


# ---- masks and scores ------------------------------------------------------------------


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "softmax"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_anything_to_see_stay_finite(
    flash: bool, causal: bool, dtype: torch.dtype
) -> None:
    layer = smp.nn.DistributedAttentionLayer(
        2, 4, 8, 0.0, 0.0, causal_mask_size=6 if causal else None, flash_attention=flash
    ).to(dtype)
    x = torch.randn(2, 5, 8).to(dtype).requires_grad_()
    mask = torch.zeros(2, 1, 1, 5)
    mask[0] = torch.finfo(torch.float32).min  # all of a sample
    mask[1, ..., :2] = torch.finfo(torch.float32).min  # padding on the left
    output = layer((x, mask))
    output.sum().backward()
    assert x.grad is not None
    assert output.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_the_fused_kernel_and_our_softmax_agree(causal: bool) -> None:
    with float64():
        options: dict[str, Any] = {"causal_mask_size": 6 if causal else None}
        layers = [
            smp.nn.DistributedAttentionLayer(2, 4, 8, 0.0, 0.0, **options, flash_attention=flash)
            for flash in (True, False)
        ]
        layers[1].load_state_dict(layers[0].state_dict())
        x = torch.randn(2, 5, 8)
        mask = torch.zeros(2, 1, 1, 5)
        mask[0, ..., :2] = torch.finfo(torch.float64).min
        first, second = (layer((x, mask)) for layer in layers)
        assert torch.allclose(first, second, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window_size", {"causal_mask_size": 6, "window_size": 2}),
        ("use_alibi", {"use_alibi": True}),
        ("query_key_layer_scaling", {"query_key_layer_scaling": True}),
    ],
)
def test_layers_say_once_what_the_fused_kernel_cannot_do(
    name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"num_layers": 3, "num_attention_heads": 2, "attention_head_size": 4}
    sizes |= {"hidden_size": 8, "intermediate_size": 8}
    with caplog.at_level(logging.INFO, "smp"):
        smp.nn.DistributedTransformer(**sizes)
        smp.nn.DistributedTransformer(**sizes, **options, flash_attention=False)
        assert not caplog.records, "it can do the one, and the other does not ask for it"
        smp.nn.DistributedTransformer(**sizes, **options)
    (line,) = [record for record in caplog.records if record.name == "smp"]
    assert line.levelno == logging.INFO and f" {name} " in line.getMessage()


def test_a_mask_that_was_changed_is_read_again() -> None:
    layer = smp.nn.DistributedAttentionLayer(2, 4, 8, 0.0, 0.0, causal_mask_size=6)
    x, mask = torch.randn(1, 5, 8), torch.zeros(1, 1, 1, 5)
    before = layer((x, mask))
    mask[..., 0] = -1e9
    after = layer((x, mask))
    assert not torch.allclose(before, after)
    assert torch.equal(after, layer((x, mask.clone())))


def test_inference_mode_works() -> None:
    layer = smp.nn.DistributedAttentionLayer(2, 4, 8, causal_mask_size=6).eval()
    x, mask = torch.randn(1, 5, 8), torch.zeros(1, 1, 1, 5)
    expected = layer((x, mask)).detach()
    with torch.inference_mode():
        assert torch.allclose(layer((x.clone(), mask.clone())), expected)


def test_attention_in_fp32_is_more_precise_for_bfloat16() -> None:
    errors = []
    for wide in (False, True):
        torch.manual_seed(1)
        layer = smp.nn.DistributedAttentionLayer(
            2, 16, 8, 0.0, 0.0, attention_in_fp32=wide, flash_attention=False
        )
        with torch.no_grad():
            layer.query.weight.mul_(20)
        layer.bfloat16()
        x = torch.randn(2, 64, 8).bfloat16()
        errors.append((layer((x, None)) - layer.double()((x.double(), None))).abs().mean().item())
    assert errors[1] < 0.9 * errors[0]


def test_layer_scaling_keeps_scores_inside_of_float16() -> None:
    layer = smp.nn.DistributedAttentionLayer(
        1, 8, 8, 0.0, 0.0, query_key_layer_scaling=True, layer_idx=63, pre_layernorm=True
    )
    with torch.no_grad():
        for part in (layer.query, layer.key):
            part.weight.copy_(40 * torch.eye(8))
            part.bias.fill_(100.0)
    layer.half()
    x = torch.randn(1, 4, 8).half()
    assert layer((x, None)).isfinite().all()
    scores = (layer.query.bias[None] @ layer.key.bias[:, None]) / math.sqrt(8)
    assert scores.item() > 2**14, "the scores are small anyway"


# ---- residuals -------------------------------------------------------------------------


def test_fp32_residuals_do_not_overflow_between_layers() -> None:
    def run(wide: bool) -> Tensor:
        model = smp.nn.DistributedTransformer(
            2, 2, 4, 8, 8, 0.0, 0.0, pre_layernorm=True, post_layernorm=False,
            fp32_residual_addition=wide,
        ).half()  # fmt: skip
        for layer, sign in zip(model.seq_layers, (1.0, -1.0), strict=True):
            with torch.no_grad():
                layer.output.dense2.bias.fill_(sign * 40000.0)
        output = model((torch.full((1, 3, 8), 40000.0).half(), None))[0]
        assert output.dtype == torch.float16
        return output

    assert not run(False).isfinite().all()
    assert run(True).isfinite().all()


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_a_model_with_fp32_residuals_keeps_its_dtype(pre: bool) -> None:
    model = smp.nn.DistributedTransformerLMHead(
        **_LM, pre_layernorm=pre, post_layernorm=not pre, fp32_residual_addition=True
    ).bfloat16()
    ids = torch.zeros(2, 3, dtype=torch.long)
    output = model((ids, None, None, None, ids))
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.logits.dtype == output.hidden_states.dtype == torch.bfloat16


# ---- what layers share, and sums in products ------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "model with positions", "stack"])
def test_layers_of_a_stack_share_rotary_tables(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    options: dict[str, Any] = {**_LM, "num_layers": 3, "rotary_dim": 4}
    inputs: tuple[Tensor | None, ...]
    module: nn.Module
    if kind == "stack":
        del options["vocab_size"], options["num_positions"]
        module = smp.nn.DistributedTransformer(**options)
        inputs = (torch.randn(2, 5, 8), None)
    else:
        module = smp.nn.DistributedTransformerLMHead(**options, use_position_embedding=False)
        positions = torch.tensor([[3, 1, 4, 1, 5]]).repeat(2, 1) if "with" in kind else None
        inputs = (torch.arange(10).view(2, 5), None, None, positions, None)
    module.eval()
    made: list[Tensor] = []

    def run() -> Tensor:
        output = module(inputs)
        return output[0] if kind == "stack" else output

    def counted(positions: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        made.append(positions)
        return rotary_tables(positions, *others)

    monkeypatch.setattr(attention, "rotary_tables", counted)
    shared = run()
    assert len(made) == 1
    monkeypatch.setattr(attention, "_tables_of", counted)
    assert torch.equal(run(), shared) and len(made) == 4


def test_positions_that_were_changed_are_read_again() -> None:
    layer = smp.nn.DistributedAttentionLayer(2, 4, 8, 0.0, 0.0, rotary_dim=4)
    x, positions = torch.randn(2, 5, 8), torch.arange(5)[None]
    first = layer((x, None, positions))
    positions.mul_(3)
    changed = layer((x, None, positions))
    assert torch.equal(changed, layer((x, None, positions.clone())))
    assert not torch.allclose(changed, first)


def test_tables_of_inference_mode_are_not_kept_for_training() -> None:
    layer = smp.nn.DistributedAttentionLayer(2, 4, 8, 0.0, 0.0, rotary_dim=4)
    x, positions = torch.randn(2, 5, 8), torch.arange(5)[None]
    with torch.inference_mode():
        layer((x, None, positions))
    layer((x, None, positions)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_product_adds_up_onto_another_term(dtype: torch.dtype) -> None:
    row = RowLinear([96], 16, False, None, layouts.current()).to(dtype)
    x, other = torch.randn(2, 5, 96).to(dtype), 8 * torch.randn(2, 5, 16).to(dtype)
    given = [t.requires_grad_() for t in (x, other, row.weight)]
    exact = F.linear(x.double(), row.weight.double()) + other.double()
    total = row(x, other)
    # Half a unit in the last place: the sum is rounded once.
    assert torch.allclose(total.double(), exact, 0.51 * torch.finfo(dtype).eps, atol=1e-12)
    factor = torch.randn(2, 5, 16).to(dtype)
    grads = torch.autograd.grad((total * factor).sum(), given)
    expected = torch.autograd.grad(((row(x) + other) * factor).sum(), given)
    assert all(map(torch.equal, grads, expected))


# ---- language-model head ---------------------------------------------------------------


def test_logits_are_not_gathered_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp.nn import vocabulary_head

    calls = []
    original = vocabulary_head.join_features
    monkeypatch.setattr(
        vocabulary_head, "join_features", lambda *args: calls.append(1) or original(*args)
    )
    model = smp.nn.DistributedTransformerLMHead(**_LM)
    ids = torch.zeros(2, 3, dtype=torch.long)
    output = model((ids, None, None, None, ids))
    output.loss.backward()
    assert not calls
    assert output.logits.shape == (2, 3, 11) and output.logits is output.logits
    assert len(calls) == 1


def test_output_is_read_by_name_and_by_place() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    output = smp.nn.DistributedTransformerLMHead(**_LM)((ids, None, None, None, ids))
    loss, logits = output
    assert output["loss"] is output[0] is loss is output.loss
    assert output["logits"] is output[1] is logits is output.logits
    assert output.hidden_states.shape == (2, 3, 8)
    with pytest.raises(KeyError):
        output["past"]
    with pytest.raises(IndexError):
        output[2]
    leaves, spec = pytree.tree_flatten(output)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.loss is loss and torch.equal(again.logits, logits)


def test_a_batch_without_counted_tokens_has_no_mean() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    output = smp.nn.DistributedTransformerLMHead(**_LM)((ids, None, None, None, ids - 100))
    assert output.loss.isnan()  # as torch.nn.functional.cross_entropy


def test_the_head_shares_the_table_unless_told_otherwise() -> None:
    tied = smp.nn.DistributedTransformerLMHead(**_LM)
    assert tied.lm_head.weight is tied.word_embedding.weight
    untied = smp.nn.DistributedTransformerLMHead(**_LM, tie_word_embedding=False)
    assert untied.lm_head.weight is not untied.word_embedding.weight
    assert untied.lm_head.bias is None


# ---- initial values --------------------------------------------------------------------


def test_normal_initialization_has_the_asked_deviations() -> None:
    layer = smp.nn.DistributedTransformerLayer(
        4, 32, 128, 512, initializer_range=0.05, use_normal_initialization=True,
        residual_init_std=0.01,
    )  # fmt: skip
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" not in name:
            expected = 0.01 if "dense.w" in name or "dense2" in name else 0.05
            assert abs(parameter.std().item() / expected - 1) < 0.05, name


def test_default_initialization_is_that_of_linear() -> None:
    torch.manual_seed(3)
    split = smp.nn.DistributedLinear(300, 200)
    torch.manual_seed(3)
    linear = nn.Linear(300, 200)
    bound = 300**-0.5
    for parameter in split.parameters():
        assert 0.99 * bound < parameter.abs().max() <= bound
    assert torch.allclose(split.weight, linear.weight)


def test_embeddings_start_as_asked() -> None:
    table = smp.nn.DistributedEmbedding(200, 50, padding_idx=-1, initializer_range=0.3)
    assert table.padding_idx == 199 and table.weight[199].abs().max() == 0
    assert abs(table.weight[:199].std().item() / 0.3 - 1) < 0.05
    given = torch.randn(200, 50)
    assert torch.equal(smp.nn.DistributedEmbedding(200, 50, _weight=given).weight, given)


def test_delayed_parameters_are_filled() -> None:
    with smp.delay_param_initialization():
        model = smp.nn.DistributedTransformerLMHead(
            **_LM, tie_word_embedding=False, lm_head_bias=True, num_token_types=2
        )
        linear = smp.nn.DistributedLinear(4, 4)
        embedding = smp.nn.DistributedEmbedding(4, 4, padding_idx=1)
    for module in (model, linear, embedding):
        assert all(p.is_meta for p in module.parameters())
        initialise_delayed(module, lambda _: True, torch.device("cpu"))
        assert all(p.isfinite().all() for p in module.parameters())
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert model((ids, None, None, None, ids)).loss.isfinite()


# ---- dropout ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["attention", "hidden", "embedding"])
def test_each_dropout_acts_while_training_only(which: str) -> None:
    names = {f"{name}_dropout_prob": 0.0 for name in ("attention", "hidden", "embedding")}
    model = smp.nn.DistributedTransformerLMHead(**_LM, **(names | {f"{which}_dropout_prob": 0.5}))
    ids = torch.arange(6).view(2, 3)

    def run() -> Tensor:
        torch.manual_seed(7)
        return model((ids, None, None, None, None))

    trained = run()
    assert torch.equal(trained, run()), "one seed, two results"
    model.eval()
    assert not torch.allclose(trained, run())


def test_embedding_dropout_is_that_of_hidden_states_by_default() -> None:
    model = smp.nn.DistributedTransformerLMHead(**_LM, hidden_dropout_prob=0.3)
    assert model.embedding_dropout_prob == 0.3


# ---- the rest --------------------------------------------------------------------------


def test_flash_attention_layer_equals_plain_attention() -> None:
    with float64():
        qkv = torch.randn(2, 5, 3, 4, 8)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        future = torch.ones(5, 5, dtype=torch.bool).triu(1)
        for causal in (False, True):
            layer = smp.nn.FlashAttentionLayer(0.0, 8, scale_attn_by_layer_idx=True, layer_idx=2)
            scores = q @ k.transpose(2, 3) / (math.sqrt(8) * 3)
            scores = scores.masked_fill(future, -math.inf) if causal else scores
            output = layer(qkv, causal=causal)
            assert torch.allclose(output, scores.softmax(-1) @ v, atol=1e-12)
        layer = smp.nn.FlashAttentionLayer(scale=0.5, triton_flash_attention=True, use_alibi=True)
        slopes = torch.tensor([2.0 ** -(i * 8 / 4) for i in range(1, 5)])
        mask = (slopes[:, None] * torch.arange(-4, 1))[None, :, None]
        expected = (q @ k.transpose(2, 3) * 0.5 + mask).masked_fill(future, -math.inf)
        output = layer(qkv, mask, causal=True)
        assert torch.allclose(output, expected.softmax(-1) @ v, atol=1e-12)


def test_flash_attention_layer_drops_while_training() -> None:
    qkv = torch.randn(2, 5, 3, 4, 8)
    layer = smp.nn.FlashAttentionLayer(0.5, 8)
    assert not torch.equal(layer(qkv), layer(qkv))
    layer.eval()
    assert torch.equal(layer(qkv), layer(qkv))
    with pytest.raises(ValueError, match="attn_mask"):
        layer(qkv, torch.zeros(2, 1, 1, 5))
    with pytest.raises(ValueError, match=r"\[B, S, 3, heads, head_size\]"):
        layer(qkv[:, :, :2])


def test_fused_layer_norm_is_a_layer_norm() -> None:
    with float64():
        for shape, affine in (((6,), True), ((2, 3), True), ((6,), False), ((2, 3), False)):
            norm = smp.nn.FusedLayerNorm(shape, eps=1e-3, elementwise_affine=affine)
            assert isinstance(norm, nn.LayerNorm)
            for parameter in norm.parameters():
                nn.init.normal_(parameter)
            x = torch.randn(4, *shape)
            expected = F.layer_norm(x, shape, norm.weight, norm.bias, 1e-3)
            assert torch.allclose(norm(x), expected, atol=1e-12)


def test_rms_norm_equals_that_of_pytorch() -> None:
    with float64():
        norm, reference = smp.nn.FusedRMSNorm(6, 1e-3), nn.RMSNorm(6, 1e-3)
        nn.init.normal_(norm.weight)
        reference.load_state_dict(norm.state_dict())
        x = torch.randn(4, 6)
        assert torch.allclose(norm(x), reference(x), atol=1e-12)


def test_norms_of_distributed_modules_are_fused_ones() -> None:
    model = smp.nn.DistributedTransformerLMHead(**_LM, pre_layernorm=True)
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 6  # two per block, two of the stack
    assert all(isinstance(norm, smp.nn.FusedLayerNorm) for norm in norms)


def test_linear_takes_a_vector() -> None:
    linear = smp.nn.DistributedLinear(4, 3)
    x = torch.randn(4)
    assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias))


def test_layers_are_not_cut_by_the_partitioner() -> None:
    model = smp.nn.DistributedTransformerLMHead(**_LM)
    assert kind_of(model.transformer.seq_layers[0]) == _C.NodeKind.INDIVISIBLE
    assert kind_of(model.transformer.seq_layers) == _C.NodeKind.LIST
    assert kind_of(model) == kind_of(model.transformer) == _C.NodeKind.PLAIN


def test_masks_with_one_for_masked_hide_what_they_mask() -> None:
    model = smp.nn.DistributedTransformerLMHead(**_LM).eval()
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    logits = model((ids, mask, None, None, None))
    short = model((ids[:1, :2], None, None, None, None))
    assert torch.allclose(logits[:1, :2], short, atol=1e-6)


def test_autocast_computes_in_the_lower_precision() -> None:
    model = smp.nn.DistributedTransformerLMHead(**_LM, pre_layernorm=True).eval()
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    expected = model((ids, mask, None, None, None))
    with torch.autocast("cpu", torch.bfloat16):
        output = model((ids, mask, None, None, ids))
        output.loss.backward()
    assert torch.allclose(output.logits.float(), expected, atol=0.05)
    assert model.word_embedding.weight.grad is not None
