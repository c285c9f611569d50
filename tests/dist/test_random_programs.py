"""Random module trees with random code on random ranks give the numbers of plain autograd.

``SMP_NUM_PROGRAMS`` sets how many (24 by default, and 240 others in `make test-all`). A failing
program is printed in a form that ``python -m tests.dist.programs`` replays; with ``SMP_SHRINK=1``
hypothesis makes it smaller first, which takes minutes.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.dist.pool import Pool
from tests.dist.programs.language import Program
from tests.dist.programs.running import (
    Record,
    assert_identical,
    compare,
    is_chaotic,
    run_distributed,
    run_plain,
)
from tests.dist.programs.strategy import bundles
from tests.samples import SAMPLES

pytestmark = pytest.mark.sample

NUM_SOME, NUM_OTHERS = 24, 240
DEFAULT = {"some": NUM_SOME, "others": NUM_OTHERS, "all": NUM_SOME + NUM_OTHERS}[SAMPLES]
NUM_PROGRAMS = int(os.environ.get("SMP_NUM_PROGRAMS", str(DEFAULT)))
NUM_FEW = max(20, NUM_PROGRAMS // 10) if NUM_PROGRAMS > NUM_SOME else 6
SHRINK = bool(os.environ.get("SMP_SHRINK"))
# Results of a callee that share memory with each other, and are then written to.
REFUSAL = "results that share memory, and one of them was changed in place"
BUNDLE = 6  # programs per start and end of smp, which cost more than a program


class Seen:
    """Records the programs that a test has run: equal and rejected ones, and instructions."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.equal: set[str] = set()
        self.rejected: set[str] = set()
        self.refused: set[str] = set()
        self.chaotic: set[str] = set()
        self.instructions: Counter[str] = Counter()

    @property
    def enough(self) -> bool:
        return len(self.equal) >= self.wanted

    def news(self, programs: list[Program]) -> dict[str, tuple[Program, Record]]:
        """Programs to run, with what plain autograd says."""
        found = {}
        for program in programs:
            text = program.text()
            if text in self.equal | self.refused | self.chaotic:
                continue
            try:
                found[text] = (program, run_plain(program))
            except RuntimeError:  # e.g. a saved value was changed in place
                self.rejected.add(text)
        return found

    def add(self, text: str, program: Program) -> None:
        self.equal.add(text)
        self.instructions.update(program.instructions())


def over_bundles(seen: Seen, check: Callable[[list[Program]], None], **kinds: bool) -> None:
    """Calls `check` until enough programs were equal; the same ones in every session."""
    # `make test` has run these.
    num_left_out = seen.wanted * NUM_SOME // NUM_OTHERS if SAMPLES == "others" else 0

    @settings(
        # Not all are new and accepted.
        max_examples=10 + num_left_out + seen.wanted * (4 if SHRINK else 1),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(bundles(1, fine=True, **kinds) if SHRINK else bundles(BUNDLE, **kinds))
    def run(programs: list[Program]) -> None:
        nonlocal num_left_out
        if num_left_out > 0:
            num_left_out -= len(programs)
        elif not seen.enough:
            check(programs)

    run()


def delays_of(texts: list[str]) -> int | None:
    """Every other bundle is delayed; which ones and how depends on the programs alone."""
    checksum = zlib.crc32("".join(texts).encode())
    return checksum if checksum % 2 else None


def run_bundle(pool: Pool, texts: list[str], pp: int, delay_seed: int | None) -> Any:
    """[program][rank], None for a program that smp refuses by name.

    A bundle that fails is run again one by one, to say which it was.
    """
    try:
        results = pool.run(pp, run_distributed, texts, delay_seed)
    except AssertionError:
        return [run_alone(pool, text, pp, delay_seed) for text in texts]
    return [[ranks[i] for ranks in results] for i in range(len(texts))]


def run_alone(pool: Pool, text: str, pp: int, delay_seed: int | None) -> Any:
    with naming(text, delay_seed):
        try:
            results: list[Any] = pool.run(pp, run_distributed, [text], delay_seed)
        except AssertionError as error:
            if REFUSAL in str(error):
                return None
            raise
    return [ranks[0] for ranks in results]


class naming:  # noqa: N801  (reads as a statement)
    """Adds to an error how to see it again."""

    def __init__(self, text: str, delay_seed: int | None) -> None:
        self._how = f"python -m tests.dist.programs '{text}' {delay_seed or ''}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self._how)


def check_equal(pool: Pool, seen: Seen, programs: list[Program]) -> None:
    news = seen.news(programs)
    seen.chaotic |= {text for text, (program, plain) in news.items() if is_chaotic(program, plain)}
    news = {text: known for text, known in news.items() if text not in seen.chaotic}
    if not news:
        return
    texts = list(news)
    delay_seed = delays_of(texts)
    results = run_bundle(pool, texts, programs[0].pp, delay_seed)
    for (text, (program, plain)), records in zip(news.items(), results, strict=True):
        if records is None:
            seen.refused.add(text)
            continue
        with naming(text, delay_seed):
            compare(records, plain)
        seen.add(text, program)


def test_random_programs_equal_plain_autograd(pool: Pool) -> None:
    seen = Seen(NUM_PROGRAMS)
    over_bundles(seen, lambda programs: check_equal(pool, seen, programs))
    print(
        f"{len(seen.equal)} programs equal; {len(seen.rejected)} rejected, {len(seen.chaotic)} "
        f"chaotic, {len(seen.refused)} refused; {seen.instructions}"
    )
    assert seen.enough
    assert len(seen.rejected) <= NUM_PROGRAMS // 4, "autograd refuses too much of what is made"
    assert len(seen.refused) <= NUM_PROGRAMS // 20, f"smp refuses too much: {len(seen.refused)}"
    assert len(seen.chaotic) <= NUM_PROGRAMS // 20, "too many are decided by rounding"
    for instruction in ("call", "route", "loop", "branch", "each", "columns_", "call_no_grad"):
        assert seen.instructions[instruction] >= NUM_PROGRAMS // 50, f"too little '{instruction}'"


def test_random_programs_whose_results_change_with_the_data_equal_plain_autograd(
    pool: Pool,
) -> None:
    """Results that are missing, or have fewer rows, as the data tell."""
    seen = Seen(NUM_FEW)

    def check(programs: list[Program]) -> None:
        surprising = [p for p in programs if '["maybe"' in p.text() or '["some"' in p.text()]
        check_equal(pool, seen, surprising)

    over_bundles(seen, check, surprises=True)
    assert seen.enough


def test_random_programs_with_dropout_are_bitwise_equal_whatever_is_late(pool: Pool) -> None:
    seen = Seen(NUM_FEW)

    def check(programs: list[Program]) -> None:
        news = seen.news([p for p in programs if "dropout" in p.instructions()])
        if not news:
            return
        texts, pp = list(news), programs[0].pp
        first, second = (run_bundle(pool, texts, pp, delay_seed) for delay_seed in (1, 2))
        for (text, (program, _)), a, b in zip(news.items(), first, second, strict=True):
            if a is None or b is None:
                assert a is b, "refused only once"
                seen.refused.add(text)
                continue
            with naming(text, 2):
                assert_identical(a, b)
            seen.add(text, program)

    over_bundles(seen, check, dropout=True)
    assert seen.enough
