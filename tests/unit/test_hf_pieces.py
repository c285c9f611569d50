"""State dicts of Hugging Face that come in pieces are refused where they would be dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.reference import hugging_face as hf
from tests.reference.models import randomise_

ADVICE = r"resume_from_checkpoint\(folder, partial=False\)"
State = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("running")


def wrapped(name: str, kind: str = "head", only: str | None = None, **changes: Any) -> Any:
    """A model with replaced modules; those of one class, if any is given."""
    model = hf.family(name).build(kind, **changes)
    for module in model.modules():
        if only in (None, type(module).__name__):
            smp.set_tensor_parallelism(module)
    return smp.DistributedModel(model)


def others(name: str, kind: str = "head", **changes: Any) -> State:
    """Returns the state of an equal model with other values, under its own names."""
    return dict(randomise_(hf.family(name).build(kind, **changes), 11).state_dict())


def copy_of(model: Any) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


def part_of(state: Mapping[str, Tensor], *texts: str) -> State:
    return {key: value for key, value in state.items() if any(text in key for text in texts)}


def differing(before: Mapping[str, Tensor], model: Any) -> set[str]:
    after = model.state_dict()
    return {key for key, value in before.items() if not torch.equal(after[key], value)}


@pytest.mark.parametrize("name", ["gpt2", "gptneox", "bert"])
def test_files_of_a_model_one_by_one_are_refused(name: str) -> None:
    model = wrapped(name)
    state = others(name)
    names = list(state)
    for part in range(3):
        piece = {key: state[key] for key in names[part::3]}
        before = copy_of(model)
        with pytest.raises(RuntimeError, match=ADVICE):
            model.load_state_dict(piece, strict=False)
        assert not differing(before, model)
    model.load_state_dict(state, strict=False)
    for key, value in hf.family(name).to_hf(model.state_dict()).items():
        torch.testing.assert_close(value, state[key])


def test_a_piece_of_whole_layers_is_refused_as_well() -> None:
    model = wrapped("gptj")
    state = others("gptj")
    piece = part_of(state, "wte", "h.0.", "h.1.")  # would have filled the head with the table
    with pytest.raises(RuntimeError, match=ADVICE):
        model.load_state_dict(piece, strict=False)


def test_names_without_the_prefix_of_the_base_model_are_known() -> None:
    state = others("gpt2", "base")
    model = wrapped("gpt2")
    for piece in (part_of(state, "wpe"), part_of(state, "h.0.attn")):
        assert not any(key.startswith("transformer.") for key in piece)
        with pytest.raises(RuntimeError, match=ADVICE):
            model.load_state_dict(piece, strict=False)
    model.load_state_dict(state, strict=False)
    assert torch.equal(model.state_dict()["position_embedding.weight"], state["wpe.weight"])


def test_parts_under_our_own_names_go_in() -> None:
    model = wrapped("gpt2")
    before = copy_of(model)
    ours = hf.family("gpt2").to_smp(others("gpt2"))
    part = part_of(ours, "seq_layers.1.", "layernorm.bias")
    report = model.load_state_dict({**part, "probe.weight": torch.ones(2)}, strict=False)
    assert differing(before, model) == set(part) != set()
    assert report.unexpected_keys == ["probe.weight"]
    one = {key: value + 1 for key, value in part_of(ours, "word_embedding").items()}
    model.load_state_dict(one, strict=False)
    assert torch.equal(model.state_dict()["word_embedding.weight"], one["word_embedding.weight"])


def test_a_base_model_goes_into_one_with_a_head_of_its_own() -> None:
    model = wrapped("gpt2", "ForSequenceClassification", num_labels=3)
    state = others("gpt2", "ForSequenceClassification", num_labels=3)
    base = {key: value for key, value in state.items() if not key.startswith("score.")}
    before = copy_of(model)
    report = model.load_state_dict(base, strict=False)
    assert report.missing_keys == ["score.weight"]
    assert differing(before, model) == set(before) - {"score.weight"}
    model.load_state_dict(part_of(state, "score."), strict=False)
    assert torch.equal(model.state_dict()["score.weight"], state["score.weight"])


def test_a_body_goes_into_a_language_model_with_a_head_of_its_own() -> None:
    model = wrapped("gptj")
    state = others("gptj")
    body = {key: value for key, value in state.items() if not key.startswith("lm_head.")}
    report = model.load_state_dict(body, strict=False)
    assert report.missing_keys == ["lm_head.bias"]


def test_one_of_two_models_goes_in_alone() -> None:
    pair = nn.ModuleDict({"a": hf.family("gpt2").build(), "b": hf.family("bert").build()})
    smp.set_tensor_parallelism(pair)
    model = smp.DistributedModel(pair)
    before = copy_of(model)
    state = {f"a.{key}": value for key, value in others("gpt2").items()}
    model.load_state_dict(state, strict=False)
    assert differing(before, model) == {key for key in before if key.startswith("a.")}
    with pytest.raises(RuntimeError, match=f"before 'a' was replaced.*{ADVICE}"):
        model.load_state_dict(part_of(state, "h.2."), strict=False)


def test_layers_that_were_replaced_alone_go_in_one_by_one() -> None:
    model = wrapped("gpt2", only="GPT2Block")
    state = others("gpt2")
    before = copy_of(model)
    model.load_state_dict(part_of(state, "wpe", "h.1."), strict=False)
    got = differing(before, model)
    assert {key for key in before if ".h.1." in key} | {"transformer.wpe.weight"} == got
    with pytest.raises(RuntimeError, match=f"before 'transformer.h.2' was replaced.*{ADVICE}"):
        model.load_state_dict(part_of(state, "h.2.mlp"), strict=False)


def test_a_dict_that_says_that_its_names_are_ours_is_believed() -> None:
    model = wrapped("gpt2")
    before = copy_of(model)
    piece: dict[str, Any] = {**part_of(others("gpt2"), "wpe"), "_smp_is_partial": False}
    report = model.load_state_dict(piece, strict=False)
    assert report.unexpected_keys == ["transformer.wpe.weight"] and not differing(before, model)
