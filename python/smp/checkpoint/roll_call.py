"""All ranks meet before something is saved or loaded, or all of them hear why not."""

from __future__ import annotations

from typing import Any

from smp import _C, host_objects, runtime

_MARK = "_smp_roll_call"
#: Errors that stay what they are on the other ranks.
_KINDS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}


def roll_call(what: str, call: dict[str, Any], snippet: str, own: Any = None) -> list[Any]:
    """Waits until all ranks have made the same call. Collective over all ranks.

    Ranks that compute are waited for; when every rank waits, those here for the others and those
    elsewhere for this one, the watch for deadlocks ends all waits after a few seconds, and so does
    a rank that ends.

    Args:
        what: name of the public function.
        call: arguments that have to be equal on all ranks, and ``error``: why this rank cannot, or
            None.
        snippet: how the call stands on all ranks.
        own: for the other ranks.

    Returns:
        ``own`` of all ranks.

    Raises:
        ValueError: on all ranks, if some rank has an error or other arguments.
        PeerFailure: some rank is elsewhere, or has failed.
    """
    current = runtime.current()
    current.check_process(what)
    calls = [{_MARK: what, "call": call, "own": own}]
    if current.exchange is not None:
        packed = host_objects.pack(calls[0])
        try:
            parts = current.exchange.all_gather(current.groups["world"], packed, what)
        except (_C.PeerFailure, RuntimeError) as error:
            if _is_elsewhere(current, error):
                absent = _C.PeerFailure(_advice(what, snippet, str(error)))
                current.report_raised(what, absent)
                raise absent from error
            raise
        calls = [host_objects.unpack(part, current.device) for part in parts]
    with current.reporting(what):
        _check_same_call(what, snippet, calls)
    _compare(what, [other["call"] for other in calls])
    return [other["own"] for other in calls]


def agree(what: str, error: BaseException | None, own: Any = None) -> list[Any]:
    """Goes on if no rank has an error. Collective over all ranks.

    Returns:
        ``own`` of all ranks.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: on all ranks, with the error of the first one
            that has one; RuntimeError for those of other classes.
    """
    current = runtime.current()
    told = [(None if error is None else _kind_and_text(error), own)]
    if current.exchange is not None:
        packed = host_objects.pack(told[0])
        parts = current.exchange.all_gather(current.groups["world"], packed, what)
        told = [host_objects.unpack(part, current.device) for part in parts]
    for rank, (told_error, _) in enumerate(told):
        if told_error is not None:
            kind, text = told_error
            raise _KINDS.get(kind, RuntimeError)(
                f"{_C.rank_prefix()}{what} failed on global_rank {rank}: {text}"
            ) from error
    return [item for _, item in told]


def _kind_and_text(error: BaseException) -> tuple[str, str]:
    kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), "")
    text = str(error).removeprefix(_C.rank_prefix())
    return kind, text if kind else f"{type(error).__name__}: {text}"


def _is_elsewhere(current: runtime.Runtime, error: Exception) -> bool:
    """Did the wait end because ranks were somewhere else?"""
    text = str(error)
    fault = "" if current.board is None else current.board.fault_text() or ""
    return (
        fault.startswith("deadlock")
        or "has left" in fault + text
        or "of the same ranks" in text
        or "timed out" in text
    )


def _advice(what: str, snippet: str, reason: str) -> str:
    return (
        f"{_C.rank_prefix()}{what} was called here, and not on all ranks. Every rank writes or "
        "reads its own part, so all of them have to call it, with the same arguments; not inside "
        f"of `if smp.rank() == 0:` or `if smp.dp_rank() == 0:`, but\n\n    {snippet}\n\n({reason})"
    )


def _check_same_call(what: str, snippet: str, calls: list[Any]) -> None:
    for rank, other in enumerate(calls):
        if not isinstance(other, dict) or _MARK not in other:
            raise RuntimeError(_advice(what, snippet, f"global_rank {rank} is in smp.allgather"))
        if other[_MARK] != what:
            raise RuntimeError(_advice(what, snippet, f"global_rank {rank} is in {other[_MARK]}"))


def _compare(what: str, calls: list[dict[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        if call.get("error") is not None:
            raise ValueError(f"{_C.rank_prefix()}{what}: global_rank {rank}: {call['error']}")
    for rank, call in enumerate(calls):
        for key, value in call.items():
            if value != calls[0][key]:
                raise ValueError(
                    f"{_C.rank_prefix()}{what}: {key} is {calls[0][key]!r} on global_rank 0 and "
                    f"{value!r} on global_rank {rank}; give all ranks the same"
                )
