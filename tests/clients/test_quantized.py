"""Adapters of PEFT on quantized models that are cut over ranks train as in one process."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import quantized_training as training
from tests.dist.pool import Pool
from tests.reference.tolerances import MIXED_TOLERANCE, assert_close

for package in ("peft", "bitsandbytes"):
    pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def _packages(request: pytest.FixtureRequest) -> None:
    """Skips quantizations of a package that is not installed."""
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind", "")
    if str(kind).startswith("ao-") and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; pip install -r requirements/torchao.txt")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    training.write_base(folder)
    return folder


def assert_equal_training(
    results: list[dict[str, Any]], expected: dict[str, Any], has_all_grads: bool = True
) -> None:
    """Compares losses, gradients by name, and values after the last step."""
    grads: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        grads |= result["grads"]
    assert all(grad.abs().max() > 0 for grad in expected["grads"].values())
    if has_all_grads:
        # In int8 a rounding of float32 may change the code of an activation.
        limit = MIXED_TOLERANCE[torch.float32].grads
        assert_close(grads, expected["grads"], torch.float32, "gradients", limit)
    assert expected["values"]
    for name, value in expected["values"].items():
        torch.testing.assert_close(results[0]["values"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.covering(times=1)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", training.KINDS)
@pytest.mark.parametrize("layout", training.LAYOUTS)
def test_adapters_train_as_in_one_process(
    pool: Pool, base: str, layout: str, kind: str, use_dora: bool
) -> None:
    (expected,) = pool.run(1, training.train, training.Job(base, kind, use_dora))
    world_size, config = training.LAYOUTS[layout]
    results = pool.run(world_size, training.train, training.Job(base, kind, use_dora, config))
    if (kind, use_dora) != ("int8", True):  # whose reference has layers in full precision
        assert results[0]["keys"] == expected["keys"]
    assert_equal_training(results, expected, has_all_grads="sharded" not in layout)


@pytest.mark.covering(times=1)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", training.KINDS)
@pytest.mark.parametrize("layout", training.LAYOUTS)
def test_ranks_that_read_and_quantize_their_layers_train_as_one_process(
    pool: Pool, base: str, layout: str, kind: str, use_dora: bool
) -> None:
    job = training.Job(base, kind, use_dora)
    (begin,) = pool.run(1, training.values_at_creation, job)
    (expected,) = pool.run(1, training.train, replace(job, begin=begin))
    world_size, config = training.LAYOUTS[layout]
    results = pool.run(world_size, training.train, replace(job, config=config, is_late=True))
    assert_equal_training(results, expected, has_all_grads="sharded" not in layout)


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_smp_auto_trains_as_one_process(
    pool: Pool, base: str, kind: str, is_module: bool, tmp_path: Path
) -> None:
    file = tmp_path / "auto.json"
    job = training.Job(base, kind, config={"pipeline_parallel_degree": 2})
    results = pool.run(2, training.train_by_auto, job, str(file), is_module)
    (begin,) = [None] if is_module else pool.run(1, training.values_at_creation, job)
    (expected,) = pool.run(1, training.train, training.Job(base, kind, begin=begin))
    assert_equal_training(results, expected)
    assert re.search(r"PeftModelForCausalLM.*, 179 k parameters", results[0]["said"])
    # The plan has counted what the ranks hold: packed layers, and adapters in full precision.
    planned = json.loads(file.read_text())["plan"]["ranks"]
    in_full = Path(base, "model.safetensors").stat().st_size
    for rank, result in zip(planned, results, strict=True):
        assert rank["parameters"] == pytest.approx(result["bytes"], rel=0.05)
        assert rank["parameters"] < 0.5 * in_full


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_pipeline_of_one_microbatch_has_the_bits_of_one_process(
    pool: Pool, base: str, kind: str
) -> None:
    (expected,) = pool.run(1, training.train, training.Job(base, kind))
    config = {"pipeline_parallel_degree": 2, "microbatches": 1, "auto_partition": False}
    results = pool.run(2, training.train, training.Job(base, kind, config=config))
    for result in results:
        assert result["losses"] == expected["losses"]
    for name, value in expected["values"].items():
        assert torch.equal(results[0]["values"][name], value)


@pytest.mark.parametrize("kind", training.KINDS)
@pytest.mark.parametrize(("of", "onto"), [("pipeline", "sharded state"), ("replicas", "pipeline")])
def test_adapters_are_loaded_on_another_layout(
    pool: Pool, base: str, kind: str, of: str, onto: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    (expected,) = pool.run(1, training.train, training.Job(base, kind))
    for layout, how in ((of, {"saves": folder}), (onto, {"resumes": folder})):
        world_size, config = training.LAYOUTS[layout]
        job = training.Job(base, kind, config=config, is_late=True, **how)  # type: ignore[arg-type]
        results = pool.run(world_size, training.train, job)
    # Adapters of late models begin with other values; what goes on is what was saved.
    (saved,) = pool.run(1, training.values_at_creation, training.Job(base, kind))
    (expected,) = pool.run(1, training.train, training.Job(base, kind, begin=saved))
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"][1:], rel=1e-5)
    for name, value in expected["values"].items():
        torch.testing.assert_close(results[0]["values"][name], value, rtol=1e-4, atol=1e-5)
    num_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert num_bytes < 1_000_000  # the base model has 0.7 MB in full precision


def read_and_merge(rank: int, base: str, kind: str, folder: str) -> dict[str, Any]:
    """Reads exported adapters in plain PEFT: beside the quantized base, and merged."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    quantized = LlamaForCausalLM.from_pretrained(
        base, quantization_config=training.config_of(kind), device_map="cpu", dtype=torch.float32
    )
    again = PeftModel.from_pretrained(quantized, folder)
    values = {n: v for n, v in again.state_dict().items() if "lora_" in n}
    whole = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    ids = training.batch(0)
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        whole.merge_and_unload().save_pretrained(f"{folder}/merged")
        merged = LlamaForCausalLM.from_pretrained(f"{folder}/merged")
        plain = LlamaForCausalLM.from_pretrained(base)
        return {
            "values": values,
            "merged": merged(input_ids=ids).logits,
            "apart": expected,
            "base": plain(input_ids=ids).logits,
        }


