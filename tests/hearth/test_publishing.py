"""The log's record of what is served: one event when it begins, one when it ends, no more."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from mesh.clock import SystemClock
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import Offering
from mesh.events.intake import Report
from mesh.events.log import LogChange
from mesh.events.messages import Pull
from mesh.events.types import MODEL_PUBLISHED, PLACEMENT_WISHED, SHARD_ADVERTISED
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.hearth.publishing import Publisher, Serving
from mesh.hearth.record import HearthRecord
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added, LevelChanged
from mesh.identity.keys import NodeKey
from mesh.identity.roster import TrustLevel
from mesh.types import Endpoint
from tests.discovery.network import advertised, new_key
from tests.waiting import until

CLOCK = SystemClock()


def unexpected(report: Report) -> None:
    raise AssertionError(report)


class Home:
    """One node's hearth and the record it keeps; `said` are the types of its events so far."""

    def __init__(self, hearth: Hearth, name: str) -> None:
        self.hearth = hearth
        self.serving = Serving()
        self.said: list[str] = []
        self._happened = asyncio.Event()
        self.rounds = 0
        hearth.log.on_change.append(self._note)
        self.publisher = Publisher(hearth, self._looked, name, settle_s=0.0, retry_s=0.01)

    def _note(self, change: LogChange) -> None:
        self.said += [event.type for event in change.events]

    def _looked(self) -> Serving:
        self.rounds += 1
        self._happened.set()
        return self.serving

    async def serve(self, *shards: Advertisement, loaded: bool = True) -> None:
        """Serve these, and wait until the record was looked at twice: the first round is over."""
        names = {shard.descriptor.shard_id for shard in shards}
        self.serving = Serving(Offering(shards if loaded else ()), names)
        await self.rounds_go_on()

    async def rounds_go_on(self) -> None:
        for _ in range(2):
            before = self.rounds
            self.publisher.look()
            async with asyncio.timeout(10):
                while self.rounds == before:
                    self._happened.clear()
                    await self._happened.wait()

    def recorded(self) -> dict[str, bool]:
        """Shard ids, and whether they still are served."""
        facts = self.hearth.own_facts(SHARD_ADVERTISED)
        return {name: not fact.payload["withdrawn"] for name, fact in facts.items()}


@asynccontextmanager
async def home(
    key: NodeKey,
    record: HearthRecord,
    logs: Path,
    name: str = "attic",
    on_report: Callable[[Report], None] = unexpected,
) -> AsyncIterator[Home]:
    hearth = await Hearth.open(key, record, logs, CLOCK, on_report)
    node = Home(hearth, name)
    node.publisher.start()
    try:
        yield node
    finally:
        await node.publisher.stop()
        await hearth.close()


async def test_serving_is_recorded_once_and_withdrawing_too(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    first, second = (advertised(key.node_id, layers) for layers in ("0-7", "8-15"))
    async with home(key, record, tmp_path) as node:
        await node.serve(first)
        assert node.said == [MODEL_PUBLISHED, SHARD_ADVERTISED]
        # renewals, another load, a shard process that starts again on another port
        for queue_depth in range(5):
            health = replace(first.health, queue_depth=queue_depth)
            await node.serve(replace(first, health=health))
        await node.serve(first, loaded=False)
        moved = replace(first.descriptor, endpoint=Endpoint("wss://127.0.0.1:9999"))
        await node.serve(replace(first, descriptor=moved))
        await node.serve(first, second)
        assert node.said == [MODEL_PUBLISHED, SHARD_ADVERTISED, SHARD_ADVERTISED]
        assert node.recorded() == {"tiny:0-7": True, "tiny:8-15": True}
        assert "endpoint" not in node.hearth.own_facts(SHARD_ADVERTISED)["tiny:0-7"].payload
    # A start that serves the same writes nothing, one with other layers says what ended.
    async with home(key, record, tmp_path) as node:
        await node.serve(first, second)
        assert node.said == []
        await node.serve(second)
        assert node.said == [SHARD_ADVERTISED]
        assert node.recorded() == {"tiny:0-7": False, "tiny:8-15": True}
        await node.serve(second)
        assert node.said == [SHARD_ADVERTISED]


async def test_other_weights_are_other_facts(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    async with home(key, record, tmp_path) as node:
        await node.serve(advertised(key.node_id))
        await node.serve(advertised(key.node_id, weights="b" * 64))
        assert node.said == 2 * [MODEL_PUBLISHED, SHARD_ADVERTISED]
        assert node.hearth.log.state.models()["tiny"].payload["weights_sha256"] == "b" * 64


async def test_member_below_trusted_writes_nothing_until_it_is(tmp_path: Path) -> None:
    key, guest = new_key(), new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    logs = tmp_path / "guest"
    logs.mkdir()
    async with home(key, record, tmp_path) as attic, home(guest, record, logs, "guest") as node:
        await node.serve(advertised(guest.node_id))
        assert node.said == []  # not even in
        await attic.hearth.decide(Added(make_certificate(guest), "guest", TrustLevel.MEMBER))
        await hand_over(attic, node)
        node.said.clear()
        await node.serve(advertised(guest.node_id))
        assert node.said == []
        await attic.hearth.decide(LevelChanged(guest.node_id, TrustLevel.TRUSTED))
        await hand_over(attic, node)
        node.said.clear()
        await node.serve(advertised(guest.node_id))
        assert node.said == [MODEL_PUBLISHED, SHARD_ADVERTISED]


async def test_what_a_restored_node_said_while_it_could_hear_nobody_counts_again(
    tmp_path: Path,
) -> None:
    """It signed two histories: neither counts, until it says again what its own log has."""
    key, reports = new_key(), []
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    twin = shutil.copytree(tmp_path, tmp_path / "twin")
    async with home(key, record, tmp_path, on_report=reports.append) as node:
        await node.serve()
        await node.hearth.publish(PLACEMENT_WISHED, {"deployment": "d"})
        async with home(key, record, twin) as other:
            await other.hearth.publish(MODEL_PUBLISHED, {"model_id": "before the backup"})
            end = other.hearth.end_of_facts(key.node_id)
            pull = Pull(1, ((key.node_id, end.generation, 1, end.last_seq),))
            await node.hearth.log.ingest(await other.hearth.log.page(pull), key.node_id)
        assert [report.kind for report in reports] == ["facts_forked"]
        await until(lambda: not node.hearth.log.state.frozen)
        assert set(node.hearth.log.state.wishes()) == {"d"}


async def hand_over(giver: Home, taker: Home) -> None:
    """All that the giver itself signed."""
    author = giver.hearth.key.node_id
    end = giver.hearth.end_of_facts(author)
    facts = ((author, end.generation, 1, end.last_seq),) if end.last_seq else ()
    page = await giver.hearth.log.page(Pull(1, facts, want=giver.hearth.log.docket.tips))
    await taker.hearth.log.ingest(page, author)
    async with asyncio.timeout(10):
        while taker.hearth.roster.members != giver.hearth.roster.members:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_before_it_is_known_what_to_serve_nothing_is_withdrawn(tmp_path: Path) -> None:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    async with home(key, record, tmp_path) as node:
        await node.serve(advertised(key.node_id))
    async with home(key, record, tmp_path) as node:
        await node.rounds_go_on()
        await node.serve(advertised(key.node_id))
        assert node.said == []
