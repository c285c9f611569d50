"""``smp estimate``: measured peaks, formulas, and how the command ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import smp
from benchmarks.models import Gpt, GptShape
from smp.commands.models import load_model
from smp.commands.plan import profiled
from smp.config.schema import Config
from smp.model import engine_of
from smp.modules.state_bytes import (
    MASTER_BYTES,
    PIECE_ELEMENTS,
    SLOTS,
    STATE_DTYPES,
    moment_bytes,
)
from smp.modules.training_dtypes import plan_dtypes
from smp.nn.linear_cross_entropy import MIN_CHUNK_BYTES
from smp.optimizers import FusedAdam
from smp.planning import hardware, memory
from smp.planning.estimate import Estimate, estimate
from smp.planning.layout import Layout
from smp.planning.memory import Activations, Weights, rank_bytes
from smp.planning.run_cuts import Run
from tests.conftest import REPO
from tests.dist.small_pieces import small_pieces

HERE = "tests.unit.test_estimate"
RESULTS = REPO / "benchmarks" / "results" / "memory_xeon2_202611.jsonl"
TOLERANCE = 0.1
SHAPE = {"num_layers": 8, "hidden": 512, "num_heads": 8, "vocab_size": 4096, "seq_len": 128}
SHARDED = {"sdp_param_persistence_threshold": 0}
CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "replicas": lambda ranks: {},
    "sharded_optimizer": lambda ranks: {"shard_optimizer_state": True},
    "sharded_data": lambda ranks: {"sharded_data_parallel_degree": ranks, **SHARDED},
    "checkpointing": lambda ranks: {},
}


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.zeros(1, SHAPE["seq_len"], dtype=torch.long)
    return Gpt(GptShape(**SHAPE), SHAPE["num_layers"]), (ids, ids)


def _estimate(values: dict[str, Any], num_ranks: int, batch: int, **options: Any) -> Estimate:
    with torch.device("meta"):
        model = gpt()[0].train()
    ids = torch.zeros(batch, SHAPE["seq_len"], dtype=torch.long)
    config = Config.from_dict({"ddp": True, **values})
    return estimate(model, (ids, ids), {}, Run(config, frozenset(values), num_ranks, **options))


def _measured() -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [r for r in lines if r["benchmark"] == "memory" and r["contender"] == "smp"]


@pytest.mark.parametrize(
    "result", _measured(), ids=lambda r: f"{r['config']['subject']}-{r['num_processes']}"
)
def test_peak_is_the_measured_one_within_a_tenth(result: dict[str, Any]) -> None:
    config = result["config"]
    assert config["shape"] == SHAPE
    found = _estimate(
        CONFIGS[config["subject"]](result["num_processes"]),
        result["num_processes"],
        config["batch_size"],
        checkpoints=config["subject"] == "checkpointing",
    )
    measured = result["state_mb"] + result["step_peak_mb"]
    predicted = found.stages[0].held.peak / 1e6
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


def test_all_subjects_are_compared() -> None:
    found = {(r["config"]["subject"], r["num_processes"]) for r in _measured()}
    assert len(found) == 5 and {subject for subject, _ in found} == set(CONFIGS)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_state_is_that_of_the_table(half: bool, parameters: bool, size: int) -> None:
    """docs/memory.md, bytes per parameter and rank between steps."""
    table = {
        (False, False): 4 + 12 / size,
        (False, True): 16 / size,
        (True, False): 2 + 16 / size,
        (True, True): 18 / size,
    }
    layout = Layout(
        rdp=size,
        shard=size,
        shards_parameters=parameters,
        microbatches=2,
        precision="bf16" if half else "fp32",
    )
    held = rank_bytes(Weights(1e9, 1e9), Activations(1e9), layout)
    state = held.parameters + held.gradients + held.optimizer
    assert state == pytest.approx(1e9 * table[half, parameters])


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_dropped_in_the_backward_take_buckets_only(ranks: int) -> None:
    plain = _estimate({}, ranks, 1).stages[0].held
    found = _estimate({"update_in_backward": True}, ranks, 1).stages[0].held
    assert found.gradients == 0 < plain.gradients
    # Bucket by bucket they exist while the backward runs, and none is left where a forward begins.
    assert plain.peak - found.peak > plain.gradients - ranks * 25 * 2**20


@pytest.mark.parametrize("state_dtype", list(STATE_DTYPES))
@pytest.mark.parametrize("masters", ["no bf16", "fp32", "residue", "none"])
@pytest.mark.parametrize("offloads", [False, True])
def test_optimizer_has_the_bytes_of_a_run(
    ends: None, masters: str, state_dtype: str, offloads: bool
) -> None:
    """Counts the bytes of masters and moments after an update of a GPT."""
    values = {} if masters == "no bf16" else {"bf16": True, "bf16_masters": masters}
    values |= {"offload_optimizer_state": offloads}
    smp.init(values)
    model = smp.DistributedModel(gpt()[0])
    inner = FusedAdam(model.parameters(), state_dtype=state_dtype)
    optimizer = smp.DistributedOptimizer(inner)
    ids = torch.zeros(1, SHAPE["seq_len"], dtype=torch.long)

    @smp.step
    def train_step() -> None:
        model.backward(model(ids, ids))

    train_step()
    with small_pieces():
        optimizer.step()
        estimated = _estimate(values, 1, 1, state_dtype=state_dtype).stages[0].held
    held = {False: 0, True: 0}  # by whether it is in host memory
    for state in inner.state.values():
        for name, value in state.items():
            if name != "step":
                held[offloads and name.startswith("exp_avg")] += value.nbytes
    holdings = engine_of(model).holdings.values()
    held[False] += sum(h.master.nbytes for h in holdings if h.has_copy)
    elements = sum(p.numel() for p in model.parameters())
    digits = MASTER_BYTES[masters] if "bf16" in values else 0
    moments = moment_bytes(state_dtype)
    assert estimated.host == (moments * elements if offloads else 0)
    assert estimated.optimizer == digits * elements + (0 if offloads else moments * elements)
    # Each parameter begins with a block of its own.
    for found, really in ((estimated.optimizer, held[False]), (estimated.host, held[True])):
        assert found <= really <= 1.001 * found + 1


@pytest.mark.parametrize(("tp", "shard"), [(1, 1), (1, 2), (2, 1)])
def test_owners_hold_whole_tensors_and_their_gradients(tp: int, shard: int) -> None:
    layouts = [Layout(tp=tp, rdp=shard, shard=shard, has_owners=has) for has in (False, True)]
    parts, owners = (rank_bytes(Weights(1e9, 1e9), Activations(1e6), one) for one in layouts)
    owned = 4e9 / shard if tp * shard > 1 else 0
    assert owners.optimizer == parts.optimizer + owned
    assert owners.temporary == max(parts.temporary, owned)


def test_an_update_needs_room_for_its_pieces() -> None:
    """Finds the peak in the update if moments are in host memory and activations are few."""
    layout = Layout(offloads_state=True, precision="bf16", state_dtype="int8")
    few, many = (rank_bytes(Weights(1e9, 1e9), Activations(n), layout) for n in (1e6, 1e9))
    assert few.temporary == moment_bytes("int8") * SLOTS * PIECE_ELEMENTS
    assert (many.activations, many.temporary) == (1e9, 0)
    assert few.optimizer == 4e9 and few.host == moment_bytes("int8") * 1e9
    near = rank_bytes(Weights(1e9, 1e9, near=1e9), Activations(1e6), layout)
    assert near.host == 0 and near.peak > few.peak


@pytest.mark.sample(keep=0)
def test_pipeline_ranks_keep_what_the_schedule_says() -> None:
    values = {"pipeline_parallel_degree": 2, "microbatches": 8, "active_microbatches": 2}
    first, last = _estimate(values, 2, 1).stages
    assert (first.kept_microbatches, last.kept_microbatches) == (2, 1)
    assert first.held.activations == pytest.approx(2 * first.microbatch_bytes, rel=0.05)
    assert last.held.activations == pytest.approx(last.microbatch_bytes, rel=0.05)
    whole = _estimate({}, 1, 1).stages[0]
    both = first.microbatch_bytes + last.microbatch_bytes
    assert both == pytest.approx(whole.microbatch_bytes, rel=0.01)
    assert first.elements + last.elements == whole.elements


def test_parts_of_sequences_have_their_share_of_activations() -> None:
    whole = _estimate({"ddp": True}, 2, 2).stages[0]
    parts = _estimate({"ddp": True, "context_parallel_degree": 2}, 2, 2).stages[0]
    assert parts.microbatch_bytes == pytest.approx(whole.microbatch_bytes / 2, rel=0.01)
    assert parts.elements == whole.elements


@pytest.mark.sample(keep=0)
def test_split_layers_have_half_of_the_state_and_their_own_samples() -> None:
    whole, half = (_estimate({"tensor_parallel_degree": n}, n, 2).stages[0] for n in (1, 2))
    assert half.elements == pytest.approx(whole.elements / 2, rel=0.01)
    assert half.microbatch_bytes == whole.microbatch_bytes
    common = _estimate({"tensor_parallel_degree": 2, "prescaled_batch": True}, 2, 2).stages[0]
    assert common.microbatch_bytes == pytest.approx(whole.microbatch_bytes / 2, rel=0.01)
    fast = {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}
    between = _estimate(fast, 2, 2).stages[0].microbatch_bytes
    assert common.microbatch_bytes < between < whole.microbatch_bytes


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(1, 8, dtype=torch.long)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_widths_are_those_of_training(precision: str) -> None:
    """T5 keeps its widest matrices in 32 bits with fp16."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    trained = t5()[0]
    dtypes = plan_dtypes(trained, dtype)
    own = list(trained.parameters())
    wide = sum(p.numel() for p in own if dtypes.of(p) == torch.float32)
    assert (wide > 0) == (precision == "fp16")
    elements = sum(p.numel() for p in own)
    with torch.device("meta"):
        model = t5()[0].train()
    config = Config.from_dict({"ddp": True, precision: True})
    held = estimate(model, (), t5()[1], Run(config, frozenset({precision}), 1)).stages[0].held
    assert held.parameters == sum(p.numel() * dtypes.of(p).itemsize for p in own)
    assert held.optimizer == 8 * elements + 4 * (elements - wide)
    make = partial(load_model, f"{HERE}:t5")
    with profiled(make, None, precision, hardware.load("h200")) as (_, view, _):
        weights = [weight for part in view.profile.chain for weight in part.weights]
        assert sum(weight.elements for weight in weights if weight.is_wide) == wide


