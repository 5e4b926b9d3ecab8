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

import pytest

from mesh.errors import (
    BadEvent,
    BadValue,
    Busy,
    LogBehind,
    LogForked,
    LogRefused,
    SchemaTooNew,
)
from mesh.events import log as log_module
from mesh.events.intake import Received
from mesh.events.log import Change
from mesh.events.store import MAX_PAGE_BYTES
from mesh.events.types import MODEL_PUBLISHED, decode
from mesh.types import NodeId
from tests.events.support import (
    ADDED,
    FOUNDED,
    HEARTH,
    Author,
    Node,
    facts,
    household,
    meaning,
    open_node,
    reference,
    signed,
)

PEER = NodeId("peer")


@asynccontextmanager
async def opened(path: Path, number: int = 0) -> AsyncIterator[Node]:
    node = await open_node(path, number)
    try:
        yield node
    finally:
        await node.log.close()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def content(path: Path) -> bytes:
    return path.read_bytes()


async def found(node: Node) -> None:
    await node.log.append(FOUNDED, {"key": node.author.key.public_bytes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


async def test_what_was_appended_is_there_after_a_restart(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        events = [await node.log.append(MODEL_PUBLISHED, {"model_id": str(n)}) for n in range(30)]
        state, heads = node.log.state, node.log.ledger.heads()
        lamport = node.log.ledger.lamport
    async with opened(path) as node:
        assert node.log.state == state
        assert node.log.ledger.heads() == heads
        assert node.log.ledger.lamport == lamport
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "next"})
        assert (event.seq, event.prev) == (32, events[-1].id)
    assert mode(path) == 0o600


async def test_a_start_from_the_snapshot_equals_a_start_from_the_events(path: Path) -> None:
    authors, events = household(3)
    events += facts(authors, 300, random.Random(1))
    events.append(authors[0].revoke(authors[2].id, 5))
    async with opened(path) as node:
        await node.log.ingest(Received(tuple(map(signed, events))), PEER)
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
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "SNAPSHOT_EVERY", 10)
    node = await open_node(path)
    await found(node)
    for number in range(25):
        await node.log.append(MODEL_PUBLISHED, {"model_id": str(number)})
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT count(*) FROM notes WHERE name='snapshot'").fetchone()
    assert rows == (1,)
    await node.log.close()


async def test_listeners_hear_of_each_transaction(path: Path) -> None:
    changes: list[Change] = []
    async with opened(path) as node:
        node.log.on_change.append(changes.append)
        await found(node)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    assert [[event.seq for event in change.events] for change in changes] == [[1], [2]]
    assert set(changes[-1].state.models()) == {"m"}


async def test_own_events_go_first_while_a_peer_sends_much(path: Path) -> None:
    authors, events = household(2)
    events += facts(authors[1:], 600, random.Random(1))
    async with opened(path) as node:
        await found(node)
        copy = Author(0)
        copy.found()
        events[0] = events[0]
        flood = asyncio.create_task(node.log.ingest(Received(tuple(map(signed, events))), PEER))
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
        assert len(node.log.ledger.pending) == 0
        (founder,), events = household(1)
        events.append(founder.add(node.author))
        await node.log.ingest(Received(tuple(map(signed, events))), PEER)
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
        assert event.seq == 1
        assert event.lamport == 3


async def test_a_node_that_was_put_out_cannot_append(path: Path) -> None:
    authors, events = household(2)
    async with opened(path, 1) as node:
        await node.log.ingest(Received(tuple(map(signed, events))), PEER)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
        await node.log.append(MODEL_PUBLISHED, {"model_id": "void"})
        out = authors[0].revoke(authors[1].id, 1)
        await node.log.ingest(Received((signed(out),)), PEER)
        # What it signed after that is not passed on.
        assert len((await node.log.page(((node.author.id, 1, 99),), ())).events) == 1
        with pytest.raises(LogRefused, match="put out"):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "n"})


