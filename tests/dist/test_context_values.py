"""A script reads the same of a model whose blocks compute parts as it does in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.context_training import calls_of
from tests.dist.pool import Pool

VOCABULARY = 31
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
TOLERANCE = 1e-5  # of models that compute norms and softmaxes in float32


def plain_model(name: str, attention: str = "sdpa", **more: Any) -> nn.Module:
    """Makes a model of transformers in float64; each call gives the same weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # others do not take float64
    torch.manual_seed(4)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    return model


def ids_of(length: int, num_samples: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCABULARY, (num_samples, length), generator=generator)


def wrap(model: nn.Module, cp: int) -> Any:
    import smp

    smp.init({"context_parallel_degree": cp, "ddp": True})
    return smp.DistributedModel(model)


def assert_same(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


# ---- what a call returns


def read_outputs(
    rank: int, name: str, asked: dict[str, bool], cp: int, is_reentrant: bool | None = None
) -> Any:
    """Returns what a call returns, gradients, and the number of calls of blocks in parts.

    Args:
        name: family.
        asked: keyword arguments of the call.
        cp: number of ranks that compute parts.
        is_reentrant: form of the checkpoints of transformers; None for no checkpoints.
    """
    import smp

    model: Any = plain_model(name, "eager" if "output_attentions" in asked else "sdpa")
    if is_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.model.layers[1].mlp.register_forward_hook(_count_second_run)
    ids = ids_of(7)
    if cp > 1:
        model = wrap(model, cp)

    def run(ids: Tensor) -> Any:
        output = model(ids, labels=ids, use_cache=False, **asked)
        return {
            key: tuple(x * 1 for x in output[key])
            for key in ("hidden_states", "attentions", "router_logits")
            if output.get(key) is not None
        } | {"loss": output["loss"], "logits": output["logits"] * 1}

    second_runs.clear()
    if cp == 1:
        expected = run(ids)
        expected["loss"].backward()
        return _numbers(expected), _grads(model.named_parameters()), 0

    @smp.step
    def step(ids: Tensor) -> Any:
        found = run(ids)
        model.backward(found["loss"])
        return found

    found = {key: _first(value) for key, value in step(ids).items()}
    num_cut = sum(calls.in_parts for calls in calls_of(model).values())
    if is_reentrant is not None:
        assert second_runs == [4 - smp.cp_rank()]  # of 7 tokens
    return _numbers(found), _grads(model.local_named_parameters()), num_cut


second_runs: list[int] = []


def _count_second_run(module: Any, args: Any, result: Any) -> None:
    task = torch._C._current_graph_task_id()
    if task != -1:  # inside of a backward
        second_runs.append(result.shape[1])


def _first(value: Any) -> Any:
    return tuple(map(_first, value)) if isinstance(value, tuple) else value.outputs[0]


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_numbers(item) for item in value)
    return value.detach().clone()


def _grads(named: Any) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.grad.clone() for name, p in named if p.grad is not None}


OUTPUTS: dict[str, tuple[str, dict[str, bool], bool]] = {
    "hidden states": ("Llama", {"output_hidden_states": True}, True),
    "attentions": ("Llama", {"output_attentions": True}, False),
    "router logits": ("Mixtral", {"output_router_logits": True}, False),
    "logits": ("Qwen2", {}, True),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs_are_those_of_one_process(pool: Pool, what: str) -> None:
    name, asked, is_cut = OUTPUTS[what]
    ((expected, grads, _),) = pool.run(1, read_outputs, name, asked, 1)
    assert max(grad.abs().max() for grad in grads.values()) > 1e-3
    for found, found_grads, num_cut in pool.run(2, read_outputs, name, asked, 2):
        assert (num_cut > 0) == is_cut
        assert found.keys() == expected.keys() and len(found) == 2 + len(asked)
        assert_same(found, expected, what)
        assert_same(found_grads, grads, f"gradients of {what}")


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_of_transformers_train_like_one_process(pool: Pool, is_reentrant: bool) -> None:
    ((_, grads, _),) = pool.run(1, read_outputs, "Llama", {}, 1)
    for _, found, num_cut in pool.run(2, read_outputs, "Llama", {}, 2, is_reentrant):
        assert num_cut == 2
        assert_same(found, grads, "gradients")


# ---- evaluation, and decoding with a cache


def decode(rank: int, name: str, more: dict[str, Any], cp: int) -> tuple[list[Tensor], int]:
    """Returns the logits of a prompt and of five more tokens, one by one, and after them of three
    at once."""
    from transformers import DynamicCache

    plain = plain_model(name, **more).eval()
    model: Any = wrap(plain, cp) if cp > 1 else plain
    ids = ids_of(17)
    cache = DynamicCache(config=plain.config)
    logits = []
    with torch.no_grad():
        begin = 0
        for end in (9, 10, 11, 12, 13, 14, 17):
            output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            logits.append(output["logits"] * 1)
            begin = end
    num_cut = sum(calls.in_parts for calls in calls_of(model).values()) if cp > 1 else 0
    return logits, num_cut


CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 4}),
    "long window": ("Mistral", {"sliding_window": 12}),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("kind", CACHES)
def test_decoding_with_a_cache_gives_the_logits_of_one_process(pool: Pool, kind: str) -> None:
    name, more = CACHES[kind]
    ((expected, _),) = pool.run(1, decode, name, more, 1)
    for found, num_cut in pool.run(2, decode, name, more, 2):
        assert num_cut >= 2
        assert_same(found, expected, kind)


# ---- which positions see a token, as TRL asks


def changed_positions(rank: int, name: str, more: dict[str, Any], cp: int) -> list[list[int]]:
    """Returns which positions of the logits change with the token of a position, one by one."""
    model: Any = plain_model(name, **more).eval()
    if cp > 1:
        model = wrap(model, cp)
    ids = ids_of(9, 1)
    changed = []
    with torch.no_grad():
        before = model(ids, use_cache=False)["logits"] * 1
        for position in range(ids.shape[1]):
            other = ids.clone()
            other[0, position] = (ids[0, position] + 7) % VOCABULARY
            after = model(other, use_cache=False)["logits"] * 1
            differs = (after - before).abs().amax(-1)[0] > 1e-9
            changed.append(differs.nonzero().flatten().tolist())
    if cp > 1:
        assert all(calls.in_parts and not calls.problems for calls in calls_of(model).values())
    return changed


PROBES: dict[str, tuple[str, dict[str, Any], Callable[[int, int], bool]]] = {
    "window": ("Mistral", {"sliding_window": 2}, lambda seen, by: seen <= by <= seen + 2),
    "causal": ("Llama", {}, lambda seen, by: seen <= by),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("kind", PROBES)
def test_a_token_changes_the_logits_of_those_that_see_it(pool: Pool, kind: str) -> None:
    name, more, sees = PROBES[kind]
    expected = [[by for by in range(9) if sees(seen, by)] for seen in range(9)]
    assert pool.run(1, changed_positions, name, more, 1) == [expected]
    assert pool.run(2, changed_positions, name, more, 2) == [expected] * 2
