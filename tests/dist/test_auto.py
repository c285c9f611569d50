"""``smp.auto`` trains as the plain script does, says why, and refuses what cannot run."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

import smp
from smp.automatic import ready
from smp.automatic.sources import Pretrained
from smp.planning.run_cuts import View
from smp.planning.search import USABLE, Job
from tests.dist.pool import Pool
from tests.harness import Layers, labelled_loss, samples_of, square_loss, train_step_of, wholes
from tests.made_up_hardware import MADE_UP
from tests.reference.hugging_face import POSITIONS, VOCABULARY, family
from tests.unit.test_planning_kept import least_peak

SAMPLES = 8
STEPS = 3
LAYERS = 8
Record = dict[str, Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # Gradients that are nothing but rounding, as those of biases of keys, change little.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def ids_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(2, VOCABULARY, (SAMPLES, POSITIONS), generator=generator)


def texts_of(step: int) -> dict[str, Tensor]:
    return {"input_ids": ids_of(step), "labels": ids_of(step)}


def token_loss(model: Any, ids: Tensor) -> Tensor:
    """Returns the loss of predicted tokens in the dtype of the model; transformers casts it."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def save(folder: Path, name: str, **changes: Any) -> nn.Module:
    """Writes a tiny model with random values as a folder of Hugging Face."""
    model: Any = family(name).build(**changes)
    model.save_pretrained(folder)
    return model.train()


def own(batch: Any) -> Any:
    """Returns this replica's part of a batch."""
    if isinstance(batch, dict):
        return {name: own(value) for name, value in batch.items()}
    return batch[smp.rdp_rank() :: smp.rdp_size()]


