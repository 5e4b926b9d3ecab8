"""The links that an asker holds to hosts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any, cast

import pytest

from mesh.errors import AddressLost, ConnectFailed, MeshError, UntrustedPeer
from mesh.logs import REQUEST
from mesh.pipeline.links import HopLinks
from mesh.types import Endpoint, NodeId
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import Message
from tests.pipeline.toy_mesh import ToyNetwork
from tests.simulation.virtual_loop import run_virtually


@dataclass
class Session:
    """One on a line to `host`, who is among the `gone` once it is lost, with the reason."""

    host: NodeId
    gone: list[tuple[NodeId, type[MeshError]]]

    def message(self, message: Message) -> None:
        return

    def lost(self, error: MeshError) -> None:
        self.gone.append((self.host, type(error)))

    def rest(self, before: float) -> None:
        return


class Unheard:
    """A link on which whatever is said gets nowhere."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def send(self, message: Message) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


async def test_a_host_that_starts_again_and_again_leaves_no_closed_lines_behind() -> None:
    network = ToyNetwork()
    lines, closed = HopLinks(network.dial), []
    for _ in range(5):
        shard = network.add("0-7", name="restless")  # each life has a port of its own
        line = await lines.link(shard.descriptor.host, shard.descriptor.endpoint)
        shard.kill()
        assert line.is_closed
        closed.append(weakref.ref(line))
        del line
    last = network.add("0-7", name="restless")
    kept = await lines.link(last.descriptor.host, last.descriptor.endpoint)
    await asyncio.sleep(0)  # the last one hears that it was cut
    gc.collect()
    assert [line() for line in closed] == [None] * 5
    assert await lines.link(last.descriptor.host, last.descriptor.endpoint) is kept
    await lines.close()


