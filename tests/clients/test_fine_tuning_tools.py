"""Axolotl and LLaMA-Factory over smp against the same tools in one process.

Their pins exclude the releases of the other tests, so each has an environment of its own, where it
is installed beside smp; elsewhere its tests are skipped. docs/trainer.md names the releases.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_trl import WORDS, tiny_llama, tokenizer_of_words
from tests.installed import python_path
from tests.patience import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
TOLERANCE = 1e-5

# On a machine without a GPU Axolotl asks CUDA whether the devices of a host reach each other.
AXOLOTL = """
import os, sys, torch
torch.cuda.can_device_access_peer = lambda *_: True
from axolotl.cli.train import do_cli
if __name__ == "__main__":
    do_cli(sys.argv.pop(1))
"""
COMMON: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 2e-2, "adam_epsilon": 1e-3,
    "weight_decay": 0.01, "max_grad_norm": 0.5, "logging_steps": 1, "save_steps": 2,
    "eval_steps": 2, "warmup_steps": 2, "seed": 7, "bf16": False, "fp16": False,
}  # fmt: skip


def needs(package: str) -> pytest.MarkDecorator:
    is_absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_absent, reason=f"{package} is not installed here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with a model, a tokenizer, and samples of very different lengths."""
    model, tokenizer = tiny_llama(5), tokenizer_of_words()
    model.config.pad_token_id, model.config.eos_token_id = 0, 1
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name, count in (("texts", 64), ("evaluated", 16)):
        rows = [
            {
                "instruction": _text(i, 2 + i % 5),
                "input": "",
                "output": _text(3 * i, 2 + 7 * i % 13),
            }
            for i in range(count)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    return tmp_path


def _text(first: int, length: int) -> str:
    return " ".join(f"w{(first + 3 * i) % WORDS}" for i in range(length))


def run(script: Path, settings: dict[str, Any], folder: Path, world_size: int) -> None:
    name = Path(settings["output_dir"]).name
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(settings))  # YAML includes JSON
    env = {
        **os.environ, "PYTHONPATH": f"{python_path()}:{REPO}", "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    words = [sys.executable, *(launcher if world_size > 1 else []), str(script), str(config)]
    done = subprocess.run(
        words, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def results(output: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns logged numbers by name, and the parameters that the tool has saved at its end."""
    from safetensors.torch import load_file

    history = json.loads(Path(output, "checkpoint-4", "trainer_state.json").read_text())
    names = ("loss", "eval_loss", "grad_norm", "learning_rate")
    logged = {n: [e[n] for e in history["log_history"] if n in e] for n in names}
    file = "adapter_model" if Path(output, "adapter_model.safetensors").exists() else "model"
    return logged, load_file(Path(output, f"{file}.safetensors"))


def check_same(own: str, plain: str, resumed: bool = False) -> None:
    (logged, state), (expected, parameters) = results(own), results(plain)
    first, *_, last = expected["eval_loss"]  # of the same samples
    assert abs(first - last) > 0.01, "nothing was learnt"
    if resumed:  # Axolotl evaluates once more
        logged["eval_loss"] = [*logged["eval_loss"][: len(expected["eval_loss"]) - 1],
                               logged["eval_loss"][-1]]  # fmt: skip
    for name, values in expected.items():
        assert logged[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    assert state.keys() == parameters.keys()
    for name, value in parameters.items():
        assert (state[name] - value).abs().max() < TOLERANCE, name


def check(script: Path, make: Any, plain: Path, folder: Path) -> None:
    """Compares two layouts with the plain run, and one from its checkpoint.

    Args:
        script: script of the user.
        make: function that returns settings from a name, a batch size and a key of smp.
        plain: script without smp.
        folder: folder with the data.
    """
    outputs = {n: str(folder / n) for n in ("one", "two", "four", "again")}
    run(plain, make(outputs["one"], 8, False), folder, 1)
    run(script, make(outputs["two"], 8, True), folder, 2)
    check_same(outputs["two"], outputs["one"])
    run(script, make(outputs["four"], 4, True), folder, 4)
    check_same(outputs["four"], outputs["one"])
    again = make(outputs["again"], 4, True)
    again["resume_from_checkpoint"] = f"{outputs['four']}/checkpoint-2"
    run(script, again, folder, 4)
    check_same(outputs["again"], outputs["one"], resumed=True)


@needs("axolotl")
@pytest.mark.parametrize("case", ["padded", "packed"])
def test_axolotl(folder: Path, case: str) -> None:
    script = folder / "train.py"
    script.write_text(AXOLOTL)
    sets = {
        name: [{"path": str(folder / f"{file}.json"), "type": "alpaca", "ds_type": "json",
                "split": "train"}]
        for name, file in (("datasets", "texts"), ("test_datasets", "evaluated"))
    }  # fmt: skip
    own: dict[str, Any] = {}
    if case == "packed":  # in order: the random one depends on the number of processes
        own = {"sample_packing": True, "eval_sample_packing": True, "curriculum_sampling": True}
        own |= {"gradient_accumulation_steps": 1}

    def make(output: str, batch: int, is_smp: bool) -> dict[str, Any]:
        size = batch // 2 if case == "packed" else batch
        settings = COMMON | sets | {
            "base_model": str(folder / "model"), "output_dir": output, "micro_batch_size": size,
            "dataset_prepared_path": f"{output}_prepared", "num_epochs": 12,
            "sequence_len": 32 if case == "packed" else 64,
            "lr_scheduler": "linear", "optimizer": "adamw_torch", "tf32": False,
            "attn_implementation": "sdpa", "dataset_num_proc": 1, **own,
        }  # fmt: skip
        if is_smp:
            settings |= {"plugins": ["smp.integrations.axolotl.SMPPlugin"], "smp": PIPELINE}
        return settings

    check(script, make, script, folder)


@needs("axolotl")
def test_axolotl_settings_that_smp_does_not_do_are_refused() -> None:
    from smp.integrations import axolotl

    for name, remedy in axolotl._REFUSED.items():
        with pytest.raises(ValueError, match=f"{name}: 2 of Axolotl cannot .* with smp; {remedy}"):
            axolotl.check({name: 2})
    axolotl.check({"fsdp": None, "tensor_parallel_size": 1, "deepspeed": "", "smp": PIPELINE})
    with pytest.raises(TypeError, match="AxolotlTrainer, which Axolotl has chosen, does not train"):
        axolotl.SMPPlugin().post_trainer_create({}, object.__new__(axolotl.AxolotlTrainer))


@needs("llamafactory")
@pytest.mark.parametrize("case", ["full", "lora"])
def test_llama_factory(folder: Path, case: str) -> None:
    plain = folder / "plain.py"
    plain.write_text("from llamafactory.train.tuner import run_exp\nrun_exp()\n")
    names = {name: {"file_name": f"{name}.json"} for name in ("texts", "evaluated")}
    (folder / "dataset_info.json").write_text(json.dumps(names))

    def make(output: str, batch: int, is_smp: bool) -> dict[str, Any]:
        settings = COMMON | {
            "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True,
            "finetuning_type": case, "dataset": "texts", "eval_dataset": "evaluated",
            "dataset_dir": str(folder), "template": "empty", "cutoff_len": 64, "output_dir": output,
            "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch,
            "eval_strategy": "steps", "lr_scheduler_type": "linear", "data_seed": 7,
            "report_to": "none", "use_cpu": True, "flash_attn": "sdpa",
            "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "overwrite_cache": True,
        }  # fmt: skip
        if case == "lora":
            settings |= {"lora_rank": 4, "lora_target": "q_proj,v_proj", "lora_dropout": 0.0}
        return settings

    check(REPO / "examples" / "llama_factory" / "train.py", make, plain, folder)