def trained(model: Any, optimizer: Any, batch_of: Any, loss_of: Any) -> list[float]:
    step = train_step_of(model, loss_of)
    losses = []
    for number in range(STEPS):
        losses.append(float(step(own(batch_of(number))).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return [sum(smp.allgather(loss, smp.CommGroup.DP_GROUP)) / smp.dp_size() for loss in losses]


def plain(model: Any, batch_of: Any, loss_of: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = adamw(model.parameters()), []
    for number in range(STEPS):
        loss = loss_of(model, batch_of(number))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.double() for name, value in model.state_dict().items()}


def run(rank: int, model: Any, arguments: dict[str, Any], batch_of: Any, loss_of: Any) -> Record:
    with redirect_stdout(io.StringIO()) as said:
        made, optimizer = smp.auto(model, adamw, batch=SAMPLES, **arguments)
    losses = trained(made, optimizer, batch_of, loss_of)
    held = sum(parameter.numel() for parameter in made.local_parameters())
    config = smp.state.cfg
    degrees = (config.pipeline_parallel_degree, config.tensor_parallel_degree)
    return {"losses": losses, "state": wholes(made), "said": said.getvalue(), "held": held,
            "degrees": degrees}  # fmt: skip


def pretrained(rank: int, folder: str, arguments: dict[str, Any]) -> Record:
    return run(rank, folder, {"seq": POSITIONS, **arguments}, texts_of, labelled_loss)


def layers(rank: int, arguments: dict[str, Any]) -> Record:
    inputs = samples_of(0)
    return run(rank, Layers().double(), {"inputs": inputs, **arguments}, samples_of, square_loss)


def family_in_double(rank: int, arguments: dict[str, Any]) -> Record:
    model = family("gpt2").build().double().train()
    return run(rank, model, {"seq": POSITIONS, **arguments}, ids_of, token_loss)


def assert_equal(records: list[Record], expected: Any, bound: float, name: str = "gpt2") -> None:
    losses, state = expected
    assert losses[-1] != losses[0], "the optimizer does nothing"
    for record in records:
        values = record["state"]
        if record["degrees"][1] > 1:
            values = family(name).to_hf(values)
            values.setdefault("lm_head.weight", values["transformer.wte.weight"])  # tied
        assert record["losses"] == pytest.approx(losses, rel=bound)
        for key, value in state.items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=bound)


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("function", "config", "degrees"),
    [
        (family_in_double, {"pipeline_parallel_degree": 2}, (2, 1)),
        (layers, {}, None),
        (family_in_double, {"tensor_parallel_degree": 2}, (1, 2)),
        (layers, {"pipeline_parallel_degree": 2}, (2, 1)),
        (layers, {"sharded_data_parallel_degree": 2}, (1, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_modules_train_as_in_one_process_in_double(
    pool: Pool, tmp_path: Path, function: Any, config: dict[str, Any], degrees: Any
) -> None:
    arguments = {"config": config, "file": str(tmp_path / "auto.json")}
    records = pool.run(2, function, arguments)
    if function is layers:
        expected = plain(Layers().double(), samples_of, square_loss)
    else:
        expected = plain(family("gpt2").build().double().train(), ids_of, token_loss)
    assert_equal(records, expected, 1e-10)
    assert degrees is None or {record["degrees"] for record in records} == {degrees}


def counted(rank: int, arguments: dict[str, Any]) -> Record:
    """Trains, and counts the calls of each layer's forward in the steps of this rank."""
    model = family("gpt2").build(n_layer=LAYERS).double().train()
    names = {module: name.removesuffix(".mlp") for name, module in model.named_modules()}
    calls: Counter[str] = Counter()
    whole = GPT2MLP.forward

    def forward(module: Any, *given: Any) -> Any:
        if module in names:  # a plan has a model of its own
            calls[names[module]] += 1
        return whole(module, *given)

    GPT2MLP.forward = forward
    try:
        return {**run(rank, model, {"seq": POSITIONS, **arguments}, ids_of, token_loss),
                "calls": calls}  # fmt: skip
    finally:
        GPT2MLP.forward = whole


def test_layers_keep_their_activations_as_far_as_there_is_room(pool: Pool, tmp_path: Path) -> None:
    # Many samples of a narrow model: activations decide.
    file = tmp_path / "auto.json"
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    call = {"input_ids": torch.zeros(1, POSITIONS, dtype=torch.long)}
    with torch.device("meta"):
        model = family("gpt2").build(n_layer=LAYERS).train()
    view = View.of(model, ((), call), MADE_UP, "fp32")
    job = Job(view, MADE_UP, 2, 2, 10**12, SAMPLES, "fp32", fixed=config)
    plain_peak, again_peak = (least_peak(job, checkpoints) for checkpoints in (False, True))
    memory = int((plain_peak + again_peak) / 2 / USABLE)
    arguments = {"config": config, "memory": memory, "file": str(file)}
    records = pool.run(2, counted, arguments)
    expected = plain(family("gpt2").build(n_layer=LAYERS).double().train(), ids_of, token_loss)
    assert_equal(records, expected, 1e-10)
    again = json.loads(file.read_text())["plan"]["checkpoint_layers"]
    assert 0 < len(again) < LAYERS
    for record in records:
        more = config["microbatches"] * STEPS
        own = {name: number for name, number in record["calls"].items() if number >= more}
        once = {number - more * (name in again) for name, number in own.items()}
        assert len(once) == 1, record["calls"]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("name", "world", "config"),
    [
        ("gptj", 2, {"pipeline_parallel_degree": 2}),
        ("gpt2", 2, {"sharded_data_parallel_degree": 2}),  # its head is tied
        ("gptj", 2, {"tensor_parallel_degree": 2}),
        ("gpt2", 2, {"pipeline_parallel_degree": 2}),
        ("gptneox", 4, {"pipeline_parallel_degree": 2}),  # its files have other names
        ("gptj", 1, {}),
    ],
    ids=str,
)
def test_folders_train_as_in_one_process(
    pool: Pool, tmp_path: Path, name: str, world: int, config: dict[str, Any]
) -> None:
    expected = plain(save(tmp_path / "model", name), texts_of, labelled_loss)
    arguments = {"config": config, "file": str(tmp_path / "auto.json")}
    records = pool.run(world, pretrained, str(tmp_path / "model"), arguments)
    assert_equal(records, expected, 2e-5, name)
    if max(records[0]["degrees"]) > 1:  # shards of small tensors stay whole
        whole = sum(value.numel() for value in expected[1].values())
        assert max(record["held"] for record in records) < 0.9 * whole, "a rank holds all"


def test_five_lines_say_why_and_the_file_gives_the_same_without_looking(
    pool: Pool, tmp_path: Path
) -> None:
    save(tmp_path / "model", "gptj")
    file = tmp_path / "auto.json"
    first = pool.run(2, pretrained, str(tmp_path / "model"), {"file": str(file)})
    lines = first[0]["said"].splitlines()
    assert len(lines) == 5 and first[1]["said"] == ""
    assert re.match(
        r"smp.auto: GPTJForCausalLM, .* parameters, 8 x 16 tokens a step, fp32", lines[0]
    )
    assert re.match(
        r"smp.auto: 2 x CPU on 1 host: .* free, .* GFLOP/s each.*\(measured\)", lines[1]
    )
    assert re.match(
        r"smp.auto: pp \d, tp \d, dp \d.* s a step \(predicted\), the fastest of", lines[2]
    )
    assert re.match(r"smp.auto: .* of .* on the fullest rank: .* activations", lines[3])
    assert (
        lines[4]
        == f"smp.auto: written to {file}: plan={str(file)!r} gives the same without looking"
    )

    again = pool.run(2, from_plan, str(tmp_path / "model"), str(file))
    for mine, other in zip(first, again, strict=True):
        assert mine["losses"] == other["losses"] and mine["degrees"] == other["degrees"]
        assert all(torch.equal(mine["state"][name], other["state"][name]) for name in mine["state"])
        assert other["said"] == "", "it has looked"


def from_plan(rank: int, folder: str, file: str) -> Record:
    """Trains by a file; looking and searching raise."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("something was looked at")

    kept = ready.look, ready.choose
    ready.look = ready.choose = refuse  # type: ignore[assignment]
    try:
        return pretrained(rank, folder, {"plan": file})
    finally:
        ready.look, ready.choose = kept


def no_model() -> None:
    """Returns no model."""


def refusals(rank: int, calls: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Calls that are refused, in one process after the other; smp is not initialized after each."""
    found = []
    for model, arguments in calls:
        given = {"batch": SAMPLES, "file": None, **arguments}
        factory = given.pop("optimizer_factory", adamw)
        try:
            smp.auto(copy.deepcopy(model), factory, **given)
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
            smp.shutdown()
        assert not smp.is_initialized()
    return found


def test_wrong_calls_are_one_clear_error_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, "gptj")
    empty, bare, quantized = tmp_path / "empty", tmp_path / "bare", tmp_path / "quantized"
    for path, settings in ((empty, None), (bare, {}), (quantized, {"quant_method": "gptq"})):
        path.mkdir()
        if settings is not None:
            config = json.loads((folder / "config.json").read_text())
            config |= {"quantization_config": settings} if settings else {}
            (path / "config.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text("{}")
    short, joined = tmp_path / "short", tmp_path / "joined"
    shutil.copytree(folder, short)
    state = load_file(short / "model.safetensors")
    del state["lm_head.bias"]
    save_file(state, short / "model.safetensors", {"format": "pt"})
    transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
        )
    ).save_pretrained(joined)  # fmt: skip
    name, seq = str(folder), {"seq": POSITIONS}
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        r"no model '/no/such/folder'": ("/no/such/folder", seq),
        r"no model '.*empty': .* has no config.json": (str(empty), seq),
        r"no weights of '.*bare'": (str(bare), seq),
        r"the weights of '.*short' do not fit GPTJForCausalLM: 1 tensors are missing, the first is "
        r"'lm_head.bias'": (str(short), seq),
        r"the files of '.*joined' hold '.*experts.0.*', and transformers makes '.*' from several": (
            str(joined), seq),
        r"is stored quantized \(quant_method 'gptq'\)": (str(quantized), seq),
        r"expected a folder or name of Hugging Face, a module, or a function .*, got int": (3, {}),
        r"model 'no_model': its function returned NoneType; expected a module": (no_model, {}),
        r"nothing is known of the arguments of Layers; return the model and the arg": (Layers, {}),
        r"nothing is known of the arguments of Layers; give inputs=": (Layers(), {}),
        r"batch: expected a whole number above 0, got 0": (name, {"batch": 0}),
        r"seq: expected a whole number above 0, got '9'": (name, {"seq": "9"}),
        r"precision: expected one of fp32, bf16, fp16, got 'fp8'": (name, {"precision": "fp8"}),
        r"memory: expected bytes, or a size such as .40GB., got 'much'": (
            name, {"memory": "much"}),
        r"optimizer_factory: expected a function": (name, {"optimizer_factory": 3}),
        r"optimizer_factory: expected it to return an optimizer of torch.optim, got list": (
            name, {**seq, "optimizer_factory": list}),
        r"config: expected a dictionary, got list": (name, {"config": [1]}),
        r"config= sets fp16 or bf16; give precision=": (name, {"config": {"bf16": True}}),
        r"config= sets device_speeds, and smp.auto counts each device as the weakest": (
            name, {"config": {"device_speeds": [1, 2]}}),
        r"pipeline_paralel_degree": (name, {"config": {"pipeline_paralel_degree": 2}}),
        r"no layout has the keys \{'pipeline_parallel_degree': 3\} of config=": (
            name, {**seq, "config": {"pipeline_parallel_degree": 3}}),
        r"plan='.*none.json' cannot be read": (name, {"plan": str(tmp_path / "none.json")}),
        r"plan='.*other.json' was not written by smp.auto": (
            name, {"plan": str(tmp_path / "other.json")}),
    }  # fmt: skip
    for texts in pool.run(2, refusals, list(calls.values())):
        for pattern, text in zip(calls, texts, strict=True):
            assert re.search(pattern, text), (pattern, text)
            assert text.startswith("ValueError")


