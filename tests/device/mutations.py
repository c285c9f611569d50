"""Leaves waits, records and kept tensors out of smp one by one, to see what the late device finds.

Usage: ``python -m tests.device.mutations [--folder F] [name ...]`` in the root of the repository,
with the build's environment active. Each fault is put behind a switch into a copy of the sources,
which is built once. tests/dist/test_on_late.py runs without a fault, then with each. The tool
prints a table, and ends with 1 if a fault whose ``is_found`` is true is not found, or the reverse.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.conftest import REPO
from tests.mutation import Mutation, mutate, without

TIMEOUT_S = 300.0
_SEEDS = (1, 2, 3)


def _instead(text: str, value: str) -> tuple[str, str]:
    """Returns the change to a text of an expression, which has another value with the fault."""
    return text, f"(@ ? {value} : {text})"


_COPIES = "csrc/memory/copy_stream.h"
_MARKS = "csrc/memory/mark.cpp"
_OFFLOAD = "csrc/memory/activation_store.cpp"
_WORK = "csrc/comm/c10d_work.cpp"
_GATHERS = "csrc/parameters/gather_group.cpp"
_MOMENTS = "python/smp/optim/host_moments.py"
_ROUND = "csrc/gradients/reduction_round.cpp"

MUTATIONS = (
    Mutation(
        "copies follow no caller", _COPIES, (without("Mark::record(callers()).block(*stream_);"),)
    ),
    Mutation(
        "copies wait for no mark",
        _COPIES,
        (
            (
                "until.block(*stream_);\n    const c10::StreamGuard",
                "if (!@) until.block(*stream_);\n    const c10::StreamGuard",
            ),
        ),
    ),
    Mutation(
        "copies have no end",
        _COPIES,
        (
            (
                "copy();\n    return Mark::record(*stream_);",
                "copy();\n    return @ ? Mark::none() : Mark::record(*stream_);",
            ),
        ),
    ),
    Mutation(
        "copies to the device have no end",
        _COPIES,
        (("copy();\n    return end();", "copy();\n    return @ ? Mark::none() : end();"),),
    ),
    Mutation(
        "copies keep no tensor",
        _COPIES,
        (
            (
                "if (!stream_) return;\n    c10::impl::VirtualGuardImpl(device_.type())",
                "if (!stream_ || @) return;\n    c10::impl::VirtualGuardImpl(device_.type())",
            ),
        ),
    ),
    Mutation(
        "results have no mark",
        _MARKS,
        (without("result.mark = Mark::record(*result.stream);"),),
        is_found=False,
        why_not="what reads a result on its rank does so on the stream that made it",
    ),
    Mutation("users do not wait", _MARKS, (without("mark.block(stream);"),)),
    Mutation(
        "users record no stream",
        _MARKS,
        (("if (!data.is_cpu()) {", "if (!@ && !data.is_cpu()) {"),),
    ),
    Mutation(
        "messages leave before their copy",
        "csrc/lanes/host_lane.cpp",
        (
            (
                "posted.end = posted.payload.mark;",
                "posted.end = posted.payload.mark; if (@) posted.payload.mark = Mark::none();",
            ),
        ),
    ),
    Mutation(
        "tensors that may be written to are not copied",
        "csrc/lanes/host_lane.cpp",
        (("own_plain_tensor(source, is_stable);", "own_plain_tensor(source, is_stable || @);"),),
    ),
    Mutation(
        "tensors for groups that may be written to are not copied",
        "csrc/lanes/nccl_lane.cpp",
        (("own_plain_tensor(source, is_stable);", "own_plain_tensor(source, is_stable || @);"),),
        is_found=False,
        why_not="their copies are over before the next microbatch writes",
    ),
    Mutation(
        "streams follow no copy of a group",
        "csrc/lanes/group_copies.cpp",
        (without('SMP_ASSERT(work_->order_stream(), "an operation without a stream");'),),
    ),
    Mutation(
        "tensors are sent on the current stream",
        "csrc/pipeline/tensor_directory.cpp",
        (("guard(made.stream);", "guard(@ ? std::nullopt : made.stream);"),),
        is_found=False,
        why_not="messages are handled on the stream that made the tensors",
    ),
    Mutation(
        "messages are handled on the default stream",
        "csrc/pipeline/steps.cpp",
        (_instead("parts_.scheduler.stream()", "std::optional<c10::Stream>()"),),
    ),
    Mutation(
        "bodies run on the default stream",
        "csrc/pipeline/scheduler.cpp",
        (("place(stream());", "place(@ ? std::optional<c10::Stream>() : stream());"),),
    ),
    Mutation(
        "offloaded tensors are not kept",
        _OFFLOAD,
        (("if (tensors.empty() ||", "if (@ || tensors.empty() ||"),),
    ),
    Mutation(
        "offloaded tensors are freed before their copy",
        _OFFLOAD,
        (without("to_host_.let_caller_wait(leaving_.front().copied);"),),
        is_found=False,
        why_not="more tensors have to leave at a time than these layouts have",
    ),
    Mutation(
        "loads do not wait for the copy to the host",
        _OFFLOAD,
        (("item.left, [&]", "(@ ? Mark::none() : item.left), [&]"),),
    ),
    Mutation(
        "loaded tensors are used at once",
        _OFFLOAD,
        (
            (
                "to_device_.let_caller_wait(item->returned);\n    item->was_used",
                "if (!@) to_device_.let_caller_wait(item->returned);\n    item->was_used",
            ),
        ),
    ),
    Mutation(
        "collectives keep no tensor",
        _WORK,
        (
            (
                "C10dWork(std::move(shared), std::move(call), std::move(inner)),\n"
                "        tensors_(std::move(tensors)) {}",
                "C10dWork(std::move(shared), std::move(call), std::move(inner)),\n"
                "        tensors_(@ ? std::vector<at::Tensor>() : std::move(tensors)) {}",
            ),
        ),
        is_found=False,
        why_not="process groups keep the tensors of what is not waited for",
    ),
    Mutation(
        "streams follow no collective", _WORK, (without("inner_->wait();  // of the stream"),)
    ),
    Mutation(
        "a sum of gradients is not followed",
        _ROUND,
        (
            (
                "comm::follow(*work, groups_.wait_options(), bucket.group(), what)",
                "if (!@) comm::follow(*work, groups_.wait_options(), bucket.group(), what)",
            ),
        ),
    ),
    Mutation(
        "an early sum of gradients is not followed",
        _ROUND,
        (
            (
                "comm::follow(*bucket.work(), groups_",
                "if (!@) comm::follow(*bucket.work(), groups_",
            ),
        ),
        is_found=False,
        why_not="the end of the step follows the sum as well",
    ),
    Mutation(
        "updated parameters are not followed",
        "csrc/parameters/flat_gathers.cpp",
        (
            (
                "comm::follow(*work, wait_, *shard_,",
                "if (!@) comm::follow(*work, wait_, *shard_,",
            ),
        ),
    ),
    Mutation(
        "gathered units are not followed",
        "csrc/parameters/unit_gather.cpp",
        (without("for (const GatherPtr& gather : gathers_) gather->follow(wait, what_);"),),
    ),
    Mutation(
        "one gathered parameter is not followed",
        "csrc/parameters/parameter_store.cpp",
        (
            (
                "    gather->follow(options_.wait, what);\n  });\n  return parts",
                "    if (!@) gather->follow(options_.wait, what);\n  });\n  return parts",
            ),
        ),
    ),
    Mutation(
        "the first hop of a gather is not followed",
        _GATHERS,
        (_instead("work_->order_stream()", "true"),),
    ),
    Mutation(
        "sums of split modules are not followed",
        "csrc/tensor_parallel/group.cpp",
        (without("comm::follow(work, wait_, on, header.what.data());"),),
    ),
    Mutation(
        "broadcasts are not followed",
        "csrc/comm/broadcast.cpp",
        (
            (
                "follow(*group.broadcast(flat.view(at::kByte), root), wait, group,",
                "const WorkPtr begun = group.broadcast(flat.view(at::kByte), root);\n"
                "    if (!@) follow(*begun, wait, group,",
            ),
        ),
    ),
    Mutation(
        "gradients are added on the stream of the wrapper",
        "csrc/gradients/reducer.cpp",
        (without("hooks_->use_current_stream();"),),
    ),
    Mutation(
        "moments are used before their copy",
        _MOMENTS,
        (("_wait(current, loaded)", "@ or _wait(current, loaded)"),),
    ),
    Mutation(
        "moments leave before their update",
        _MOMENTS,
        (
            (
                "_wait(self._leave, _mark(current))",
                "@ or _wait(self._leave, _mark(current))",
            ),
        ),
    ),
    Mutation(
        "moments come before the former ones have left",
        _MOMENTS,
        (
            (
                "_wait(self._come, left[place - SLOTS])",
                "@ or _wait(self._come, left[place - SLOTS])",
            ),
        ),
    ),
    Mutation(
        "an update does not wait for its moments",
        _MOMENTS,
        (
            (
                "if stream is not None:\n                    stream.sync",
                "if stream is not None and not @:\n                    stream.sync",
            ),
        ),
    ),
    Mutation(
        "a save does not wait for the step",
        "python/smp/checkpoint/staging.py",
        (
            (
                "stream.wait_event(self._marks[device])",
                "@ or stream.wait_event(self._marks[device])",
            ),
        ),
    ),
)


class Outcome(NamedTuple):
    """Names the first test that failed, with its message; empty: all passed."""

    test: str = ""
    message: str = ""


def _switch(mutation: Mutation) -> str:
    if mutation.file.endswith(".py"):
        chosen = '__import__("os").environ.get("SMP_TEST_MUTATION")'
        return f'({chosen} == "{mutation.name}")'
    return f'::smp::testing::is_mutated("{mutation.name}")'


def mutated_sources(root: Path) -> dict[str, str]:
    """Returns the text of each file with faults.

    Raises:
        ValueError: a fault's text is not in its file exactly once.
    """
    sources: dict[str, str] = {}
    for mutation in MUTATIONS:
        source = sources.get(mutation.file) or (root / mutation.file).read_text()
        mutated = mutate(source, mutation, _switch(mutation))
        if mutated is None:
            raise ValueError(f"{mutation.file} has no place for '{mutation.name}', or several")
        sources[mutation.file] = mutated
    return {
        name: text if name.endswith(".py") else f'#include "tests/cpp/device/mutation.h"\n{text}'
        for name, text in sources.items()
    }


def _copy(folder: Path) -> None:
    """Writes the repository's files with all faults into a folder, and builds the extensions."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPO, capture_output=True, check=True).stdout
    subprocess.run(
        ["tar", "-c", "--null", "-T", "-", "-f", str(folder / "files.tar")],
        cwd=REPO, input=files, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "-x", "-f", "files.tar"], cwd=folder, check=True)
    for name, text in mutated_sources(REPO).items():
        (folder / name).write_text(text)
    subprocess.run(
        ["scripts/build.sh", "build/mutated", sys.executable, "--target", "smp_for_python"],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _run(folder: Path, name: str, seed: int) -> Outcome:
    """Runs the tests with a fault; an empty name: with none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "python"),
        "OMP_NUM_THREADS": "1",
        "SMP_SAMPLES": "all",
        "SMP_LATE_SEED": str(seed),
        "SMP_TEST_MUTATION": name,
    }
    try:
        ended = subprocess.run(
            [*command, "tests/dist/test_on_late.py"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome("all", f"not over after {TIMEOUT_S:.0f} s")
    if ended.returncode == 0:
        return Outcome()
    failed = re.search(r"^(?:FAILED|ERROR) \S+\[(.*?)\](?: - (.*))?$", ended.stdout, re.MULTILINE)
    if not failed:
        return Outcome("all", ended.stdout[-2000:] + ended.stderr[-2000:])
    reasons = re.findall(r"^E +(.+)$", ended.stdout, re.MULTILINE)
    return Outcome(failed[1], reasons[0] if reasons else failed[2] or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to run with; default: all")
    parser.add_argument("--folder", type=Path, help="where to build, or where it was built")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        if not (folder / "python" / "smp_late.so").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _copy(folder)
        plain = _run(folder, "", _SEEDS[0])
        if plain.test:
            print(f"without a fault {plain.test} fails: {plain.message}")
            return 2
        chosen = [m for m in MUTATIONS if not arguments.names or m.name in arguments.names]
        num_wrong = 0
        print("| fault | file | found by | runs | what it showed |\n|---|---|---|---|---|")
        for mutation in chosen:
            outcome, runs = Outcome(), 0
            while not outcome.test and runs < len(_SEEDS):
                outcome = _run(folder, mutation.name, _SEEDS[runs])
                runs += 1
            num_wrong += bool(outcome.test) != mutation.is_found
            shown = outcome.message.replace("|", "/")[:160] or mutation.why_not
            cells = (mutation.name, mutation.file, outcome.test or "none", str(runs), shown)
            print("| " + " | ".join(cells) + " |", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
