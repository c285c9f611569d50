"""Settings of every Python test: import paths, one thread per process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Tests send Ctrl-C, which processes ignore that were started in the background of a shell.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Also on a machine with GPUs; tests/gpu asks for them itself.
os.environ.setdefault("SMP_DEVICE", "cpu")

# Seed of the sample that tests/dist/grid runs; the report of each session names it.
os.environ.setdefault("SMP_GRID_SEED", "1")

for path in (str(REPO / "python"), str(REPO)):
    # `pip install .` may have put another copy in site-packages; the tree under
    # test wins unless SMP_TEST_INSTALLED asks for the installed one.
    if path.endswith("python") and os.environ.get("SMP_TEST_INSTALLED"):
        continue
    if path not in sys.path:
        sys.path.insert(0, path)


from tests.absent import ABSENT, SkipsWithoutPackages  # noqa: E402 - from the path above
from tests.dist.pool import Pool  # noqa: E402
from tests.dist.processes import meter_settings  # noqa: E402
from tests.marked import check_named, lacks_marks  # noqa: E402
from tests.progress import Progress  # noqa: E402
from tests.samples import to_run  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes, one pool for the whole session."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def metered_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose processes count their allocations (`benchmarks/allocation_meter.py`)."""
    pool = Pool(meter_settings(tmp_path_factory.mktemp("meter")))
    yield pool
    pool.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "covering(times): of a product of parameters, run a sample that shows each value of each "
        "parameter that many times; SMP_GRID=all runs all",
    )
    config.addinivalue_line(
        "markers",
        "sample(keep): of many cases of one claim, `make test` runs so many, `make test-all` the "
        "others; without keep the test divides its work itself (tests/samples.py)",
    )
    config.addinivalue_line(
        "markers",
        "waits: waits for limits of seconds and for processes that end, and measures how long that "
        "takes; beside other tests, ahead of them",
    )
    config.addinivalue_line(
        "markers",
        "alone: measures a speed, or what is left on the machine; not beside other tests",
    )
    if ABSENT:
        config.pluginmanager.register(SkipsWithoutPackages())
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(reporter))


def pytest_report_header() -> str:
    return f"SMP_GRID_SEED={os.environ['SMP_GRID_SEED']}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if lacks_marks(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that are in no sample, unless the command names single tests."""
    check_named(items)
    if any("::" in argument for argument in config.args):
        return
    chosen = to_run(items)
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]