def wordy() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns a model whose logits are most of what it keeps."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(8, 256, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_heads_without_logits_keep_no_logits(
    degree: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, temporary = [], []
    for fused in (False, True):
        words = f"{degree}=2,fused_linear_cross_entropy={fused}"
        argv = ["estimate", f"{HERE}:wordy", "--config", words, "--microbatch", "8", "--json"]
        assert main(argv) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        kept.append(max(rank["bytes"]["activations"] for rank in ranks))
        temporary.append(max(rank["bytes"]["temporary"] for rank in ranks))
    logits_bytes = 8 * 256 * 32_000 * 4 // (2 if degree.startswith("tensor") else 1)
    assert kept[0] - kept[1] >= 0.9 * logits_bytes
    assert temporary[0] >= logits_bytes and temporary[1] <= 2 * MIN_CHUNK_BYTES


@pytest.mark.sample(keep=0)
def test_plans_without_logits_have_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for words in ([], ["--without-logits"]):
        argv = ["plan", f"{HERE}:wordy", "--gpus", "1", "--batch", "8", "--json", *words]
        assert main(argv) == 0
        (plan, *_) = json.loads(capsys.readouterr().out)["plans"]
        assert plan["config"].get("fused_linear_cross_entropy", False) == bool(words)
        peaks.append(plan["peak_bytes"] / plan["samples_per_microbatch"])
    assert peaks[1] < peaks[0]


