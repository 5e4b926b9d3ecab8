"""One malicious member a run, who speaks the real protocol: what the others owe her, and no more.

What she may do to them is bounded (`tests.simulation.members.bounds`), and the bounds are tried:
without the safeguard behind it, each is seen to break.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from mesh.accounts.ledger import Hold, Limit, Resource
from mesh.identity.membership.resolve import Resolver
from mesh.shard.admission import SessionTable
from tests.simulation.members import bounds
from tests.simulation.members.plan import ATTACKS, draw
from tests.simulation.members.run import run
from tests.simulation.repeating import repeats, same_in_other_processes, unbroken

MODULE = "tests.simulation.members"
QUICK = 30
MANY = 2000
BLOCK = 250


@pytest.fixture(autouse=True)
def _loop_is_never_blocked() -> None:
    """Not looked at here: what a node does on threads is done in place in a simulation."""


def check(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Run them all; what happened in them, and the most that anything took."""
    tally: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for report in unbroken(MODULE, run, seeds):
        tally += report.tally
        most |= report.most
    return tally, most


def test_one_malicious_member_stalls_nobody_fills_nothing_and_takes_nothing_over() -> None:
    tally, _ = check(range(QUICK))
    # What makes the above worth something: she did all she can, and the others went on.
    assert set(ATTACKS) <= set(tally)
    assert tally["answered"] > 2 * QUICK


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(QUICK, MANY + QUICK, BLOCK))
def test_thousands_of_runs_with_a_malicious_member(first: int) -> None:
    tally, most = check(range(first, first + BLOCK))
    print(f"\nseeds {first}-{first + BLOCK - 1}: {dict(sorted(tally.items()))}\n{dict(most)}")


async def _on_the_loop(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return work(*arguments, **named)


def _as_good_as_none(**limits: float) -> AbstractContextManager[Any]:
    return mock.patch.multiple(bounds, **limits)


def _unlimited(*resources: Resource) -> AbstractContextManager[Any]:
    return mock.patch.dict(bounds.DAEMON, {each: Limit() for each in resources})


def _anybody_first_come(table: SessionTable, owner: Any, now: float) -> list[Any]:
    """Admission without shares: whoever holds the streams keeps them."""
    if table.active >= bounds.SESSIONS:
        table.accounts.require(owner, Resource.STREAMS, 1)
    return []


@contextlib.contextmanager
def _no_leases() -> Iterator[None]:
    with (
        mock.patch.object(SessionTable, "overdue", return_value=[]),
        mock.patch.object(SessionTable, "_for_a_stream", _anybody_first_come),
    ):
        yield


SAFEGUARDS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "decisions are judged on a thread": (
        lambda: mock.patch("asyncio.to_thread", _on_the_loop), "stall of",
    ),
    "decisions that wait have a limit": (
        lambda: _as_good_as_none(WAITING_BYTES=1 << 40), "decisions that wait",
    ),
    "events that wait are on an account": (
        lambda: _unlimited(Resource.EVENT_BYTES_WAITING), "events that wait",
    ),
    "what a link holds is on an account": (
        lambda: mock.patch.multiple(Hold, require=lambda *_: None, fits=lambda *_: True),
        "tensor links",
    ),
    "so many decisions are kept of one": (
        lambda: _as_good_as_none(DECISIONS=1 << 40), "disk of",
    ),
    "so many facts are kept of one": (
        lambda: _unlimited(Resource.EVENTS_STORED, Resource.EVENT_BYTES_STORED), "disk of",
    ),
    "sessions have leases and shares": (_no_leases, "request"),
    "an anchor takes two votes": (
        lambda: mock.patch.object(Resolver, "votes_needed", return_value=1), "coup",
    ),
}  # fmt: skip

SEEN_AT = {
    "decisions are judged on a thread": 8,
    "decisions that wait have a limit": 0,
    "events that wait are on an account": 0,
    "what a link holds is on an account": 4,
    "so many decisions are kept of one": 111,
    "so many facts are kept of one": 12,
    "sessions have leases and shares": 0,
    "an anchor takes two votes": 18,
}
"""The seed that shows what each safeguard is for."""


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_its_safeguard_a_bound_breaks(safeguard: str) -> None:
    without, what = SAFEGUARDS[safeguard]
    assert not run(SEEN_AT[safeguard]).broken
    with without():
        broken = run(SEEN_AT[safeguard]).broken
    assert any(what in each for each in broken), broken


def test_the_same_seed_gives_the_same_trace() -> None:
    repeats(run, (3, 8))


@pytest.mark.chaos
def test_the_trace_does_not_depend_on_the_process() -> None:
    same_in_other_processes(MODULE, run, (8, 3))


def test_the_attacks_are_drawn_evenly() -> None:
    kinds = Counter(attack.kind for seed in range(200) for attack in draw(seed).attacks)
    assert set(kinds) == set(ATTACKS)
    assert min(kinds.values()) >= 40
