"""Roll calls: ranks meet before they save, load or join their states, or learn who is absent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import smp._C as _C
from smp.world import host_objects
from smp.world.rank import Rank

_T = TypeVar("_T")
_MARK = "_smp_roll_call"
#: Conditions in scripts that often wrongly guard calls of these groups.
_GUARDS = {
    "mp": "`if smp.rank() == 0:` or, with tensor parallelism, `if smp.dp_rank() == 0:`",
    "rdp_cp": "`if smp.rank() == 0:` or `if smp.rdp_rank() == 0:`",
    "shard": "`if smp.rank() == 0:` or `if smp.rdp_rank() == 0:`",
    "world": "`if smp.rank() == 0:` or `if smp.dp_rank() == 0:`",
}
#: Classes of errors that are the same on the other ranks.
_KINDS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}


def roll_call(
    rank: Rank,
    what: str,
    call: dict[str, Any],
    snippet: str,
    own: Any = None,
    group: str = "world",
) -> list[Any]:
    """Waits until all ranks of a group have made the same call. Collective over the group.

    The call waits for ranks that compute. If every rank waits, some here and some elsewhere, the
    watch for deadlocks ends all waits after a few seconds. A rank that ends does so, too.

    Args:
        rank: calling rank.
        what: name of the public function.
        call: arguments that have to be equal on all ranks, and ``error``: why this rank cannot, or
            None.
        snippet: line of a script that makes the call.
        own: object for the other ranks.
        group: kind of the caller's group.

    Returns:
        ``own`` of all ranks of the group.

    Raises:
        ValueError: on all ranks, if some rank has an error, other arguments or other `Terms`.
        PeerFailure, RuntimeError: some rank makes another call, or has failed.
    """
    rank.check_process(what)
    members = rank.groups[group]
    terms = None if rank.terms_at is None else rank.terms_at(what)
    told = "" if terms is None else terms.words
    calls = [{_MARK: what, "call": call, "own": own, "terms": told}]
    if rank.exchange is not None:
        packed = host_objects.pack(calls[0])
        try:
            parts = rank.exchange.all_gather(members, packed, what)
        except (_C.PeerFailure, RuntimeError) as error:
            if _is_elsewhere(rank, error):
                absent = _C.PeerFailure(_advice(rank, what, snippet, group, str(error)))
                rank.report_raised(what, absent)
                raise absent from error
            raise
        calls = [host_objects.unpack(part, rank.device) for part in parts]
    with rank.reporting(what):
        came = dict(zip(members, calls, strict=True))
        for member, other in came.items():
            is_ours = isinstance(other, dict) and _MARK in other
            where = other[_MARK] if is_ours else "smp.allgather"
            if where != what:
                reason = f"global_rank {member} is in {where}"
                raise RuntimeError(_advice(rank, what, snippet, group, reason))
    _compare(what, {member: other["call"] for member, other in came.items()})
    if terms is not None:
        terms.compare({member: other["terms"] for member, other in came.items() if other["terms"]})
    return [other["own"] for other in calls]


def meet(
    rank: Rank, what: str, groups: Sequence[str], snippet: str, call: dict[str, Any] | None = None
) -> None:
    """Makes a `roll_call` in each group whose ranks hold one state together. Collective over them.

    Groups of one rank are skipped.
    """
    for group in groups:
        if rank.sizes[group] > 1:
            roll_call(rank, what, call or {}, snippet, group=group)


def agree(rank: Rank, what: str, error: BaseException | None, own: Any = None) -> list[Any]:
    """Raises on all ranks if some rank has an error. Collective over all ranks.

    Returns:
        ``own`` of all ranks.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: on all ranks, the error of the first rank
            that has one; RuntimeError for errors of other classes.
    """
    rank.check_process(what)
    told = [(None if error is None else _kind_and_text(error), own)]
    if rank.exchange is not None:
        packed = host_objects.pack(told[0])
        parts = rank.exchange.all_gather(rank.groups["world"], packed, what)
        told = [host_objects.unpack(part, rank.device) for part in parts]
    for member, (told_error, _) in enumerate(told):
        if told_error is not None:
            kind, text = told_error
            raise _KINDS.get(kind, RuntimeError)(
                f"{_C.rank_prefix()}{what} failed on global_rank {member}: {text}"
            ) from error
    return [item for _, item in told]


def together(rank: Rank, what: str, action: Callable[[], _T]) -> _T:
    """Acts on this rank, and returns the result if all ranks could act. Collective over all ranks.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: on all ranks, see `agree`.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    agree(rank, what, error)
    return result


def _kind_and_text(error: BaseException) -> tuple[str, str]:
    kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), "")
    text = str(error).removeprefix(_C.rank_prefix())
    return kind, text if kind else f"{type(error).__name__}: {text}"


def _is_elsewhere(rank: Rank, error: Exception) -> bool:
    """Returns whether a wait ended because ranks were in another call."""
    text = str(error)
    fault = "" if rank.board is None else rank.board.fault_text() or ""
    return (
        fault.startswith("deadlock")
        or "has left" in fault + text
        or "of the same ranks" in text
        or "timed out" in text
    )


def _advice(rank: Rank, what: str, snippet: str, group: str, reason: str) -> str:
    if group == "world":
        where = "on all ranks. Every rank writes or reads its own part, so all of them"
    else:
        members = ", ".join(str(member) for member in rank.groups[group])
        where = f"on all ranks that have a part of the state: global_ranks {members}"
    must = f"{where} have to call it, with the same arguments; not inside of {_GUARDS[group]}"
    return (
        f"{_C.rank_prefix()}{what} was called here, and not {must}, but\n\n    {snippet}\n\n"
        f"({reason})"
    )


def _compare(what: str, calls: dict[int, dict[str, Any]]) -> None:
    """Raises for errors and differing arguments, by global rank."""
    for rank, call in calls.items():
        if call.get("error") is not None:
            raise ValueError(f"{_C.rank_prefix()}{what}: global_rank {rank}: {call['error']}")
    first, expected = next(iter(calls.items()))
    for rank, call in calls.items():
        for key, value in call.items():
            if value != expected[key]:
                raise ValueError(
                    f"{_C.rank_prefix()}{what}: {key} is {expected[key]!r} on global_rank {first} "
                    f"and {value!r} on global_rank {rank}; give all ranks the same"
                )