def test_a_model_without_such_a_head_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:gpt", "--gpus", "1", "--without-logits"]) == 2
    assert "can compute its loss without logits" in capsys.readouterr().err


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * self.scale).square().mean()


def test_buffers_keep_their_dtype() -> None:
    with torch.device("meta"):
        model = Scaled()
    config = Config.from_dict({"ddp": True, "bf16": True})
    estimate(model, (torch.zeros(2, 8),), {}, Run(config, frozenset({"bf16"}), 1))
    assert model.scale.dtype == torch.float32 and model.inner.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("offload", [True, "all"])
def test_offloaded_activations_are_in_the_host(
    offload: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_GROUP_BYTES", 1)
    values = {"activation_loading_horizon": 1, "offload_activations": offload}
    checkpoints = offload is True
    held = _estimate(values, 1, 8, checkpoints=checkpoints).stages[0].held
    kept = _estimate({}, 1, 8, checkpoints=checkpoints).stages[0].held
    assert held.host > 0 and held.activations < kept.activations
    assert held.host + held.activations == pytest.approx(kept.activations)
    assert held.peak == pytest.approx(kept.peak - held.host)


COMMAND = ["estimate", f"{HERE}:gpt", "--config"]


def test_command_prints_json_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"pipeline_parallel_degree": 2, "microbatches": 4}))
    assert main([*COMMAND, f"{file},microbatches=2", "--processes", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(r["pp_rank"], r["num_ranks"]) for r in facts["ranks"]] == [(0, 2), (1, 2)]
    assert sum(r["parameters"] for r in facts["ranks"]) == facts["parameters"]
    assert facts["ranks"][0]["kept_microbatches"] == 2
    for rank in facts["ranks"]:
        on_device = sum(n for kind, n in rank["bytes"].items() if kind != "host")
        assert rank["peak_bytes"] == pytest.approx(on_device, abs=8)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["ddp=True", "--memory", "10GiB"], 0, ""),
        (["ddp=True", "--memory", "100MiB"], 1, ""),
        (["pipline=1"], 2, "did you mean 'pipeline'"),
        (["no_such_file.json"], 2, "cannot read 'no_such_file.json'"),
        (["tensor_parallel_degree=4", "--processes", "6"], 2, "6 processes cannot form groups"),
        (["pipeline_parallel_degree=2,partition_memory_limit=1MB"], 1, "does not fit"),
        (["ddp=True", "--processes", "0"], 2, "--processes must be at least 1, got 0"),
        (["ddp=True", "--microbatch", "0"], 2, "must be at least 1"),
    ],
)
def test_command_ends_with_a_status_and_one_line(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words]) == status
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == bool(text)
    assert ("does not fit: " in captured.out) == (status == 1 and not text)


def broken() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 4), torch.zeros(1, 5)


def test_forward_that_raises_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{HERE}:broken"]) == 2
    assert "cannot be traced: RuntimeError" in capsys.readouterr().err
