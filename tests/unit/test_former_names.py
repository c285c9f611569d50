"""Checkpoints of families that had a distributed form get the names that their models have now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.checkpoint.former_names import with_present_names
from smp.checkpoint.manifest import Layout, Manifest, StoredEntry
from smp.nn.huggingface import llama
from tests.reference.former_names import former_name
from tests.reference.split_families import build_split_family

CASES = ["llama", "mistral", "qwen2"]


def state_of(case: str) -> dict[str, Any]:
    return dict(build_split_family(case, torch.float32).state_dict())


@pytest.mark.parametrize("case", CASES)
def test_state_dicts_with_distributed_names_become_those_of_hugging_face(case: str) -> None:
    theirs = state_of(case)
    former = {former_name(name): value for name, value in theirs.items()}
    assert not former.keys() & theirs.keys() - {"lm_head.weight"}
    translated = llama.translate_state_dict_to_hf_llama(former)
    assert translated.keys() == theirs.keys()
    assert all(translated[name] is value for name, value in theirs.items())


def manifest_of(names: list[str], values: dict[str, Any]) -> Manifest:
    entries = {}
    for name in names:
        for entry in (f"model/{name}", f"master/{name}", f"optimizer/{name}/exp_avg"):
            entries[entry] = StoredEntry("float32", (1,), [])
    return Manifest("1", {}, Layout({}, {}), {}, entries, values)


@pytest.mark.parametrize("cls", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_all_that_names_tensors_in_a_manifest_is_renamed(cls: str) -> None:
    family = cls.removesuffix("ForCausalLM").lower()
    present = sorted(state_of(family))
    former = [former_name(name) for name in present]
    manifest = manifest_of(
        former,
        {
            "registrations": [["gpt2", "GPT2Block"], [family, cls]],
            "partition": {"chunks": 2},
            "groups": [{"options": {"lr": 1.0}, "names": former}],
            "state": {name: {"step": 1} for name in former},
            "aliases": {"lm_head.weight": "word_embedding.weight"},
            "seed": 3,
        },
    )
    got = with_present_names(manifest)
    assert got.entries == manifest_of(present, {}).entries
    assert got.values == {
        "registrations": [["gpt2", "GPT2Block"]],
        "groups": [{"options": {"lr": 1.0}, "names": present}],
        "state": {name: {"step": 1} for name in present},
        "aliases": {"lm_head.weight": "model.embed_tokens.weight"},
        "seed": 3,
    }


@pytest.mark.parametrize("part", ["Model", "DecoderLayer"])
def test_parts_of_models_keep_their_place(part: str) -> None:
    names = [name for name in state_of("llama") if name != "lm_head.weight"]
    if part == "Model":  # in a classifier, the base model was replaced in its place
        former = [f"model.{former_name(name)}" for name in names]
    else:  # layers were replaced one by one
        former = [
            former_name(name).replace("transformer.seq_layers", "model.layers")
            if ".layers." in name
            else name
            for name in names
        ]
    values = {"registrations": [["llama", f"Llama{part}"]]}
    got = with_present_names(manifest_of(former, values))
    assert got.entries == manifest_of(names, {}).entries


def test_other_checkpoints_stay_as_they_are() -> None:
    manifest = manifest_of(
        ["word_embedding.weight"], {"registrations": [["gpt2", "GPT2LMHeadModel"]]}
    )
    assert with_present_names(manifest) is manifest
    assert with_present_names(manifest_of(["a"], {})).values == {}
