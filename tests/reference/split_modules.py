"""Cases of `smp.nn` modules, and their comparison with plain ones on the group's samples."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import transformer as plain

TOLERANCE = 1e-9
SAMPLES_PER_RANK = 2
VOCAB, POSITIONS, TYPES = 17, 16, 3
MODES = tuple((prescaled, opt) for prescaled in (False, True) for opt in ("memory", "speed"))

_SIZES = {"num_attention_heads": 5, "attention_head_size": 4, "hidden_size": 12}
_GPT = {"pre_layernorm": True, "post_layernorm": False, "causal_mask_size": POSITIONS}
# So little that nothing is dropped: the code for dropout runs, and results are comparable.
_HARDLY = {"attention_dropout_prob": 1e-12, "hidden_dropout_prob": 1e-12}
_NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_BLOCK = _SIZES | _NO_DROPOUT
_MLP = {"hidden_size": 12, "intermediate_size": 10, "hidden_dropout_prob": 0.0}
_LAYER = _BLOCK | {"intermediate_size": 10}
_STACK = _LAYER | {"num_layers": 2}
_LM = _STACK | _GPT | {"vocab_size": VOCAB, "num_positions": POSITIONS}
_ROTARY = {"rotary_dim": 4, "use_position_embedding": False, "tie_word_embedding": False}


@dataclass(frozen=True)
class Case:
    """A module with its arguments, and the inputs of its call."""

    kind: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 6
    mask: bool = False
    positions: bool = False
    token_types: bool = False
    labels: bool = False
    reads_logits: bool = False
    is_cross: bool = False
    has_states: bool = True  # of what cross attention reads

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


def _attention(name: str, options: dict[str, Any] | None = None, **others: Any) -> Case:
    return Case("attention", name, _BLOCK | (options or {}), **others)


def _layer(name: str, options: dict[str, Any] | None = None, **others: Any) -> Case:
    return Case("layer", name, _LAYER | (options or {}), **others)


def _lm(name: str, options: dict[str, Any] | None = None, **others: Any) -> Case:
    return Case("lm_head", name, _LM | (options or {}), **others)


CASES = (
    Case("linear", "bias", {"in_features": 7, "out_features": 5}),
    Case("linear", "no_bias", {"in_features": 8, "out_features": 3, "bias": False}),
    Case("embedding", "plain", {"num_embeddings": 9, "embedding_dim": 7}),
    Case("embedding", "padding", {"num_embeddings": 9, "embedding_dim": 8, "padding_idx": 2}),
    Case(
        "embedding",
        "by_freq",
        {"num_embeddings": 4, "embedding_dim": 5, "scale_grad_by_freq": True},
    ),
    _attention("post_norm"),
    _attention("masked", mask=True),
    _attention("causal", {"causal_mask_size": 8}),
    _attention("causal_masked", _GPT, mask=True, length=5),
    _attention("both_norms", {"pre_layernorm": True}),
    _attention("cross", {"cross_attention": True}, is_cross=True, mask=True, length=5),
    _attention("rotary", _GPT | {"rotary_dim": 2}),
    _attention("rotary_positions", _GPT | {"rotary_dim": 4}, positions=True, length=5, mask=True),
    _attention("rotary_pairs", {"rotary_dim": 4, "rotary_interleaved": True, "rotary_base": 50.0}),
    _attention("unscaled", {"scale_attention_scores": False}),
    _attention("by_layer", {"scale_attn_by_layer_idx": True, "layer_idx": 3}),
    _attention("fp32", _GPT | {"attention_in_fp32": True, "flash_attention": False}, mask=True),
    _attention("layer_scaling", _GPT | {"query_key_layer_scaling": True, "layer_idx": 2}),
    _attention("window", _GPT | {"window_size": 2}, mask=True),
    _attention("wide_window", _GPT | {"window_size": 6}),
    _attention("fused", _GPT | {"fused_qkv": True}),
    _attention("no_bias", {"use_qkv_bias": False, "use_attn_dense_bias": False}),
    _attention("alibi", _GPT | {"use_alibi": True, "alibi_bias_max": 4}, mask=True),
    _attention("short", _GPT, length=2),
    Case("output", "post_norm", _MLP),
    Case("output", "tanh", _MLP | {"activation": "gelu_new", "pre_layernorm": True}, length=5),
    Case("output", "relu", _MLP | {"activation": "relu", "fp32_residual_addition": True}),
    Case("output", "short", _MLP, length=2),
    _layer("post_norm", mask=True, length=5),
    _layer("pre_norm", _GPT),
    _layer("cross", {"add_cross_attention": True}, is_cross=True, mask=True, length=5),
    _layer("cross_pre", _GPT | {"add_cross_attention": True}, is_cross=True),
    _layer("cross_left_out", {"add_cross_attention": True}, is_cross=True, has_states=False),
    _layer("parallel", _GPT | {"parallel_attn_output": True}, mask=True),
    _layer(
        "parallel_one_norm",
        _GPT | {"parallel_attn_output": True, "single_pre_layernorm": True},
        length=5,
    ),
    _layer("dropping", _GPT | _HARDLY, mask=True),
    _layer(
        "parallel_dropping",
        _GPT | _HARDLY | {"parallel_attn_output": True, "single_pre_layernorm": True},
        length=5,
    ),
    _layer("rotary", _GPT | {"rotary_dim": 4}, positions=True, mask=True),
    Case("transformer", "post_norm", _STACK, mask=True, length=5),
    Case("transformer", "even", _STACK | _GPT, length=12),
    Case("transformer", "uneven", _STACK | _GPT, length=5),
    Case("transformer", "both_norms", _STACK | {"pre_layernorm": True}, mask=True),
    Case("transformer", "windows", _STACK | _GPT | {"window_size": [None, 2]}, mask=True),
    Case(
        "transformer",
        "cross",
        _STACK | {"add_cross_attention": True, "causal_mask_size": 8},
        is_cross=True,
        mask=True,
        length=5,
    ),
    Case(
        "transformer",
        "cross_left_out",
        _STACK | _GPT | {"add_cross_attention": True},
        is_cross=True,
        has_states=False,
        mask=True,
        length=5,
    ),
    Case("transformer", "rotary", _STACK | _GPT | {"rotary_dim": 2}, positions=True, length=5),
    _lm("loss", labels=True, mask=True),
    _lm("loss_uneven", labels=True, length=5),
    _lm("loss_and_logits", labels=True, mask=True, reads_logits=True, length=5),
    _lm("logits", mask=True, positions=True, token_types=True, options={"num_token_types": TYPES}),
    _lm("untied", {"tie_word_embedding": False, "lm_head_bias": True}, labels=True),
    _lm("no_head", {"add_lm_head": False}, length=5, mask=True),
    _lm("post_norm", {"pre_layernorm": False, "post_layernorm": True}, labels=True, mask=True),
    _lm("rotary", _ROTARY | {"rotary_interleaved": True}, labels=True, positions=True, length=5),
    _lm("neox", _ROTARY | {"fused_qkv": True, "parallel_attn_output": True}, labels=True),
    _lm("short", labels=True, length=2),
    _lm("cross", {"add_cross_attention": True}, is_cross=True, mask=True, labels=True, length=5),
    _lm("cross_left_out", {"add_cross_attention": True}, is_cross=True, has_states=False, length=5),
)


# ---- both forms ------------------------------------------------------------------------


def make_plain(case: Case) -> nn.Module:
    """The plain module, every parameter random."""
    kinds: dict[str, Any] = {
        "linear": nn.Linear,
        "embedding": nn.Embedding,
        "attention": plain.Attention,
        "output": plain.Output,
        "layer": plain.Layer,
        "transformer": plain.Transformer,
        "lm_head": plain.LMHead,
    }
    module: nn.Module = kinds[case.kind](**case.options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return module


def make_split(case: Case, whole: nn.Module) -> nn.Module:
    """The module of `smp.nn`, with its slices of the plain one's parameters."""
    import smp

    kinds: dict[str, Any] = {
        "linear": smp.nn.DistributedLinear,
        "embedding": smp.nn.DistributedEmbedding,
        "attention": smp.nn.DistributedAttentionLayer,
        "output": smp.nn.DistributedTransformerOutputLayer,
        "layer": smp.nn.DistributedTransformerLayer,
        "transformer": smp.nn.DistributedTransformer,
        "lm_head": smp.nn.DistributedTransformerLMHead,
    }
    module: nn.Module = kinds[case.kind](**case.options)
    load_slices(module, whole)
    return module


