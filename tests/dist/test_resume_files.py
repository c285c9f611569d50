"""Whole models, sharded folders as public scripts read them, and saves in the background."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.checkpoint import exporting, huggingface, manifest, resharding
from smp.v1.sharded_checkpoint import get_full_state_dict_from_sharded_data_parallel_checkpoint
from tests.dist.pool import Pool
from tests.dist.processes import launch
from tests.dist.resume_training import BEFORE, CASE, Job, make, state_of
from tests.samples import part_of

WHOLE = (
    Job(1, 1, 1, "none", "fp32"),
    Job(2, 2, 1, "none", "fp32"),
    Job(2, 1, 2, "sdp2", "bf16"),
    Job(1, 1, 2, "state", "fp32"),
)
NAMES = ("pytorch_model.bin", "model.safetensors")


# ---- whole models ----------------------------------------------------------------------


def save_whole(rank: int, job: Job, folder: str, names: tuple[str, ...]) -> Any:
    """Two steps, then the whole model in files; counts what the first rank had at a time."""
    import smp
    from smp.checkpoint import gathering

    model, optimizer, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    most = [0]
    gathered = gathering.Gatherer._gathered

    def counted(self: Any, name: str, receivers: Any) -> Tensor | None:
        most[0] = max(most[0], len(self._here))
        return gathered(self, name, receivers)

    gathering.Gatherer._gathered = counted  # type: ignore[method-assign]
    try:
        for name in names:
            smp.save_checkpoint(
                folder, name, partial=False, model=model, user_content={"name": name}
            )
    finally:
        gathering.Gatherer._gathered = gathered  # type: ignore[method-assign]
    return model.state_dict(), most[0]


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translates a state to the names of the Hugging Face model."""
    from smp.nn import huggingface as families

    translate = getattr(families, CASE).translate_state_dict_to_hf_gpt2
    translated: dict[str, Tensor] = translate(state)
    return translated


@pytest.mark.parametrize("job", WHOLE, ids=str)
def test_whole_models_are_those_of_hugging_face(pool: Pool, tmp_path: Path, job: Job) -> None:
    from transformers import AutoModelForCausalLM

    from tests.reference.split_families import make_split_family

    config = make_split_family(CASE, torch.float32).config
    [(state, most), *_] = pool.run(job.world_size, save_whole, job, str(tmp_path), NAMES)
    assert most <= 4, f"the first rank had {most} tensors at a time"
    expected = plain_names(state)
    for name in NAMES:
        folder = tmp_path / f"as {name}"
        folder.mkdir()
        (tmp_path / name).rename(folder / name)
        config.save_pretrained(folder)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype="auto"
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        loaded = model.state_dict()
        dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
        for key, tensor in loaded.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[key]), f"{name}: {key}"
    assert not list(tmp_path.glob(".*writing*"))


def resume_whole(
    rank: int, job: Job, folder: str, tag: str | None, early: bool
) -> tuple[Any, dict[str, Tensor]]:
    """Loads before the first step, or after it."""
    import smp

    model, _, train = make(job, seed=2)
    if early:
        content = smp.resume_from_checkpoint(folder, tag=tag, partial=False, load_optimizer=False)
        seen = {}

        def look(*_: Any) -> None:
            seen.update({name: t.clone() for name, t in model.state_dict().items()})

        model.register_post_partition_hook(look)
        train(0)
        return content, seen
    train(0)
    content = smp.resume_from_checkpoint(folder, tag=tag, partial=False, load_optimizer=False)
    state: dict[str, Tensor] = model.state_dict()
    return content, state


