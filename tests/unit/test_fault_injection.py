"""`SMP_FAULT`: what it understands, and when it strikes."""

from __future__ import annotations

import time

import pytest

from smp.world.fault_injection import InjectedError, InjectedFault, read_fault


def test_fault_is_read() -> None:
    fault = read_fault({"SMP_FAULT": "rank=1, step=3,kind=slow,microbatch=2,seconds=0.5"})
    assert fault == InjectedFault(1, 3, "slow", microbatch=2, seconds=0.5)
    assert read_fault({}) is None


@pytest.mark.parametrize(
    "text",
    [
        "rank=1,step=3",
        "rank=1,step=3,kind=explode",
        "rank=1,kind=kill",
        "rank=x,step=3,kind=kill",
        "rank=1,step=3,kind=kill,where=here",
        "rank=1,step=3,kind=slow,seconds=long",
        "kill",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SMP_FAULT"):
        read_fault({"SMP_FAULT": text})


def test_fault_is_for_one_attempt() -> None:
    text = "rank=1,step=3,kind=kill"
    assert read_fault({"SMP_FAULT": text, "TORCHELASTIC_RESTART_COUNT": "1"}) is None
    assert read_fault({"SMP_FAULT": text, "TORCHELASTIC_RESTART_COUNT": "0"}) is not None
    assert read_fault({"SMP_FAULT": text + ",attempt=1", "SMP_RESTART_COUNT": "1"}) is not None


def test_fault_strikes_its_rank_step_and_microbatch_only() -> None:
    fault = InjectedFault(1, 3, "raise", microbatch=2)
    for place in ((0, 3, 2), (1, 2, 2), (1, 3, None), (1, 3, 1)):
        fault.strike(*place)
    with pytest.raises(InjectedError, match="rank 1 to raise in step 3"):
        fault.strike(1, 3, 2)


def test_exit_and_slow() -> None:
    with pytest.raises(SystemExit) as end:
        InjectedFault(0, 0, "exit", code=9).strike(0, 0)
    assert end.value.code == 9
    begin = time.monotonic()
    InjectedFault(0, 0, "slow", seconds=0.2).strike(0, 0)
    assert time.monotonic() - begin >= 0.2
