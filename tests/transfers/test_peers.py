"""Those that a fetch asks, over links of this test's."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mesh.discovery.weights import HeldWeights
from mesh.models.manifest import read_manifest
from mesh.transfers.asking import WeightsLink
from mesh.transfers.commands import PeerHolding
from mesh.transfers.fetching import WantedLayers, fetching
from mesh.transfers.pacing import Pace
from mesh.transfers.peers import PeerSources
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import Endpoint, NodeId
from mesh.wire.messages import WeightsAsk
from tests.checkpoints import make_checkpoint
from tests.models.test_partial import empty_copy
from tests.transfers.test_asking import ScriptedLink, blob


async def test_who_is_asked_no_more_is_listened_to_no_more(tmp_path: Path) -> None:
    whole = await asyncio.to_thread(
        lambda: read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=2, vocab=300))
    )
    shelf, sha256 = Shelf(), whole.weights_sha256
    shelf.put(StoredCheckpoint(whole, "", None))

    async def reply(link: WeightsLink, ask: WeightsAsk) -> None:
        part = await asyncio.to_thread(shelf.part, sha256, ask.part, ask.name)
        data = await asyncio.to_thread(part.read, ask.start, min(ask.stop, part.size))
        link.message(blob(ask.session, data))

    replies = set[asyncio.Task[None]]()

    async def dial(peer: PeerHolding) -> WeightsLink:
        link = WeightsLink(peer.node)
        link.attach(
            ScriptedLink(lambda ask: replies.add(asyncio.create_task(reply(link, ask))))  # type: ignore[arg-type]
        )
        return link

    copy = await asyncio.to_thread(empty_copy, whole, tmp_path)
    before = asyncio.all_tasks()
    where = Endpoint("wss://127.0.0.1:9")
    held = HeldWeights(whole.model_id, sha256, 2, (), ends=True, endpoint=where)
    peer = PeerHolding(NodeId("full"), "full", held)
    async with fetching(copy, WantedLayers(None), Shelf(), Pace()) as fetch:
        sources = PeerSources(sha256, fetch, dial)
        sources.update([peer])
        await fetch.run()
        await sources.close()
    await asyncio.gather(*replies)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
