"""What failed to load is tried again in time; what killed its process, only with more memory."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadCheckpoint, DeviceFailed, MeshError, NotEnoughMemory
from mesh.processes.attempts import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_LIVES, ROOMIER_MB, Attempts
from mesh.processes.lifecycle import ChildEnding, LoadNeed

PLENTY = 1 << 20
LOAD = LoadNeed("m:0-7", need_mb=2000, free_mb=3000)
KILLED = ChildEnding(-signal.SIGKILL, loading=LOAD)
PASSING = DeviceFailed("It stumbled.", fix="Wait.")


def first_free(attempts: Attempts, name: str, now: float, free_mb: int) -> float:
    """The first second from `now` on at which it may be tried."""
    seconds = int(LONGEST_WAIT_S) + 2
    return next(
        t for t in range(seconds) if attempts.why_not(name, now + t, free_mb) is None
    )  # fmt: skip


def test_what_may_pass_is_given_twice_the_time_after_each_failure() -> None:
    attempts, now, waits = Attempts(), 100.0, []
    for _ in range(9):
        attempts.failed("m", PASSING, now)
        assert attempts.why_not("m", now, PLENTY) is PASSING
        waits.append(first_free(attempts, "m", now, PLENTY))
        now += waits[-1]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert (waits[0], waits[-1]) == (FIRST_WAIT_S, LONGEST_WAIT_S)
    attempts.succeeded("m")
    attempts.failed("m", PASSING, now)
    assert first_free(attempts, "m", now, PLENTY) == FIRST_WAIT_S


def test_a_load_that_found_too_little_memory_waits_no_longer_than_until_there_is_more() -> None:
    attempts, short, now = Attempts(), NotEnoughMemory("It is full.", fix="Wait."), 0.0
    for _ in range(6):
        attempts.failed("m", short, now, 400)
        assert attempts.why_not("m", now + FIRST_WAIT_S - 1, PLENTY, 4000) is short, "not at once"
        now += FIRST_WAIT_S
        assert attempts.why_not("m", now, PLENTY, 400 + ROOMIER_MB) is None
    assert attempts.why_not("m", now, PLENTY, 399 + ROOMIER_MB) is short
    attempts.failed("m", short, now, 4000)
    assert attempts.why_not("m", now + FIRST_WAIT_S, PLENTY, 4000) is short, "that was not enough"
    attempts.failed("m", PASSING, now, 400)
    assert attempts.why_not("m", now + FIRST_WAIT_S, PLENTY, 4000) is PASSING, "nor the reason"


def test_what_will_not_pass_waits_for_somebody_to_say_so() -> None:
    attempts, broken = Attempts(), BadCheckpoint("It is torn.", fix="Copy it again.")
    attempts.failed("m", broken, 0.0)
    assert attempts.why_not("m", 1e9, PLENTY) is broken
    assert attempts.why_not("other", 0.0, 0) is None
    attempts.forget()
    assert attempts.why_not("m", 0.0, 0) is None


def test_a_load_that_was_killed_waits_for_all_the_memory_it_needs_beside_what_there_was() -> None:
    attempts = Attempts()
    error = attempts.died(LOAD, KILLED, 0.0)
    assert isinstance(error, NotEnoughMemory)
    assert "2000 MiB" in error.message
    assert "5000 MiB" in error.message
    assert attempts.why_not(LOAD.name, 1e9, 4999) is error
    assert attempts.why_not(LOAD.name, 1e9, 5000) is None
    assert attempts.why_not(LOAD.name, 1.0, 5000) is error, "nor at once"


def test_the_kernels_word_is_taken_where_there_is_one() -> None:
    by_kernel = ChildEnding(-signal.SIGKILL, loading=LOAD, of_memory=True)
    assert "by the kernel" in Attempts().died(LOAD, by_kernel, 0.0).message
    assert "most likely" in Attempts().died(LOAD, KILLED, 0.0).message
    assert "for lack of memory" in str(by_kernel)
    assert "memory" not in str(KILLED)


@pytest.mark.parametrize(
    "ending",
    [ChildEnding(-signal.SIGSEGV), ChildEnding(1), ChildEnding(-signal.SIGKILL, hung=True)],
)
def test_a_process_that_died_otherwise_of_a_load_is_no_matter_of_memory(
    ending: ChildEnding,
) -> None:
    attempts = Attempts()
    error = attempts.died(LOAD, ending, 0.0)
    assert isinstance(error, DeviceFailed)
    assert first_free(attempts, LOAD.name, 0.0, 0) == FIRST_WAIT_S


@given(st.lists(st.sampled_from(["killed", "crashed", "failed"]), max_size=12))
def test_no_load_costs_more_than_a_few_processes(events: list[str]) -> None:
    attempts, lives, now = Attempts(), 0, 0.0
    last: MeshError | None = None
    for event in events:
        now += 1e6
        if attempts.why_not(LOAD.name, now, PLENTY) is not None:
            break
        if event == "failed":
            attempts.failed(LOAD.name, PASSING, now)
        else:
            lives += 1
            last = attempts.died(LOAD, KILLED if event == "killed" else ChildEnding(1), now)
    assert lives <= MAX_LIVES
    if lives == MAX_LIVES:
        assert attempts.why_not(LOAD.name, 1e12, PLENTY) is not None
        assert last is not None
        attempts.forget()
    assert attempts.why_not(LOAD.name, 1e12, PLENTY) is None