def test_what_does_not_fit_names_the_nearest_that_does(pool: Pool, tmp_path: Path) -> None:
    save(tmp_path / "model", "gptj", n_embd=64, n_layer=4, n_head=4)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (str(tmp_path / "model"), {"seq": POSITIONS, "memory": memory, "config": config})
        for memory, config in ((900_000, {"microbatches": 1}), (600_000, {}), (100_000, {}))
    ]
    fewer, more, never = pool.run(2, refusals, calls)[0]
    text = r"none of \d+ layouts fits into .*; the nearest, pp .*, needs .*\. "
    assert re.search(text + r"The nearest that fits: with batch=\d, pp .*iB$", fewer), fewer
    assert re.search(text + r"The nearest that fits: on 4 such devices, pp .*iB$", more), more
    assert re.search(text + "A smaller batch or 16 times as many devices do not help", never), never


def shrinking(rank: int, folder: str, file: str, how: str) -> tuple[str, bool]:
    """Runs where the memory of one rank vanishes between the plan and the load."""
    kept, loaded = ready.free_now, []

    def free_now(own: Any) -> float:
        if smp.rank() == 0:
            return kept(own)
        if how == "raises":
            raise RuntimeError("no such device")
        return 1000.0

    class Noting(Pretrained):
        def make(self, dtype: torch.dtype) -> nn.Module:
            loaded.append(dtype)
            return super().make(dtype)

    ready.free_now, source_of = free_now, ready.source_of
    ready.source_of = lambda model, inputs: Noting(model)
    try:
        smp.auto(folder, adamw, batch=SAMPLES, seq=POSITIONS, file=file)
    except RuntimeError as error:
        return str(error), bool(loaded) or smp.is_initialized()
    finally:
        ready.free_now, ready.source_of = kept, source_of
    return "nothing", True


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shrinks", r"global_rank 1: 0.977 KiB are free on cpu of .* now, and the plan needs .*iB; "
                    r"nothing was loaded"),
        ("raises", "failed on global_rank 1: no such device"),
    ],
)  # fmt: skip
def test_a_device_that_vanishes_after_the_plan_ends_all_ranks(
    pool: Pool, tmp_path: Path, how: str, words: str
) -> None:
    save(tmp_path / "model", "gptj")
    file = str(tmp_path / "auto.json")
    for text, goes_on in pool.run(2, shrinking, str(tmp_path / "model"), file, how):
        assert re.search(words, text), text
        assert not goes_on


def test_a_plan_for_another_run_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder, file = str(tmp_path / "model"), str(tmp_path / "auto.json")
    save(tmp_path / "model", "gptj")
    pool.run(2, pretrained, folder, {"file": file, "config": {"microbatches": 4}})
    given = {"seq": POSITIONS, "plan": file}
    fewer = pool.run(1, refusals, [(folder, given)])[0][0]
    assert re.search(r"was made for num_ranks=2, and this run has 1; leave plan= out", fewer)
    changes = ({"seq": 8}, {"batch": 4}, {"config": {"microbatches": 8}}, {"memory": 1000})
    for texts in pool.run(2, refusals, [(folder, {**given, **change}) for change in changes]):
        assert "was made for seq=16, and this run has 8" in texts[0]
        assert "was made for batch=8, and this run has 4" in texts[1]
        assert "was made without {'microbatches': 8} of config=" in texts[2]
        assert re.search("needs .*iB, more than memory=", texts[3])
