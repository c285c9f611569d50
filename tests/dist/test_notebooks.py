"""``smp.launch`` in notebooks, which run without a browser, and the notebooks of the examples.

Skipped without nbclient and ipykernel, which environments of `requirements/test.txt` have.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dist.processes import REPO
from tests.dist.test_launch import environment, is_alive
from tests.patience import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None
            for name in ("nbclient", "ipykernel", "cloudpickle")
        ),
        reason="nbclient, ipykernel or cloudpickle is missing; see requirements/test.txt",
    ),
]

FIRST = """
import os, time
import smp
from tests.harness import Layers, own_samples

@smp.step
def step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

class Own(Layers):
    pass

def main(how):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Own().double())
    loss = step(model, own_samples(0)).reduce_mean().item()
    print(f"{how} {smp.rank()} {os.getpid()}", flush=True)
    if how == "raises" and smp.rank() == 1:
        raise ValueError("the data end here")
    if how == "dies" and smp.rank() == 1:
        os._exit(3)
    while how != "ends":
        if how == "dies":
            time.sleep(0.1)  # outside of smp, where nothing notices the other rank
        else:
            step(model, own_samples(0))
    return loss
"""
EXAMPLES = sorted((REPO / "examples" / "notebooks").glob("*.ipynb"))


class Kernel:
    """A kernel, and the cells that it has run."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.pid: int = client.km.provisioner.pid

    def run(self, source: str) -> Any:
        """Runs a cell; returns it with its outputs."""
        import nbformat

        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        return self._client.execute_cell(cell, len(self._client.nb.cells) - 1)


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    import nbformat
    from nbclient import NotebookClient

    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=PATIENCE_S,
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel(env=environment()):
        yield Kernel(client)


def said(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def result(cell: Any) -> float:
    assert not error(cell), error(cell)
    (data,) = (out.data for out in cell.outputs if out.output_type == "execute_result")
    return float(data["text/plain"])


def error(cell: Any) -> str:
    errors = [out for out in cell.outputs if out.output_type == "error"]
    return "\n".join(f"{out.ename}: {out.evalue}" for out in errors)


def pids_in(text: str, how: str) -> dict[int, int]:
    """Processes by rank; what ranks print at the same time may lie in one line."""
    return {int(rank): int(pid) for rank, pid in re.findall(rf"{how} (\d) (\d+)", text)}


@pytest.mark.sample(keep=0)
def test_a_kernel_is_rank_0_and_outlives_its_ranks(tmp_path: Path) -> None:
    from tests.harness import Layers, samples_of

    expected = float(Layers().double()(samples_of(0)).square().mean().detach())
    with kernel(tmp_path) as own:
        assert not error(own.run(FIRST))
        for _ in range(2):  # a second run of a cell
            cell = own.run('smp.launch(main, 2, "ends")')
            assert result(cell) == pytest.approx(expected, rel=1e-12)
            assert f"ends 0 {own.pid}" in said(cell)
            assert "[1] ends 1 " in said(cell)
        cell = own.run('smp.launch(main, 2, "raises")')
        assert "RuntimeError: smp.launch: rank 1 exited with status 1" in error(cell)
        assert "the data end here" in error(cell)
        cell = own.run('smp.launch(main, 2, "dies")')
        assert "RuntimeError: smp.launch: rank 1 exited with status 3" in error(cell)

        class Interrupting(threading.Thread):
            """Interrupts the kernel, as its manager does, when a file is there."""

            def run(self) -> None:
                wait_until((tmp_path / "runs").exists, lambda: "the cell does not run")
                os.killpg(os.getpgid(own.pid), signal.SIGINT)

        thread = Interrupting()
        thread.start()
        cell = own.run(
            "def loops():\n"
            "    main_step = step\n"
            '    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})\n'
            "    model = smp.DistributedModel(Own().double())\n"
            '    print(f"loops {smp.rank()} {os.getpid()}", flush=True)\n'
            "    for number in range(10**9):\n"
            "        main_step(model, own_samples(0))\n"
            "        if number == 3 and smp.rank() == 1:\n"
            '            open("runs", "w").close()\n'
            "smp.launch(loops, 2)"
        )
        thread.join()
        assert error(cell).startswith("KeyboardInterrupt")
        pids = pids_in(said(cell), "loops")
        wait_until(lambda: not is_alive(pids[1]), lambda: said(cell))
        assert pids[0] == own.pid and is_alive(own.pid)
        assert result(own.run('smp.launch(main, 2, "ends")')) == pytest.approx(expected, rel=1e-12)


def test_a_function_with_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with kernel(tmp_path) as own:
        cell = own.run(
            "import smp, threading\nlock = threading.Lock()\n"
            "def main():\n    return lock\n"
            "smp.launch(main, 2)"
        )
        assert "'main' refers to something that cannot be sent to other processes" in error(cell)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_notebooks_of_the_examples_run_and_are_kept_without_output(
    path: Path, tmp_path: Path
) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with kernel(tmp_path) as own:
        text = ""
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None
                ran = own.run(cell.source)
                assert not error(ran), error(ran)
                text += said(ran)
    assert "smp: 2 ranks on 1 host" in text


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in EXAMPLES] == ["finetune_gptj", "look_at_a_pipeline"]
