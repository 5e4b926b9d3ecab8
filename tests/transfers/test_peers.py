"""Those that a fetch asks, over links of this test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mesh.discovery.weights import HeldWeights
from mesh.errors import PipelineStalled, TransferFailed
from mesh.models.manifest import read_manifest
from mesh.transfers.asking import Parts, WeightsLink
from mesh.transfers.commands import Ensure, PeerHolding
from mesh.transfers.fetches import Fetches, FetchSettings
from mesh.transfers.fetching import Fetch, WantedLayers, fetching
from mesh.transfers.pacing import Pace
from mesh.transfers.peers import PeerSources
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import Endpoint, NodeId
from mesh.wire.messages import Part, WeightsAsk
from tests.checkpoints import make_checkpoint
from tests.models.test_partial import empty_copy
from tests.transfers.test_asking import ScriptedLink, blob


@dataclass
class Serving:
    """A checkpoint given over scripted links, of which the first `breaking` give one tensor."""

    shelf: Shelf
    sha256: str
    breaking: int = 0
    dialled: int = 0
    replies: set[asyncio.Task[None]] = field(default_factory=set)

    async def dial(self, peer: PeerHolding) -> WeightsLink:
        self.dialled += 1
        breaks = self.dialled <= self.breaking
        link = WeightsLink(peer.node)

        def answer(ask: WeightsAsk) -> None:
            self.replies.add(asyncio.create_task(self._reply(link, ask, breaks=breaks)))

        link.attach(ScriptedLink(answer))  # type: ignore[arg-type]
        return link

    async def _reply(self, link: WeightsLink, ask: WeightsAsk, *, breaks: bool) -> None:
        part = await asyncio.to_thread(self.shelf.part, self.sha256, ask.part, ask.name)
        data = await asyncio.to_thread(part.read, ask.start, min(ask.stop, part.size))
        link.message(blob(ask.session, data))
        if breaks and ask.part is Part.TENSOR:
            link.closed(None)


async def fetched_from(tmp_path: Path, breaking: int = 0) -> Serving:
    """All of a small checkpoint, from one peer."""
    whole = await asyncio.to_thread(
        lambda: read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=2, vocab=300))
    )
    serving = Serving(Shelf(), whole.weights_sha256, breaking)
    serving.shelf.put(StoredCheckpoint(whole, "", None))
    copy = await asyncio.to_thread(empty_copy, whole, tmp_path)
    where = Endpoint("wss://127.0.0.1:9")
    held = HeldWeights(whole.model_id, serving.sha256, 2, (), ends=True, endpoint=where)
    peer = PeerHolding(NodeId("full"), "full", held)
    async with fetching(copy, WantedLayers(None), Shelf(), Pace()) as fetch:
        sources = PeerSources(serving.sha256, fetch, serving.dial)
        sources.update([peer])
        try:
            await fetch.run()
        finally:
            await sources.close()
    await asyncio.gather(*serving.replies)
    return serving


async def test_who_is_asked_no_more_is_listened_to_no_more(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    await fetched_from(tmp_path)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_peer_whose_links_are_of_use_until_they_break_is_asked_again_at_once(
    tmp_path: Path,
) -> None:
    """Over days a link breaks often; only one that gives nothing is to be waited for longer."""
    async with asyncio.timeout(10):
        assert (await fetched_from(tmp_path, breaking=5)).dialled == 6


async def test_who_alone_has_it_and_drips_is_given_up_and_named(tmp_path: Path) -> None:
    whole = await asyncio.to_thread(
        lambda: read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=2, vocab=300))
    )
    copy = await asyncio.to_thread(empty_copy, whole, tmp_path)
    failed = asyncio.Event()

    class Drip:
        name = "attic"

        async def read(self, tensor: str, start: int, stop: int) -> Parts:
            await asyncio.sleep(0.01)
            raise PipelineStalled("It came slower than 16 KiB/s.", fix="Ask another.")

        def close(self) -> None:
            failed.set()

    async def come_back(fetch: Fetch) -> None:
        while True:
            failed.clear()
            fetch.join(
                "n1", Drip(), frozenset(whole.tensors),
                lambda error: fetch.note("attic", error.message),
            )  # fmt: skip
            await failed.wait()

    async with fetching(copy, WantedLayers(None), Shelf(), Pace()) as fetch, asyncio.timeout(10):
        coming = asyncio.create_task(come_back(fetch))
        try:
            with pytest.raises(TransferFailed, match=r"attic: It came slower than 16 KiB/s\."):
                await fetch.run(patience_s=0.1)
        finally:
            coming.cancel()
            await asyncio.wait([coming])


@dataclass
class Dripping:
    """Says that it has much to say, and says it byte by byte."""

    replies: set[asyncio.Task[None]] = field(default_factory=set)

    async def dial(self, peer: PeerHolding) -> WeightsLink:
        link = WeightsLink(peer.node)

        def answer(ask: WeightsAsk) -> None:
            self.replies.add(asyncio.create_task(self._drip(link, ask)))

        link.attach(ScriptedLink(answer))  # type: ignore[arg-type]
        return link

    async def _drip(self, link: WeightsLink, ask: WeightsAsk) -> None:
        for offset in range(100):
            link.message(blob(ask.session, b"{", offset=offset, length=ask.stop))
            await asyncio.sleep(0.1)


async def test_who_says_what_a_checkpoint_is_byte_by_byte_is_not_waited_for_while_others_have_it(
    tmp_path: Path,
) -> None:
    whole = await asyncio.to_thread(
        lambda: read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=2, vocab=300))
    )
    serving, dripping = Serving(Shelf(), whole.weights_sha256), Dripping()
    serving.shelf.put(StoredCheckpoint(whole, "", None))
    where = Endpoint("wss://127.0.0.1:9")
    held = HeldWeights(whole.model_id, serving.sha256, 2, (), ends=True, endpoint=where)
    peers = [PeerHolding(NodeId(name), name, held) for name in ("dripping", "full")]

    async def dial(peer: PeerHolding) -> WeightsLink:
        return await (dripping if peer.node == "dripping" else serving).dial(peer)

    settings = FetchSettings(tmp_path / "models", saying_s=0.3)
    fetches = Fetches(settings, Shelf(), dial, Pace())
    fetches.update(peers)
    order = Ensure("1", whole.model_id, serving.sha256, None, ends=True)
    async with asyncio.timeout(6):
        directory = await fetches.ensure(order)
    assert (await asyncio.to_thread(read_manifest, directory)).has_ends
    for reply in dripping.replies:
        reply.cancel()
    await asyncio.gather(*serving.replies)