async def test_a_restored_backup_does_not_sign_over_what_peers_hold(path: Path) -> None:
    backup = path.with_name("backup.db")
    async with opened(path) as node:
        await found(node)
        await node.log.append(MODEL_PUBLISHED, {"model_id": "a"})
    shutil.copy(path, backup)
    async with opened(path) as node:
        lost = [await node.log.append(MODEL_PUBLISHED, {"model_id": "b"}) for _ in range(2)]
    async with opened(backup) as node:
        await node.log.ingest(Received((signed(lost[0]),)), PEER)
        assert node.kinds() == ["log_behind"]
        with pytest.raises(LogBehind, match="backup") as caught:
            await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
        assert "new key" in caught.value.fix
    async with opened(backup) as node:
        with pytest.raises(LogBehind):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
        await node.log.ingest(Received((signed(lost[1]),)), PEER)
        await node.log.adopt()
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
        assert event.seq == lost[-1].seq + 1
    async with opened(backup) as node:
        await node.log.append(MODEL_PUBLISHED, {"model_id": "d"})


async def test_a_node_that_forked_itself_cannot_append(path: Path) -> None:
    authors, events = household(2)
    other = authors[0].fork()
    async with opened(path) as node:
        await node.log.ingest(Received(tuple(map(signed, events))), PEER)
        await node.log.adopt()
        await node.log.append(MODEL_PUBLISHED, {"model_id": "a"})
        await node.log.ingest(Received((signed(other.publish("b", 9)),)), PEER)
        assert node.kinds()[-1] == "log_forked"
        with pytest.raises(LogForked):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
    async with opened(path) as node:
        assert node.log.state.frozen == {authors[0].id: 2}
        with pytest.raises(LogForked):
            await node.log.append(MODEL_PUBLISHED, {"model_id": "c"})
        page = await node.log.page((), (authors[0].id,))
        assert len(page.proofs) == 1


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
        heads = node.log.ledger.heads()
    async with opened(path) as node:
        assert node.log.ledger.heads() == heads
    with pytest.raises(Busy):
        await node.log.append(MODEL_PUBLISHED, {"model_id": "late"})


async def test_refusals_on_disk_store_nothing(path: Path) -> None:
    async with opened(path) as node:
        await found(node)
        junk = tuple((b"\xc1" * 10, bytes(64)) for _ in range(200))
        outcome = await node.log.ingest(Received(junk), PEER)
        assert sum(outcome.verdicts.values()) == 50
        assert node.kinds() == ["peer_muted"]
        await node.log.append(ADDED, {"key": Author(1).key.public_bytes})
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (2,)


async def test_a_page_costs_what_it_carries_however_many_authors_are_asked_for(
    tmp_path: Path,
) -> None:
    authors, events = household(12)
    large = [
        author.sign("a.type", {"x": bytes(15_000), "n": number}, 20 + number)
        for number in range(24)
        for author in authors
    ]
    node = await open_node(tmp_path / "log.db", 50)
    for start in range(0, len(large), 64):
        part = [*(events if start == 0 else ()), *large[start : start + 64]]
        await node.log.ingest(Received(tuple(map(signed, part))), NodeId("peer"))
    expected = sorted([*events, *large], key=lambda event: event.order)
    heights = {author.id: 1 for author in authors}
    got: list[bytes] = []
    tracemalloc.start()
    while len(got) < len(expected):
        ranges = [(author, first, 2**40) for author, first in sorted(heights.items())]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        page = (await node.log.page(ranges, ())).events
        assert tracemalloc.get_traced_memory()[1] - before < 4 * MAX_PAGE_BYTES
        assert sum(len(body) for body, _ in page) <= MAX_PAGE_BYTES
        for body, signature in page:
            heights[decode(body, signature).author] += 1
            got.append(body)
    tracemalloc.stop()
    assert got == [event.body for event in expected]
