"""Killed writers, full disks and damaged files: nothing acknowledged is lost, and it is said."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from mesh.errors import LogFull
from mesh.events import repair
from mesh.events.log import LogChange
from mesh.events.messages import Pull
from mesh.events.opening import OWN_HEAD
from mesh.events.types import MODEL_PUBLISHED, Event
from mesh.identity import decisions
from mesh.identity.decisions import LevelChanged
from mesh.identity.roster import TrustLevel
from mesh.types import NodeId
from tests.descriptors import none_left
from tests.events.support import (
    HEARTH,
    Author,
    Record,
    facts,
    found,
    household,
    key,
    let_in,
    meaning,
    open_node,
    received,
    reference,
)
from tests.full_disk import file_size_limit

PEER = NodeId("peer")


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def size_of(file: Path) -> int:
    return file.stat().st_size


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def blank_first_page(file: Path) -> None:
    file.write_bytes(bytes(4096) + file.read_bytes()[4096:])


def run_and_kill(path: Path, rng: random.Random) -> int:
    """Start a writer, kill it at a random moment, and give the last acknowledged number."""
    command = [sys.executable, "-m", "tests.events.writer", str(path), "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = writer.stdout.readline()
        # The moment itself is what is being varied, so there is nothing to wait for.
        time.sleep(rng.random() * 0.05)
        writer.kill()
        said += writer.stdout.read()
    whole = said[: said.rfind(b"\n")].split()
    return int(whole[-1])


async def kill_again_and_again(path: Path, times: int) -> None:
    rng = random.Random(times)
    for _ in range(times):
        acknowledged = run_and_kill(path, rng)
        node = await open_node(path)
        assert node.kinds() == []
        height = node.log.chains.stored(node.author.id)
        assert acknowledged <= height <= acknowledged + 1
        await node.log.close()


@pytest.mark.slow
async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    await kill_again_and_again(tmp_path / "events.db", 20)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    await kill_again_and_again(tmp_path / "events.db", 100)


async def test_a_disk_that_takes_no_more_loses_nothing_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    node = await open_node(path)
    await found(node)
    written = 0
    with file_size_limit(300_000):
        with suppress(LogFull):
            while written < 1000:
                await node.log.append(MODEL_PUBLISHED, {"model_id": "m", "fill": "x" * 4000})
                written += 1
        assert 10 < written < 1000
        # Reading goes on, and memory says what the disk says.
        assert node.log.chains.stored(node.author.id) == written
        page = await node.log.page(Pull(1, ((node.author.id, 1, 1, written),)))
        assert page.events
        with pytest.raises(LogFull) as caught:
            await node.log.append(MODEL_PUBLISHED, {"model_id": "m", "fill": "x" * 4000})
        assert "Free space" in caught.value.fix
        assert node.kinds() == [LogFull.code], "who looks at this node hears so, once"
    await node.log.append(MODEL_PUBLISHED, {"model_id": "again"})
    await node.log.close()
    node = await open_node(path)
    assert node.log.chains.stored(node.author.id) == written + 1
    await node.log.close()


def test_a_really_full_disk(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec timeout 60"
        f" {sys.executable} -m tests.events.filler {tmp_path}/events.db"
    )
    unshare = ["unshare", "--mount", "--map-root-user", "--user", "bash", "-c"]
    probe = subprocess.run(
        [*unshare, f"mount -t tmpfs -o size=256k tmpfs {tmp_path}"],
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"no small tmpfs here: {probe.stderr.decode().strip()}")
    result = subprocess.run([*unshare, script], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.split() == [b"full", b"readable", b"recovered"]


def story() -> list[Record]:
    _, authors, events = household(3)
    return events + facts(authors, 400, random.Random(8))


async def fill(path: Path, events: list[Record]) -> None:
    node = await open_node(path, 9)
    await node.log.ingest(received(events), PEER)
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()


@pytest.mark.parametrize("column", ["body", "signature", "id", "digest"])
async def test_a_damaged_row_costs_that_row_only(tmp_path: Path, column: str) -> None:
    path, events = tmp_path / "events.db", story()
    await fill(path, events)
    said = [event for event in events if isinstance(event, Event)]
    author = said[0].author
    # A wrong id in the middle of a chain would show in its successor, too.
    seq = max(e.seq for e in said if e.author == author) if column == "id" else 9
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            f"UPDATE events SET {column} = zeroblob(length({column})) WHERE author = ? AND seq = ?",  # noqa: S608
            (author, seq),
        )
        connection.commit()
    node = await open_node(path, 9)
    assert node.kinds() == ["log_repaired"]
    assert "events.db.damaged-1" in names(tmp_path)
    # The id column alone is no loss: it is made of the body.
    lost = [e for e in said if e.author == author and e.seq == seq and column != "id"]
    if lost:
        assert node.log.chains.stored(author) == 8
        await node.log.ingest(received([lost[0]]), PEER)
    # What came after it had been saved, and follows as soon as the gap is closed.
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()
    node = await open_node(path, 9)
    assert node.kinds() == []
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()


async def test_a_process_without_descriptors_is_told_from_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    await (await open_node(path)).log.close()
    for left in range(3):  # the file cannot be touched, or SQLite cannot open all of its own
        with none_left(but=left), pytest.raises(LogFull) as caught:
            await open_node(path)
        assert "ulimit -n" in caught.value.fix, caught.value
    await (await open_node(path)).log.close()


async def test_what_was_saved_stays_saved_when_the_disk_takes_no_more(tmp_path: Path) -> None:
    path, events = tmp_path / "events.db", story()
    await fill(path, events)
    said = [event for event in events if isinstance(event, Event)]
    author = next(event.author for event in said if event.author != key(0).node_id)
    (lost,) = (event for event in said if event.author == author and event.seq == 9)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE events SET body = x'00' WHERE id = ?", (lost.id,))
        connection.commit()
    node = await open_node(path)
    assert node.kinds() == ["log_repaired"]
    with file_size_limit(1), pytest.raises(LogFull):
        await node.log.ingest(received([lost]), PEER)
    events.append(await let_in(node, Author(9)))  # which is written
    await node.log.close()
    node = await open_node(path)
    await node.log.ingest(received([lost]), PEER)
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()


def damage(path: Path, rng: random.Random, count: int) -> None:
    """Overwrite a part of some pages that hold rows."""
    content = bytearray(path.read_bytes())
    leaves = [at for at in range(4096, len(content), 4096) if content[at] == 13]
    for at in rng.sample(leaves[3:], count):
        start = at + rng.choice([0, 100, 1500])
        content[start : start + 2000] = rng.randbytes(2000)
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(8))
async def test_damaged_pages_cost_what_was_in_them_only(tmp_path: Path, seed: int) -> None:
    path, events = tmp_path / "events.db", story()
    await fill(path, events)
    rng = random.Random(seed)
    damage(path, rng, 2)
    node = await open_node(path, 9)
    assert node.kinds() == ["log_repaired"]
    with closing(sqlite3.connect(path)) as connection:
        rows = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608
            for table in ("events", "orphans", "decisions")
        ]
    assert len(events) - 40 < sum(rows) < len(events)
    for start in range(0, len(events), 100):
        await node.log.ingest(received(events[start : start + 100]), PEER)
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()


async def test_a_damaged_first_page_costs_no_event(tmp_path: Path) -> None:
    path, events = tmp_path / "events.db", story()
    await fill(path, events)
    blank_first_page(path)
    node = await open_node(path, 9)
    assert node.kinds() == ["log_repaired"]
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()


async def test_a_decision_that_is_stored_is_in_force_though_facts_cannot_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.db"
    _, (_, other), events = household(2)
    events += [other.publish(f"m{number % 9}") for number in range(900)]
    await fill(path, events)
    node = await open_node(path)
    changes: list[LogChange] = []
    node.log.on_change.append(changes.append)
    await asyncio.to_thread(damage, path, random.Random(1), 60)
    kind, payload = decisions.encode(LevelChanged(other.id, TrustLevel.ANCHOR))
    decided = await node.log.decide(kind, lambda parents, wall_ms: payload)
    assert [change.decisions for change in changes] == [(decided,)]
    assert node.log.state.stale == {other.id}
    await node.log.close()


async def test_large_events_and_those_in_the_write_ahead_log_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    node = await open_node(path)
    await found(node)
    for size in (10, 3900, 4100, 9000, 16000):
        await node.log.append(MODEL_PUBLISHED, {"model_id": str(size), "fill": bytes(size)})
    copy = tmp_path / "copy.db"
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")
    assert size_of(Path(f"{copy}-wal")) > 30_000
    repaired = await asyncio.to_thread(repair.repair, copy, HEARTH)
    assert (repaired.events, repaired.orphans, repaired.unreadable) == (6, 0, 0)
    # SQLite would replay the old log into the new file.
    assert "copy.db-wal" not in names(tmp_path)
    assert "copy.db.damaged-1-wal" in names(tmp_path)
    again = await open_node(copy)
    assert again.log.state == node.log.state


async def test_no_database_at_all_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    write(path, b"This was a log once." * 1000)
    node = await open_node(path)
    assert node.kinds() == ["log_repaired"]
    # Nobody knows how far this node had signed: it does not go on in the old chain.
    await found(node)
    event = await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    assert event.place == (2, 1)
    await node.log.close()
    assert size_of(Path(f"{path}.damaged-1")) == 20_000


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_node_that_lost_its_newest_own_event_begins_again(
    tmp_path: Path, comes_back: bool
) -> None:
    path = tmp_path / "events.db"
    node = await open_node(path)
    await found(node)
    await node.log.append(MODEL_PUBLISHED, {"model_id": "kept"})
    last = await node.log.append(MODEL_PUBLISHED, {"model_id": "lost"})
    await node.log.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE events SET body = x'00' WHERE seq = 2")
        connection.commit()
        assert connection.execute("SELECT value FROM notes WHERE name=?", (OWN_HEAD,)).fetchone()
    node = await open_node(path)
    if comes_back:
        await node.log.ingest(received([last]), PEER)
    event = await node.log.append(MODEL_PUBLISHED, {"model_id": "n"})
    # A second event with number 2 would be a fork; what is news is said again.
    assert event.place == (2, 3 if comes_back else 2)
    assert set(node.log.state.models()) == {"kept", "n", *(["lost"] if comes_back else [])}
    await node.log.close()


async def test_damaged_decisions_come_back_from_peers_and_lose_nobody(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    _, authors, events = household(4)
    said = [author.publish("m", 10) for author in authors]
    await fill(path, [*events, *said])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE decisions SET body = x'00' WHERE id = ?", (events[1].id,))
        connection.commit()
    node = await open_node(path, 9)
    assert node.kinds() == ["log_repaired"]
    # What came after the lost decision waits for it, and with it those that it let in.
    assert len(node.log.docket.graph) == 1
    assert set(node.log.docket.wanted) == {events[1].id}
    await node.log.ingest(received([events[1]]), PEER)
    assert len(node.log.docket.graph) == 4
    await node.log.ingest(received(said), PEER)
    assert meaning(node.log.state) == meaning(reference([*events, *said]))
    await node.log.close()
    node = await open_node(path, 9)
    assert meaning(node.log.state) == meaning(reference([*events, *said]))
    await node.log.close()


TABLE_PAGE, INDEX_PAGE = 13, 10


def flip_in(path: Path, text: bytes, kind: int | None = None) -> None:
    """Flip a bit of the first such text, on a page of this kind if one is given."""
    content = bytearray(path.read_bytes())
    found = re.finditer(re.escape(text), content)
    at = next(f.start() for f in found if kind in (None, content[f.start() // 4096 * 4096]))
    content[at] ^= 1
    path.write_bytes(content)


def set_byte(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "the name of a step": lambda path: flip_in(path, b"create_chains", TABLE_PAGE),
    "its index": lambda path: flip_in(path, b"create_chains", INDEX_PAGE),
    "an index entry of an event": lambda path: flip_in(path, Author(1).id.encode(), INDEX_PAGE),
    "an index's name": lambda path: set_byte(path, path.read_bytes().index(b"autoindex_f"), 0xE5),
    "the size of a page": lambda path: [set_byte(path, at, 0) for at in (16, 40)] and None,
    "a fork's place": lambda path: change(path, "UPDATE forks SET seq = seq + 1"),
    "a fork's author": lambda path: change(path, "UPDATE forks SET author = CAST(x'E5' AS TEXT)"),
    "how far it signed": lambda path: change(
        path, "UPDATE notes SET value = x'71' WHERE name = 'own_head'"
    ),
    "the hearth": lambda path: change(path, "UPDATE notes SET value = x'71' WHERE name = 'hearth'"),
    "the type of a body": lambda path: change(
        path, "UPDATE events SET body = CAST(body AS TEXT) WHERE seq = 3"
    ),
}


@pytest.mark.parametrize("damage_it", DAMAGES.values(), ids=DAMAGES.keys())
async def test_whatever_is_damaged_the_node_starts_and_has_what_it_had(
    tmp_path: Path, damage_it: Callable[[Path], None]
) -> None:
    path = tmp_path / "events.db"
    _, authors, events = household(3)
    events += facts(authors, 40, random.Random(8))
    forked = authors[2].fork()
    pages = received([*events, authors[2].publish("one")]), received([forked.publish("two")])
    node = await open_node(path)
    for page in pages:
        await node.log.ingest(page, PEER)
    before = meaning(node.log.state)
    await node.log.close()
    await asyncio.to_thread(damage_it, path)
    node = await open_node(path)
    assert node.kinds() == ["log_repaired"]
    for author in authors:
        last = node.log.chains.height(author.id)
        given = await node.log.page(Pull(1, ((author.id, 1, 1, last),)))
        assert len(given.events) == last
    for page in pages:
        await node.log.ingest(page, PEER)
    assert meaning(node.log.state) == before
    await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})


async def test_a_repair_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    path, events = tmp_path / "events.db", story()
    await fill(path, events)
    await asyncio.to_thread(repair.repair, path, HEARTH)
    for name in names(tmp_path) - {"events.db"}:
        (tmp_path / name).unlink()
    path.rename(tmp_path / "events.db.repaired")
    # That is the moment between moving the old file away and the new one in.
    assert names(tmp_path) == {"events.db.repaired"}
    node = await open_node(path, 9)
    assert meaning(node.log.state) == meaning(reference(events))
    await node.log.close()