def write_forms(folder: Path) -> dict[str, Tensor]:
    """The same weights in every form that is known."""
    from tests.reference.split_families import make_split_family

    torch.manual_seed(7)
    model = make_split_family(CASE, torch.float32)
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    assert (folder / "sharded" / "model.safetensors.index.json").is_file()
    for name in ("plain", "sharded_bin"):
        (folder / name).mkdir()
    state = model.state_dict()
    torch.save(state, folder / "plain" / "fullmodel.pt")
    keys = list(state)
    halves = {"a.bin": keys[::2], "b.bin": keys[1::2]}
    for name, own in halves.items():
        torch.save({key: state[key] for key in own}, folder / "sharded_bin" / name)
    index = {"weight_map": {key: name for name, own in halves.items() for key in own}}
    (folder / "sharded_bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


FORMS = {
    "plain": "fullmodel.pt",
    "single": "pytorch_model.bin",  # what the Trainer asks for; there is model.safetensors
    "sharded": "pytorch_model.bin",
    "sharded_bin": None,
}


@pytest.mark.sample
def test_whole_files_load_into_every_layout(pool: Pool, tmp_path: Path) -> None:
    expected = write_forms(tmp_path)
    jobs = (Job(2, 1, 2, "sdp2", "fp32", delayed=True), Job(1, 2, 1, "none", "fp32"))
    for folder, tag in part_of(list(FORMS.items()), 2):
        job = jobs[list(FORMS).index(folder) % 2]
        for early in (True, False):
            arguments = (str(tmp_path / folder), tag, early)
            for content, state in pool.run(job.world_size, resume_whole, job, *arguments):
                assert content == {}
                actual = plain_names(state)
                for key, tensor in expected.items():
                    assert torch.equal(actual[key], tensor), f"{folder}: {key}"


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("their."): value for key, value in state.items()}


def resume_renamed(rank: int, folder: str) -> tuple[str, bool]:
    import smp

    model, _, _ = make(Job(1, 1, 2, "none", "fp32"), seed=2)
    text = ""
    try:
        smp.resume_from_checkpoint(folder, "w.pt", partial=False)
    except RuntimeError as error:
        text = str(error)
    smp.resume_from_checkpoint(folder, "w.pt", partial=False, translate_function=renamed)
    saved = torch.load(f"{folder}/w.pt")
    return text, all(torch.equal(saved[f"their.{k}"], t) for k, t in model.state_dict().items())


def test_translate_function(pool: Pool, tmp_path: Path) -> None:
    [(state, _)] = pool.run(1, save_whole, Job(1, 1, 1, "none", "fp32"), str(tmp_path), ())
    torch.save({f"their.{key}": value for key, value in state.items()}, tmp_path / "w.pt")
    for text, is_equal in pool.run(2, resume_renamed, str(tmp_path)):
        assert "translate_function" in text and "missing keys" in text
        assert is_equal


# ---- sharded folders, as public scripts read them --------------------------------------


def save_sharded(rank: int, job: Job, folder: str) -> dict[str, Tensor]:
    import smp

    model, optimizer, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    smp.save_checkpoint(folder, "s", model=model, optimizer=optimizer, user_content={"a": 1})
    masters = {}
    with model.whole_parameters():
        masters = {n: p.detach().float().clone() for n, p in model.local_named_parameters()}
    return masters


