"""A host is gone, and the ranks of the other one go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import wait_for_ranks
from tests.dist.test_going_on import MANY_STEPS, SCRIPT, Layout, check_as_resumed, words
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import TRANSPORTS, HostRanks
from tests.patience import wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("kills", [True, False], ids=["killed", "cut_off"])
@pytest.mark.parametrize(("host", "transport"), [(0, TRANSPORTS[1]), (1, TRANSPORTS[0])])
def test_the_ranks_of_the_other_host_go_on(
    pool: Pool, tmp_path: Path, host: int, transport: str, kills: bool
) -> None:
    """Ranks that are cut off live, and each side has lost the other: one of them goes on."""
    layout = Layout(pp=2)
    with Network(2) as network:
        ranks = HostRanks(network, pool, ranks_per_host=2, transport=transport)
        meeting = {"SMP_RENDEZVOUS": f"file://{tmp_path}/meeting", "GLOO_SOCKET_IFNAME": "eth0"}
        argv = [*layout.argv(on_failure="shrink"), f"--steps={MANY_STEPS}", "--step-s=0.03"]
        started = ranks.start_script(SCRIPT, argv, env=meeting)
        logs = [started.folder / f"rank{rank}.log" for rank in range(4)]
        wait_until(
            lambda: all(log.exists() and "STEP 3 " in log.read_text() for log in logs),
            lambda: "\n".join(log.read_text() for log in logs if log.exists()),
        )
        network.remove(host)
        if kills:
            for pid in started.pids[2 * host : 2 * host + 2]:
                os.kill(pid, signal.SIGKILL)
        ended = wait_for_ranks(pool, started)
    assert not any(rank.hung for rank in ended), words(ended)
    [resize] = check_as_resumed(pool, tmp_path, layout, ended, MANY_STEPS)
    lost = sorted(resize["lost"])
    assert lost == [2 * host, 2 * host + 1] if kills else lost in ([0, 1], [2, 3])
    assert resize["step"] > 3, "after steps of all"