async def test_who_gives_up_waiting_for_a_dial_does_not_end_it_for_the_others() -> None:
    network = ToyNetwork()
    place = network.add("0-7").descriptor
    answering = asyncio.Event()

    async def dial(host: str, port: int, handler: LinkHandler) -> Link:
        await answering.wait()
        return await network.dial(host, port, handler)

    lines = HopLinks(dial)
    first, second = (asyncio.create_task(lines.link(place.host, place.endpoint)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    answering.set()
    await asyncio.wait([second])
    assert not second.cancelled()
    assert not second.result().is_closed
    await lines.close()


async def test_a_host_that_is_put_out_during_a_dial_gets_no_line() -> None:
    network = ToyNetwork()
    out, kept = network.add("0-3", name="out"), network.add("4-7", name="kept")
    answering = asyncio.Event()

    async def dial(host: str, port: int, handler: LinkHandler) -> Link:
        await answering.wait()
        return await network.dial(host, port, handler)

    lines = HopLinks(dial)
    places = [shard.descriptor for shard in (out, kept)]
    dials = [asyncio.create_task(lines.link(place.host, place.endpoint)) for place in places]
    await asyncio.sleep(0)
    lines.keep_only(frozenset({NodeId("kept")}))
    answering.set()
    refused, line = await asyncio.gather(*dials, return_exceptions=True)
    assert isinstance(refused, UntrustedPeer)
    assert [link.is_closed for link in out.links] == [True]
    assert line is await lines.link(kept.descriptor.host, kept.descriptor.endpoint)
    assert [link.is_closed for link in kept.links] == [False]
    await lines.close()


async def test_a_line_that_is_dialled_while_all_are_closed_does_not_come_to_be() -> None:
    network = ToyNetwork()
    shard, answering = network.add("0-7"), asyncio.Event()

    async def dial(host: str, port: int, handler: LinkHandler) -> Link:
        await answering.wait()
        return await network.dial(host, port, handler)

    lines, place = HopLinks(dial), shard.descriptor
    dialling = asyncio.create_task(lines.link(place.host, place.endpoint))
    await asyncio.sleep(0)
    await lines.close()
    answering.set()
    await asyncio.wait([dialling])
    assert dialling.cancelled()
    assert not shard.links


async def test_a_host_that_is_put_out_is_not_dialled_until_it_is_let_in_again() -> None:
    network = ToyNetwork()
    shard = network.add("0-7", name="restless")
    place = shard.descriptor
    lines = HopLinks(network.dial)
    assert not (await lines.link(place.host, place.endpoint)).is_closed
    lines.keep_only(frozenset())
    with pytest.raises(UntrustedPeer):
        await lines.link(place.host, place.endpoint)
    assert [link.is_closed for link in shard.links] == [True]
    lines.keep_only(frozenset({place.host}))
    assert not (await lines.link(place.host, place.endpoint)).is_closed
    await lines.close()


def test_a_host_that_is_always_somewhere_else_does_not_keep_them_all() -> None:
    async def main() -> None:
        network = ToyNetwork()
        lines = HopLinks(network.dial)
        kept = []
        for _ in range(5):
            place = network.add("0-7", name="restless").descriptor
            kept.append(await lines.link(place.host, place.endpoint))
            await asyncio.sleep(50)
        assert [line.is_closed for line in kept] == [True, True, True, False, False]
        await lines.close()

    run_virtually(main)


def test_a_silent_line_to_where_its_host_is_no_more_is_lost() -> None:
    """Nobody waits for an answer of an address that the host has lost; but one that answers is in
    another network of the same host."""

    async def main() -> None:
        network = ToyNetwork()
        moved, both = (network.add("0-3", name=n).descriptor for n in ("moved", "in-two"))

        async def dial(host: str, port: int, handler: LinkHandler) -> Link:
            link = await network.dial(host, port, handler)
            return cast("Link", Unheard(link)) if moved.endpoint.endswith(f":{port}") else link

        lines, lost = HopLinks(dial), list[tuple[NodeId, type[MeshError]]]()
        for place in (moved, both):
            line = await lines.link(place.host, place.endpoint)
            line.register(Session(place.host, lost))
        await asyncio.sleep(5)
        lines.are_at({(place.host, Endpoint("wss://toy:9")) for place in (moved, both)})
        await asyncio.sleep(5)
        assert lost == [(moved.host, AddressLost)], "it is asked again where it is"
        assert not line.is_closed
        await lines.close()

    run_virtually(main)


async def test_a_line_is_of_no_request_though_one_had_it_dialled() -> None:
    network, seen = ToyNetwork(), []
    place = network.add("0-7").descriptor

    async def dial(host: str, port: int, handler: LinkHandler) -> Link:
        seen.append(REQUEST.get())
        return await network.dial(host, port, handler)

    lines = HopLinks(dial)
    token = REQUEST.set("family-5")
    try:
        await lines.link(place.host, place.endpoint)
    finally:
        REQUEST.reset(token)
        await lines.close()
    assert seen == [""]


def test_where_nobody_answers_is_dialled_once_and_who_names_many_such_places_rests() -> None:
    async def scenario() -> None:
        dialled: list[int] = []
        is_there = False
        network = ToyNetwork()
        shard = network.add("0-7").descriptor

        async def dial(host: str, port: int, handler: LinkHandler) -> Link:
            dialled.append(port)
            if is_there:
                return await network.dial(host, int(shard.endpoint.rpartition(":")[2]), handler)
            raise ConnectFailed(f"Nobody at {port}.", fix="Look.")

        async def tried(host: NodeId, port: int) -> str:
            try:
                await lines.link(host, Endpoint(f"wss://127.0.0.1:{port}"))
            except ConnectFailed as error:
                return error.message
            return ""

        lines = HopLinks(dial)
        assert {await tried(shard.host, 1) for _ in range(64)} == {"Nobody at 1."}
        assert dialled == [1]
        await asyncio.sleep(1)
        assert await tried(shard.host, 1)
        assert dialled == [1, 1]
        said = [await tried(shard.host, port) for port in range(1, 65)]
        assert dialled == [1, 1, 2, 3, 4]
        assert set(said[4:]) == {"Nobody at 4."}
        assert await tried(NodeId("another"), 1) == "Nobody at 1."
        await asyncio.sleep(15)
        is_there = True
        assert not await tried(shard.host, 9)
        await lines.close()

    run_virtually(scenario)