def merged(folder: Path, degree: int) -> dict[str, Tensor]:
    """Joins a sharded folder as scripts do.

    The flat masters of all ranks are joined parameter by parameter, in the order of their groups.
    """
    name = (folder / "newest").read_text()
    assert name == "s_partial"
    load = lambda file: torch.load(folder / name / file, map_location="cpu")  # noqa: E731
    content = load("user_content.pt")
    module = load("model_0.pt")["module"]
    ranks = [load(f"optimizer_{i}.pt") for i in range(degree)]
    counts = ranks[0]["partition_count"]
    assert (max(counts) if isinstance(counts, list) else counts) == degree
    flats = [torch.cat(rank["fp32_flat_groups"]) for rank in ranks]
    whole = {key: module[key].float() for key in content["buffer_names"]}
    offset = 0
    for shapes in content["param_shapes"]:
        for key, shape in shapes.items():
            part = -(-shape.numel() // degree)
            pieces = [flat.narrow(0, offset, part) for flat in flats]
            whole[key] = torch.cat(pieces).narrow(0, 0, shape.numel()).view(shape)
            offset += part
    assert offset == flats[0].numel()
    return whole


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_scripts_merge_sharded_folders(pool: Pool, tmp_path: Path, precision: str) -> None:
    job = Job(1, 1, 4, "sdp2", precision)
    [expected, *_] = pool.run(4, save_sharded, job, str(tmp_path))
    whole = merged(tmp_path, 2)
    ours = get_full_state_dict_from_sharded_data_parallel_checkpoint(tmp_path)
    assert all(torch.equal(ours[name], tensor) for name, tensor in whole.items())
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, tensor in expected.items():
        assert whole[name].dtype == torch.float32
        assert torch.equal(whole[name].to(dtype).float(), tensor), name
    files = {path.name for path in (tmp_path / "s_partial").iterdir()}
    assert {"model_0.pt", "optimizer_0.pt", "optimizer_1.pt"} <= files
    assert "optimizer_2.pt" not in files and "model_1.pt" not in files


# ---- without a job ---------------------------------------------------------------------


def save_plain(rank: int, job: Job, folder: str) -> Any:
    import smp

    model, optimizer, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    smp.save_checkpoint(folder, "p", model=model, optimizer=optimizer)
    return state_of(model, optimizer)


@pytest.mark.sample(keep=0)
def test_folders_that_were_written_anew_load(pool: Pool, tmp_path: Path) -> None:
    from tests.dist.test_resume import check_equal

    [expected, *_] = pool.run(4, save_plain, Job(1, 2, 2, "state", "bf16"), str(tmp_path))
    resharding.reshard(tmp_path / "p_partial", tmp_path / "again_partial", num_parts=3)
    for job in (Job(2, 1, 1, "none", "bf16"), Job(1, 1, 2, "sdp2", "bf16")):
        for [state] in pool.run(2, look, job, str(tmp_path), ("again",)):
            check_equal(str(job), expected, state)
    check_exported(tmp_path, expected.model)


def test_export_takes_masters_where_nothing_else_was_saved(pool: Pool, tmp_path: Path) -> None:
    [expected, *_] = pool.run(2, save_plain, Job(1, 1, 2, "sdp2", "bf16"), str(tmp_path))
    entries = manifest.read(tmp_path / "p_partial").entries
    assert any(name.startswith("master/") for name in entries)
    assert not any(name.startswith("model/") and name.endswith("weight") for name in entries)
    check_exported(tmp_path, expected.model)


def check_exported(folder: Path, model: dict[str, Tensor]) -> None:
    """Checks that ``smp ckpt export`` makes the model's files for transformers."""
    from transformers import AutoConfig

    exporting.export(folder / "p_partial", folder / "out")
    state = huggingface.open_weights(folder / "out" / "model.safetensors")
    names = plain_names(model)
    assert set(state) == set(names) - {"lm_head.weight"}
    for name, tensor in state.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, names[name]), name
    assert AutoConfig.from_pretrained(folder / "out").model_type == CASE


# ---- in the background -----------------------------------------------------------------


def save_behind(rank: int, job: Job, folder: str) -> tuple[Any, Any, list[Any]]:
    """Trains on while the writer waits, and saves again.

    Copies of the optimizer's state begin when the update waits for them.
    """
    import smp
    from smp.checkpoint import archive, staging

    model, optimizer, train = make(job, seed=1)
    for step in range(BEFORE):
        train(step)
    held, write = threading.Event(), archive.write

    def late(*args: Any) -> Any:
        held.wait(60)
        return write(*args)

    make_copies, wait_for_copies = staging.LaterCopies.make, staging.LaterCopies.wait
    later_bytes, asked = staging._LATER_BYTES, threading.Event()
    num_later: list[int] = []

    def make_late(copies: staging.LaterCopies) -> None:
        num_later.append(len(copies._pairs))
        asked.wait(60)
        make_copies(copies)

    def wait(copies: staging.LaterCopies) -> None:
        asked.set()
        wait_for_copies(copies)

    archive.write = late  # type: ignore[assignment]
    staging.LaterCopies.make = make_late  # type: ignore[method-assign]
    staging.LaterCopies.wait = wait  # type: ignore[method-assign]
    staging._LATER_BYTES = 0
    try:
        at = state_of(model, optimizer)
        handle = smp.save_checkpoint(folder, "b", model=model, optimizer=optimizer, blocking=False)
        facts = [handle.done(), handle.progress()]
        has_waited = [asked.is_set()]
        train(BEFORE)
        has_waited.append(asked.is_set())
        facts += [(Path(folder) / "newest").exists(), num_later[0] > 0, has_waited]
        held.set()
        handle.wait()
        facts += [handle.done(), handle.progress(), (Path(folder) / "newest").read_text()]
        smp.save_checkpoint(folder, "c", model=model, optimizer=optimizer, blocking=False)
        later = state_of(model, optimizer)
        smp.shutdown()  # waits
        facts.append((Path(folder) / "newest").read_text())
    finally:
        archive.write = write
        staging.LaterCopies.make = make_copies  # type: ignore[method-assign]
        staging.LaterCopies.wait = wait_for_copies  # type: ignore[method-assign]
        staging._LATER_BYTES = later_bytes
    return at, later, facts


