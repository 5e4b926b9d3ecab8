"""The log on disk: what was acknowledged stays, and what the node must not sign it does not."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiosqlite
import pytest

from mesh.accounts import allowances
from mesh.accounts.ledger import Limit, Resource, ResourceLedger
from mesh.errors import (
    BadEvent,
    BadValue,
    Busy,
    LogRefused,
    SchemaTooNew,
)
from mesh.events.intake import Received
from mesh.events.log import LogChange
from mesh.events.messages import Pull
from mesh.events.store import MAX_PAGE_BYTES, Store
from mesh.events.types import MODEL_PUBLISHED, decode
from mesh.types import NodeId
from tests.events.support import (
    HEARTH,
    Author,
    FakeClock,
    Node,
    facts,
    found,
    household,
    let_in,
    meaning,
    open_node,
    received,
    reference,
)

PEER = NodeId("peer")


@asynccontextmanager
async def opened(path: Path, number: int = 0) -> AsyncIterator[Node]:
    node = await open_node(path, number)
    try:
        yield node
    finally:
        await node.log.close()


async def test_the_newest_of_a_long_log_are_found_without_reading_it_all(tmp_path: Path) -> None:
    _, authors, decisions = household(4)
    facts_of_all = facts(authors, 2000, random.Random(1))
    async with opened(tmp_path / "log.db", 9) as node:
        await node.log.ingest(received([*decisions, *facts_of_all]), PEER)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    writer, reader = [await aiosqlite.connect(tmp_path / "log.db") for _ in range(2)]
    await reader.set_progress_handler(count, 100)
    store = Store(writer, reader)
    last = sorted((event.order for event in facts_of_all), reverse=True)
    for author in (None, authors[1].id):
        expected = [order for order in last if author in (None, order[1])]
        first = await store.newest((1 << 62, NodeId("~"), 1), 10, author)
        assert [event.order for event in first] == expected[:10]
        following = await store.newest(first[-1].order, 10, author)
        assert [event.order for event in following] == expected[10:20]
    await store.close()
    assert steps < 10 * len(facts_of_all)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


async def test_what_was_appended_is_there_after_a_restart(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        events = [await node.log.append(MODEL_PUBLISHED, {"model_id": str(n)}) for n in range(30)]
        state, heads = node.log.state, node.log.chains.heads()
        lamport = node.log.chains.lamport
    async with opened(path) as node:
        assert node.log.state == state
        assert node.log.chains.heads() == heads
        assert node.log.chains.lamport == lamport
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "next"})
        assert (event.seq, event.prev) == (31, events[-1].id)
    assert mode(path) == 0o600


async def test_a_start_from_the_snapshot_equals_a_start_from_the_events(path: Path) -> None:
    house, authors, events = household(3)
    events += facts(authors, 300, random.Random(1))
    events.append(house.revoke(authors[2], 5))
    async with opened(path) as node:
        await node.log.ingest(received(events), PEER)
        assert meaning(node.log.state) == meaning(reference(events))
    async with opened(path) as node:
        from_snapshot = node.log.state
    with closing(sqlite3.connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM notes WHERE name='snapshot'").fetchone()
        assert count == 1
        connection.execute("DELETE FROM notes WHERE name = 'snapshot'")
        connection.commit()
    async with opened(path) as node:
        assert node.log.state == from_snapshot


async def test_snapshots_are_taken_on_the_way_and_replace_each_other(
    path: Path,
) -> None:
    node = await open_node(path, snapshot_every=10)
    await found(node)
    for number in range(25):
        await node.log.append(MODEL_PUBLISHED, {"model_id": str(number)})
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT count(*) FROM notes WHERE name='snapshot'").fetchone()
    assert rows == (1,)
    await node.log.close()


async def test_listeners_hear_of_each_transaction(path: Path) -> None:
    changes: list[LogChange] = []
    async with opened(path) as node:
        node.log.on_change.append(changes.append)
        await found(node)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    assert [len(change.decisions) for change in changes] == [1, 0]
    assert [[event.seq for event in change.events] for change in changes] == [[], [1]]
    assert set(changes[-1].state.models()) == {"m"}


async def test_own_events_go_first_while_a_peer_sends_much(path: Path) -> None:
    _, authors, events = household(2)
    events += facts(authors[1:], 600, random.Random(1))
    async with opened(path) as node:
        await found(node)
        flood = asyncio.create_task(node.log.ingest(received(events), PEER))
        await asyncio.sleep(0)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "mine"})
        assert not flood.done()
        await flood


async def test_a_stranger_cannot_append_and_nothing_of_it_stays(path: Path) -> None:
    async with opened(path, 5) as node:
        with pytest.raises(LogRefused):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
        with pytest.raises(BadEvent):
            await node.log.append(MODEL_PUBLISHED, {"model_id": object()})
        assert len(node.log.chains.pending) == 0
        house, _, events = household(1)
        events.append(house.add(node.author))
        await node.log.ingest(received(events), PEER)
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
        assert event.seq == 1
        assert event.lamport == 1


async def test_a_node_that_was_put_out_cannot_append(path: Path) -> None:
    house, authors, events = household(2)
    async with opened(path, 1) as node:
        await node.log.ingest(received(events), PEER)
        kept = await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
        await node.log.append(MODEL_PUBLISHED, {"model_id": "void"})
        authors[1].ids = [kept.id]
        out = house.revoke(authors[1], 1)
        await node.log.ingest(received([out]), PEER)
        # What it signed after that is not passed on.
        pull = Pull(1, ((node.author.id, 1, 1, 99),))
        assert len((await node.log.page(pull)).events) == 1
        with pytest.raises(LogRefused, match="void"):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "n"})


async def test_a_restored_backup_goes_on_from_what_peers_hold(path: Path) -> None:
    backup = path.with_name("backup.db")
    async with opened(path) as node:
        await found(node)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "a"})
    shutil.copy(path, backup)
    async with opened(path) as node:
        lost = [await node.log.append(MODEL_PUBLISHED, {"model_id": "b"}) for _ in range(2)]
    async with opened(backup) as node:
        await node.log.ingest(received(lost), PEER)
        assert node.kinds() == ["log_restored"]
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
        assert event.place == (1, lost[-1].seq + 1)
    async with opened(backup) as node:
        await node.log.append(MODEL_PUBLISHED, {"model_id": "d"})
        assert node.kinds() == []


async def test_a_node_whose_facts_forked_begins_again_with_what_is_news(path: Path) -> None:
    """It was restored and signed before it could hear from anybody."""
    _, (founder, other), events = household(2)
    twin = founder.fork()
    async with opened(path) as node:
        await node.log.ingest(received(events), PEER)
        kept = await node.log.append(MODEL_PUBLISHED, {"model_id": "kept"})
        superseded = await node.log.append(MODEL_PUBLISHED, {"model_id": "superseded"})
        await node.log.append(MODEL_PUBLISHED, {"model_id": "withheld"})
        twin.ids = [kept.id]
        newer = other.publish("superseded", superseded.lamport + 1)
        await node.log.ingest(received([newer, twin.publish("elsewhere", 9)]), PEER)
        assert "facts_forked" in node.kinds()
        assert node.log.state.frozen == {founder.id: (1, 1)}
        assert set(node.log.state.models()) == {"kept", "superseded"}
        page = await node.log.page(Pull(1, proofs=(founder.id,)))
        assert len(page.proofs) == 1
    async with opened(path) as node:
        assert node.log.state.frozen == {founder.id: (1, 1)}
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "next"})
        # What somebody else has said since is not said over.
        assert event.place == (2, 3)
        assert node.log.state.models()["superseded"].event_id == newer.id
        assert set(node.log.state.models()) == {"kept", "superseded", "withheld", "next"}
        assert node.log.state.frozen == {}
        state = node.log.state
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT count(*) FROM events WHERE generation = 1 AND author = ?", (founder.id,)
        )
        assert rows.fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM forks").fetchone() == (0,)
    async with opened(path) as node:
        assert node.log.state == state


async def test_a_start_after_a_crash_knows_nothing_of_a_chain_that_was_replaced(path: Path) -> None:
    _, (_, other), events = household(2)
    async with opened(path) as node:
        await node.log.ingest(received([*events, other.publish("superseded")]), PEER)
    other.begin_again()
    async with opened(path) as node:  # whose snapshot is of before that
        await node.log.ingest(received([other.publish("news")]), PEER)
        state, crashed = node.log.state, await asyncio.to_thread(copied, path)
    assert set(state.models()) == {"news"}
    async with opened(crashed) as node:
        assert meaning(node.log.state) == meaning(state)


def copied(path: Path) -> Path:
    """The file as a crash leaves it now."""
    other = path.with_name("crashed.db")
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{other}{end}")
    return other


async def test_a_chain_that_is_full_begins_again(tmp_path: Path) -> None:
    clock = FakeClock()
    limits = {**allowances.LOG, Resource.EVENTS_STORED: Limit(10)}
    node = await open_node(tmp_path / "log.db", accounts=ResourceLedger(clock, limits))
    await found(node)
    for number in range(25):
        await node.log.append(MODEL_PUBLISHED, {"model_id": f"m{number % 3}", "n": number})
    generation, seq, _ = node.log.chains.heads()[node.author.id]
    assert (generation, seq) == (4, 4)
    said = {name: fact.payload["n"] for name, fact in node.log.state.models().items()}
    assert said == {"m0": 24, "m1": 22, "m2": 23}


async def test_decisions_are_there_after_a_restart(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        await let_in(node, Author(1))
        tips, membership = node.log.docket.tips, node.log.state.membership
    async with opened(path) as node:
        assert (node.log.docket.tips, node.log.state.membership) == (tips, membership)
        page = await node.log.page(Pull(1, want=tips))
        assert len(page.decisions) == 2
        assert (await node.log.page(Pull(1, want=tips, have=tips))).decisions == ()


async def test_a_node_that_is_no_anchor_cannot_decide_and_nothing_of_it_stays(path: Path) -> None:
    _, _, events = household(2)
    async with opened(path, 1) as node:
        await node.log.ingest(received(events), PEER)
        with pytest.raises(LogRefused, match="unlawful"):
            await let_in(node, Author(7))
        assert len(node.log.docket.graph) == 2
        await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    async with opened(path, 1) as node:
        assert len(node.log.docket.graph) == 2


async def test_a_log_of_a_newer_version_is_left_alone(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO migrations VALUES ('something_new')")
        connection.commit()
    before = content(path)
    with pytest.raises(SchemaTooNew, match="something_new"):
        await open_node(path)
    assert content(path) == before


async def test_a_log_of_another_hearth_is_left_alone(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
    with pytest.raises(BadValue, match="another hearth"):
        await open_node(path, hearth_id=HEARTH + "2")


async def test_a_cancelled_append_is_whole_or_absent(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        for delay in range(6):
            task = asyncio.create_task(node.log.append(MODEL_PUBLISHED, {"model_id": "m"}))
            for _ in range(delay):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await node.log.append(MODEL_PUBLISHED, {"model_id": "last"})
        heads = node.log.chains.heads()
    async with opened(path) as node:
        assert node.log.chains.heads() == heads
    with pytest.raises(Busy):
        await node.log.append(MODEL_PUBLISHED, {"model_id": "late"})


async def test_what_waits_to_be_written_is_written_when_the_log_is_closed(path: Path) -> None:
    """Also where as much waits as may."""
    node = await open_node(path)
    await found(node)
    waiting = [
        asyncio.create_task(node.log.append(MODEL_PUBLISHED, {"model_id": f"m{number}"}))
        for number in range(300)
    ]
    await asyncio.sleep(0)
    await node.log.close()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(each, Busy) for each in ended) == 300 - 256
    assert not any(isinstance(each, asyncio.CancelledError) for each in ended)
    async with opened(path) as node:
        assert node.log.chains.stored(node.author.id) == 256


async def test_refusals_on_disk_store_nothing(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        junk = tuple((b"\xc1" * 10, bytes(64)) for _ in range(200))
        outcome = await node.log.ingest(Received(junk), PEER)
        assert sum(outcome.verdicts.values()) == 50
        assert node.kinds() == ["peer_muted"]
        await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (1,)


async def test_a_page_costs_what_it_carries_however_many_authors_are_asked_for(
    tmp_path: Path,
) -> None:
    _, authors, events = household(12)
    large = [
        author.sign("a.type", {"x": bytes(15_000), "n": number}, 20 + number)
        for number in range(24)
        for author in authors
    ]
    node = await open_node(tmp_path / "log.db", 50)
    for start in range(0, len(large), 64):
        part = [*(events if start == 0 else ()), *large[start : start + 64]]
        await node.log.ingest(received(part), NodeId("peer"))
    expected = sorted(large, key=lambda event: event.order)
    heights = {author.id: 1 for author in authors}
    got: list[bytes] = []
    tracemalloc.start()
    while len(got) < len(expected):
        ranges = [(author, 1, first, 2**40) for author, first in sorted(heights.items())]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        page = (await node.log.page(Pull(1, tuple(ranges)))).events
        assert tracemalloc.get_traced_memory()[1] - before < 4 * MAX_PAGE_BYTES
        assert sum(len(body) for body, _ in page) <= MAX_PAGE_BYTES
        for body, signature in page:
            heights[decode(body, signature).author] += 1
            got.append(body)
    tracemalloc.stop()
    assert got == [event.body for event in expected]