def load_slices(module: nn.Module, whole: nn.Module) -> None:
    """Copies the slices that this rank holds; names have to be equal."""
    from smp.tensor_parallel import sharding

    values = dict(whole.named_parameters())
    own = dict(module.named_parameters())
    assert own.keys() == values.keys(), sorted(own.keys() ^ values.keys())
    with torch.no_grad():
        for name, parameter in own.items():
            assert sharding.placement_of(parameter) is not None, f"{name} is not marked"
            assert sharding.whole_shape(parameter) == list(values[name].shape), name
            parameter.copy_(sharding.slice_of(values[name], sharding.interval_of(parameter)))


def make_inputs(case: Case, num_samples: int) -> dict[str, Tensor | None]:
    """Makes the inputs of the whole group, by name, in the order of the module's tuple."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    shape = (num_samples, case.length)

    def real(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).requires_grad_()

    def integers(high: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def masked(length: int) -> Tensor:
        """The tail of some samples is masked, of one all but a token."""
        kept = torch.randint(1, length + 1, (num_samples, 1), generator=generator)
        return (torch.arange(length)[None] >= kept).long()

    if case.kind == "linear":
        return {"input": real(*shape, case.options["in_features"])}
    if case.kind == "embedding":
        return {"ids": integers(case.options["num_embeddings"])}
    hidden = case.options["hidden_size"]
    if case.kind == "output":
        return {"hidden": real(*shape, hidden)}
    mask = masked(case.length) if case.mask else None
    positions = integers(POSITIONS) if case.positions else None
    cross: dict[str, Tensor | None] = {}
    if case.is_cross and not case.has_states:
        cross = dict.fromkeys(("cross_states", "cross_mask"))
    elif case.is_cross:
        cross["cross_states"] = real(num_samples, 7, hidden)
        cross["cross_mask"] = masked(7) if case.mask else None
    if case.kind == "lm_head":
        labels = None
        if case.labels:
            labels = integers(VOCAB).masked_fill(integers(4) == 0, -100)
            labels[:, 1] = 3  # a batch without any counted token has no mean
        return {
            "ids": integers(VOCAB),
            "mask": mask,
            "types": integers(TYPES) if case.token_types else None,
            "positions": positions,
            **cross,
            "labels": labels,
        }
    inputs: dict[str, Tensor | None] = {"hidden": real(*shape, hidden)}
    mask = plain.additive(mask)
    if case.kind == "attention" and case.is_cross:
        return (
            inputs
            | {"cross_states": cross["cross_states"]}
            | {"cross_mask": plain.additive(cross["cross_mask"])}
        )
    if case.is_cross:
        inputs |= {"cross_states": cross["cross_states"], "mask": mask}
        inputs["cross_mask"] = plain.additive(cross["cross_mask"])
    else:
        inputs["mask"] = mask
    return inputs | ({"positions": positions} if case.positions else {})


def call(case: Case, module: nn.Module, inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """A loss and the output that it is made of."""
    if case.kind in ("linear", "embedding", "output"):
        output = module(*inputs.values())
    else:
        output = module(tuple(inputs.values()))
    loss = None
    if case.kind in ("layer", "transformer"):
        for got, given in zip(output[1:], list(inputs.values())[1:], strict=True):
            assert got is given, "a layer passes on what it got"
        output = output[0]
    elif case.labels:
        loss, logits = output
        if not case.reads_logits:
            return loss, loss.detach()[None].expand(next(iter(inputs.values())).shape[0])
        output = logits
    elif isinstance(output, tuple):
        output = output[1]
    weights = torch.linspace(-1.0, 1.0, output[0].numel()).view(output[0].shape)
    weighted = (output * weights).sum()
    return weighted if loss is None else loss + weighted, output


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """The default dtype, for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def close(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to `TOLERANCE`, relative to the largest number."""
    assert got.shape == expected.shape, f"{what}: {list(got.shape)} not {list(expected.shape)}"
    assert not got.isnan().any(), f"{what}: not a number"
    scale = max(1.0, expected.abs().max().item())
    difference = (got - expected).abs().max().item() / scale
    assert difference <= TOLERANCE, f"{what}: off by {difference:.1e}"


def compare(case: Case, rank: int, degree: int, prescaled: bool) -> tuple[int, int]:
    """Output, input gradients and parameter gradients of this rank against the plain module.

    Returns:
        Bytes of parameters here, and of the plain module.
    """
    with float64():
        return _compare(case, rank, degree, prescaled)


def _compare(case: Case, rank: int, degree: int, prescaled: bool) -> tuple[int, int]:
    import smp
    from smp.tensor_parallel import sharding

    whole = make_plain(case)
    split = make_split(case, whole)
    inputs = make_inputs(case, SAMPLES_PER_RANK * degree)
    parts = 1 if prescaled else degree
    slices = [
        {
            name: None
            if x is None
            else x.detach().chunk(parts)[idx].requires_grad_(x.requires_grad)
            for name, x in inputs.items()
        }
        for idx in range(parts)
    ]
    results = [call(case, whole, part) for part in slices]
    torch.stack([loss for loss, _ in results]).sum().backward()

    own = slices[0 if prescaled else rank]
    given = {
        name: None if x is None else x.detach().clone().requires_grad_(x.requires_grad)
        for name, x in own.items()
    }
    loss, output = call(case, split, given)
    loss.backward()
    expected_loss, expected = results[0 if prescaled else rank]
    close(output.detach(), expected.detach(), f"{case}: output")
    close(loss.detach(), expected_loss.detach(), f"{case}: loss")
    for name, x in given.items():
        if x is not None and x.requires_grad:
            assert x.grad is not None and own[name].grad is not None
            close(x.grad, own[name].grad, f"{case}: gradient of {name}")
    largest = 0.0
    references = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        placement = sharding.placement_of(parameter)
        assert placement is not None
        grad = parameter.grad
        reference = references[name].grad
        assert (grad is None) == (reference is None), name
        if grad is None or reference is None:
            continue
        if placement.partial:
            grad = torch.stack(smp.allgather(grad, smp.TP_GROUP)).sum(0)
        close(grad, sharding.slice_of(reference, placement.interval), f"{case}: {name}")
        largest = max(largest, reference.abs().max().item())
    assert largest > 1e-3, f"{case}: all gradients are zero, the test shows nothing"
    return num_bytes(split), num_bytes(whole)


def num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