@pytest.mark.covering(times=1)
@pytest.mark.parametrize("kind", training.KINDS)
@pytest.mark.parametrize("layout", training.LAYOUTS)
def test_exported_adapters_are_read_and_merged_by_peft(
    pool: Pool, base: str, layout: str, kind: str, tmp_path: Path
) -> None:
    world_size, config = training.LAYOUTS[layout]
    job = training.Job(base, kind, True, config, is_late=True, exports=str(tmp_path))
    results = pool.run(world_size, training.train, job)
    (found,) = pool.run(1, read_and_merge, base, kind, str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 100_000
    assert results[0]["values"].keys() == found["values"].keys()
    for name, value in results[0]["values"].items():
        assert torch.equal(found["values"][name], value), name
    torch.testing.assert_close(found["merged"], found["apart"], rtol=1e-4, atol=1e-4)
    assert (found["merged"] - found["base"]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["nf4", "int8", "ao-int8"])
def test_a_pipeline_in_16_bits_trains_as_one_process_in_16_bits(
    pool: Pool, base: str, kind: str
) -> None:
    job = training.Job(base, kind, config={"bf16": True}, dtype=torch.bfloat16)
    (expected,) = pool.run(1, training.train, job)
    config = {"bf16": True, "pipeline_parallel_degree": 2}
    for result in pool.run(2, training.train, replace(job, config=config)):
        assert result["losses"] == expected["losses"]
    (wide,) = pool.run(1, training.train, training.Job(base, kind))
    assert expected["losses"] != wide["losses"]
    assert expected["losses"] == pytest.approx(wide["losses"], rel=0.05)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("layout", ["pipeline", "sharded"])
def test_models_that_peft_prepares_train_as_in_one_process(
    pool: Pool, base: str, layout: str, kind: str
) -> None:
    job = training.Job(base, kind, dtype=torch.bfloat16, is_prepared=True)
    (expected,) = pool.run(1, training.train, job)
    world_size, config = training.LAYOUTS[layout]
    results = pool.run(world_size, training.train, replace(job, config=config))
    assert_equal_training(results, expected, has_all_grads=layout != "sharded")


def test_evaluations_between_steps_of_a_pipeline_change_nothing(pool: Pool, base: str) -> None:
    world_size, config = training.LAYOUTS["pipeline"]
    job = training.Job(base, "nf4", config=config)
    expected = pool.run(world_size, training.train, job)
    results = pool.run(world_size, training.train, replace(job, evaluates=True))
    for result, without in zip(results, expected, strict=True):
        assert result["losses"] == without["losses"]
        pairs = zip(result["evaluated"], result["losses"], strict=True)
        assert all(after < before for after, before in pairs)  # of one batch, around its update
    for name, value in expected[0]["values"].items():
        assert torch.equal(results[0]["values"][name], value)


@pytest.mark.parametrize("kind", training.KINDS)
def test_split_models_keep_quantized_layers_whole_by_name(pool: Pool, base: str, kind: str) -> None:
    world_size, config = training.LAYOUTS["split"]
    (first, _) = pool.run(world_size, training.train, training.Job(base, kind, config=config))
    assert first["split"] == ["base_model.model.lm_head", "base_model.model.model.embed_tokens"]
    assert f"model.layers.0.mlp.gate_proj' {STAYS[kind]}" in first["log"]


STAYS = {
    "nf4": "is a Linear4bit, a subclass of Linear that computes something else",
    "int8": "is a Linear8bitLt, a subclass of Linear that computes something else",
    "ao-int8": "has a Int8Tensor as 'weight'",
    "ao-int4": "has a IntxUnpackedToInt8Tensor as 'weight'",
}


def load_state(rank: int, base: str, kind: str) -> tuple[float, int]:
    """Loads the whole state of a plain model into a late pipeline."""
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    given = training.loaded(base, kind, False).state_dict()
    wrapped = smp.DistributedModel(training.late(base, kind, False))
    ids = training.batch(0)

    @smp.step
    def step(model: Any) -> Any:
        return model(input_ids=ids, labels=ids).loss

    step(wrapped)
    with torch.no_grad():
        name = next(name for name in given if "lora_A" in name)
        given[name] += 1
    wrapped.load_state_dict(given)
    return float((wrapped.state_dict()[name] - given[name]).abs().max()), len(given)


@pytest.mark.parametrize("kind", training.KINDS)
def test_states_with_quantized_weights_are_loaded_into_late_pipelines(
    pool: Pool, base: str, kind: str
) -> None:
    for difference, num_entries in pool.run(2, load_state, base, kind):
        assert difference == 0 and num_entries > 60


def save_early(rank: int, base: str, folder: str) -> str:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    model = smp.DistributedModel(training.loaded(base, "nf4", False))
    with pytest.raises(RuntimeError) as caught:
        smp.save_adapters(model, folder)
    return str(caught.value)


def test_adapters_of_a_model_without_partition_are_refused(
    pool: Pool, base: str, tmp_path: Path
) -> None:
    for text in pool.run(2, save_early, base, str(tmp_path)):
        assert "the model is not partitioned yet; call a step function first" in text


def save_one_of_two(rank: int, base: str, folder: str) -> dict[str, torch.Tensor]:
    """Saves the second of two adapters, which trains biases as well; returns what is trained."""
    from peft import LoraConfig

    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    adapted = training.loaded(base, "nf4", False)
    torch.manual_seed(9)
    adapted.add_adapter(
        "second", LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["norm"])
    )
    adapted.set_adapter("second")
    model = smp.DistributedModel(adapted)
    ids = training.batch(0)

    @smp.step
    def step(model: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    step(model)
    smp.save_adapters(model, folder)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name in trained}


def test_the_active_one_of_two_adapters_is_saved_with_all_that_it_trains(
    pool: Pool, base: str, tmp_path: Path
) -> None:
    from peft.utils import load_peft_weights

    trained = pool.run(2, save_one_of_two, base, str(tmp_path))[0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["second"]
    saved = load_peft_weights(str(tmp_path / "second"), device="cpu")
    short = {name.replace(".second", "").replace(".modules_to_save", "") for name in trained}
    assert len(trained) == 17 and saved.keys() == short
    for name, value in trained.items():
        found = saved[name.replace(".second", "").replace(".modules_to_save", "")]
        assert torch.equal(found, value)