SAVES_AT_ITS_END = """
import sys, time
import torch
import smp
from smp.checkpoint import archive
write = archive.write
def late(*arguments, **options):
    time.sleep(0.5)  # the script ends meanwhile
    return write(*arguments, **options)
archive.write = late
smp.init({"ddp": True})
model = smp.DistributedModel(torch.nn.Linear(4, 4))
smp.save_checkpoint(sys.argv[1], tag="last", model=model, blocking=False)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_end_of_a_script_waits_for_a_save_in_the_background(
    tmp_path: Path, num_ranks: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVES_AT_ITS_END)
    words = ["-m", "smp_cli", "run", "-n", str(num_ranks), str(script), str(tmp_path / "saved")]
    job = launch([sys.executable, *words])
    assert job.returncode == 0, job.stdout
    assert (tmp_path / "saved" / "newest").read_text().startswith("last"), job.stdout


def look(rank: int, job: Job, folder: str, tags: tuple[str, ...]) -> list[Any]:
    import smp

    model, optimizer, train = make(job, seed=2)
    train(0)
    states = []
    for tag in tags:
        smp.resume_from_checkpoint(folder, tag)
        states.append(state_of(model, optimizer))
    return states


@pytest.mark.parametrize(
    "job", (Job(1, 2, 2, "state", "bf16"), Job(2, 1, 2, "sdp2", "fp32")), ids=str
)
def test_saves_in_the_background_hold_the_state_of_their_call(
    pool: Pool, tmp_path: Path, job: Job
) -> None:
    from tests.dist.test_resume import check_equal

    results = pool.run(4, save_behind, job, str(tmp_path))
    for _, _, (done, progress, has_newest, were_late, has_waited, *after) in results:
        assert (done, progress, has_newest) == (False, 0.0, False)
        assert were_late and has_waited == [False, True], (
            "the update has to wait for the copies of its state"
        )
        assert after == [True, 1.0, "b_partial", "c_partial"]
    [[first, second], *_] = pool.run(
        2, look, Job(2, 1, 1, "none", job.precision), str(tmp_path), ("b", "c")
    )
    check_equal("b", results[0][0], first)
    check_equal("c", results[0][1], second)


def fail_behind(rank: int, folder: str, blocking: bool) -> tuple[str, str]:
    """Rank 1 cannot write, as with a full disk."""
    import smp
    from smp.checkpoint import archive

    model, optimizer, train = make(Job(1, 1, 2, "state", "fp32"), seed=1)
    train(0)
    smp.save_checkpoint(folder, "good", model=model, optimizer=optimizer)
    write = archive.write

    def full(*args: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    archive.write = full  # type: ignore[assignment]
    try:
        handle = smp.save_checkpoint(
            folder, "bad", model=model, optimizer=optimizer, blocking=blocking
        )
        handle.wait()
    except RuntimeError as error:
        text = str(error)
    finally:
        archive.write = write
    train(1)  # the job goes on
    return text, (Path(folder) / "newest").read_text()


@pytest.mark.parametrize("blocking", (True, False))
def test_a_full_disk_is_an_error_of_all(pool: Pool, tmp_path: Path, blocking: bool) -> None:
    for text, newest in pool.run(2, fail_behind, str(tmp_path), blocking):
        assert "No space left" in text and "global_rank 1" in text or "first rank" in text
        assert newest == "good_partial"
    assert not (tmp_path / "bad_partial").exists()
