"""Links over real sockets on loopback: opening, refusing, closing, cutting."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import websockets.asyncio.client as high_client
from websockets.exceptions import InvalidStatus

from mesh.accounts.ledger import Limit, Resource, ResourceLedger
from mesh.clock import SystemClock
from mesh.errors import (
    AddressLost,
    BadValue,
    Busy,
    ConnectFailed,
    LinkLost,
    PortInUse,
    VersionMismatch,
)
from mesh.wire.connection import WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS, MIB, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Blob, BlobKind, Drain, Message, Park, Result, Step
from mesh.wire.websocket import connect, serve
from tests.waiting import until
from tests.wire.house import QUICK, Echo, listening
from tests.wire.support import Recorder, hello, same, tensor

IP = shutil.which("ip") or "ip"


async def test_both_sides_know_each_other_once_connect_returns() -> None:
    async with listening() as house:
        link = await house.dial()
        assert link.peer == hello("server")
        assert not link.is_closed
        assert [other.peer for other in house.server.links] == [hello("client")]
        assert house.server.half_open == 0
        link.close()


async def test_a_decode_step_there_and_back() -> None:
    async with listening() as house:
        asker = Recorder()
        link = await house.dial(asker)
        for number in range(50):
            step = Step(1, number, number, tensor("fp16", (1, 1, 896), number))
            link.send(step)
            result = await asker.next()
            assert isinstance(result, Result)
            assert (result.step, same(result.tensor, step.tensor)) == (number, True)
        link.close()


async def test_64_mib_both_ways_at_once_with_decode_steps_between() -> None:
    async with listening() as house:
        asker = Recorder()
        link = await house.dial(asker)
        large = tensor("fp32", (16, 1024, 1024), 3)
        link.send(Step(1, 0, 0, large))
        for number in range(20):
            link.send(Step(2, number, 0, tensor()))
        results = [await asker.next(30) for _ in range(21)]
        assert [r.session for r in results] == [2] * 20 + [1]  # type: ignore[union-attr]
        assert same(results[-1].tensor, large)  # type: ignore[union-attr]
        await link.drain(1)
        assert link.queued_bytes == 0
        link.close()


async def test_what_has_left_is_drained_though_the_peer_says_nothing() -> None:
    limits = replace(
        DEFAULT_LIMITS, chunk_bytes=16 * MIB, high_water_bytes=MIB // 2, ping_interval_s=60.0
    )
    async with listening(limits) as house:
        link = await house.dial(limits=limits)
        # More than the kernel takes at once; and a receiver answers a blob with nothing.
        link.send(Blob(1, BlobKind.ANSWER, limits.chunk_bytes, 0, bytes(limits.chunk_bytes)))
        assert link.queued_bytes > limits.high_water_bytes
        await link.drain(10.0)
        link.close()


async def test_what_accept_sends_follows_the_hello() -> None:
    def accept(link: WebSocketLink) -> LinkHandler:
        link.send(Drain("soon"))
        return Recorder()

    async with listening(accept=accept) as house:
        asker = Recorder()
        link = await house.dial(asker)
        assert await asker.next() == Drain("soon")
        link.close()


async def test_a_dial_cancelled_as_the_link_opens_leaves_no_link_behind() -> None:
    def accept(link: WebSocketLink) -> LinkHandler:
        link.send(Drain("soon"))
        return Recorder()

    class Cancels(Recorder):
        def message(self, message: Message) -> None:
            dialling.cancel()

    async with listening(accept=accept) as house:
        dialling = asyncio.ensure_future(house.dial(Cancels()))
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await until(lambda: not house.server.links)


async def test_close_is_a_bye_to_the_other_side() -> None:
    async with listening() as house:
        asker = Recorder()
        link = await house.dial(asker)
        link.send(Park(1))
        link.close("enough")
        link.close("enough")
        assert await asker.end() is None
        assert await house.handlers[0].next() == Park(1)
        assert await house.handlers[0].end() is None
        with pytest.raises(LinkLost):
            link.send(Park(1))
        await until(lambda: link.is_gone and not house.server.links)


async def test_closing_the_server_ends_its_links() -> None:
    async with listening() as house:
        asker = Recorder()
        link = await house.dial(asker)
        await house.server.close()
        assert await asker.end() is None
        assert link.is_closed
        with pytest.raises(ConnectFailed):
            await house.dial()


async def test_a_cut_connection_is_a_lost_link_on_both_sides() -> None:
    async with listening() as house:
        asker = Recorder()
        link = await house.dial(asker)
        link.abort(LinkLost("pulled", fix=""))
        assert isinstance(await asker.end(), LinkLost)
        assert isinstance(await house.handlers[0].end(), LinkLost)
        assert link.is_closed


@pytest.mark.parametrize("version", [0, 2])
async def test_another_version_is_told_who_is_too_old(version: int) -> None:
    async with listening() as house:
        with pytest.raises(VersionMismatch, match="too old"):
            await connect(
                "127.0.0.1", house.server.port,
                hello=hello("client", version=version), handler=Recorder(),
            )  # fmt: skip
        await until(lambda: house.server.half_open == 0)


async def test_accept_can_refuse() -> None:
    def accept(link: WebSocketLink) -> LinkHandler:
        raise Busy("No room.", fix="Try later.")

    async with listening(accept=accept) as house:
        with pytest.raises(Busy, match=r"No room\."):
            await house.dial()
        await until(lambda: house.server.half_open == 0)
        assert house.server.links == ()


async def test_a_port_in_use_is_named() -> None:
    async with listening() as house:
        with pytest.raises(PortInUse, match=str(house.server.port)) as refused:
            await serve("127.0.0.1", house.server.port, accept=house.accept, hello=hello())
    assert "--port" in refused.value.fix


async def test_an_address_that_may_not_be_used_is_named() -> None:
    with pytest.raises(BadValue, match=r"192\.0\.2\.1:0"):  # of nobody: RFC 5737
        await serve("192.0.2.1", 0, accept=Echo, hello=hello())


async def test_an_existing_socket_is_used() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    server = await serve(None, 0, accept=Echo, hello=hello(), sock=sock)
    assert server.port == sock.getsockname()[1]
    await server.close()


async def test_only_some_addresses_of_this_machine_are_answered_at() -> None:
    mine = {"127.0.0.1", "127.0.0.2"}
    server = await serve(
        mine.__contains__, 0, accept=lambda link: Recorder(), hello=hello("server")
    )
    links = [
        await connect(host, server.port, hello=hello("client"), handler=Recorder())
        for host in sorted(mine)
    ]
    assert [link.peer_host for link in links] == sorted(mine)
    late = {"hello": hello("client"), "handler": Recorder(), "timeout_s": 5.0}
    with pytest.raises(ConnectFailed):
        await connect("127.0.0.3", server.port, **late)
    mine.add("127.0.0.3")  # the machine got another address
    (await connect("127.0.0.3", server.port, **late)).close()
    await server.close()


async def test_ipv6_works() -> None:
    async with listening(host="::1") as house:
        link = await connect("::1", house.server.port, hello=hello("client"), handler=Recorder())
        assert link.peer.node_name == "server"
        link.close()


async def test_nobody_listening_is_a_failed_connection() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(ConnectFailed):
        await connect("127.0.0.1", port, hello=hello(), handler=Recorder())


async def test_a_listener_that_says_nothing_is_a_failed_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        pytest.raises(ConnectFailed, match="did not answer"),
    ):
        await connect(
            "127.0.0.1", sock.getsockname()[1],
            hello=hello(), handler=Recorder(), timeout_s=0.1,
        )  # fmt: skip


async def test_half_open_connections_are_capped_and_time_out() -> None:
    limits = replace(QUICK, half_open_per_host=4)
    async with listening(limits) as house:
        strangers = [
            await asyncio.open_connection("127.0.0.1", house.server.port) for _ in range(8)
        ]
        strangers[0][1].write(b"GET / HTTP/1.1\r\nX-a: ")
        assert house.server.half_open <= 4
        reads = [asyncio.create_task(reader.read()) for reader, _ in strangers]
        ended, _ = await asyncio.wait(reads, timeout=10)
        assert len(ended) == 8
        await until(lambda: house.server.half_open == 0)
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*reads, return_exceptions=True)
        (await house.dial()).close()


async def test_a_flood_cuts_its_own_connections_and_not_the_one_of_somebody_else() -> None:
    limits = replace(QUICK, half_open=8, half_open_per_host=6, handshake_s=30)
    async with listening(limits) as house:
        port = house.server.port
        others, writer = await asyncio.open_connection("127.0.0.1", port)  # the oldest of all
        flood = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{2 + n % 2}", 0))
            for n in range(20)
        ]
        await until(lambda: sum(reader.at_eof() for reader, _ in flood) >= 12)
        assert house.server.half_open == 8
        assert not others.at_eof()
        for each in (writer, *(w for _, w in flood)):
            each.close()


def at_most(each: float, total: float) -> Limits:
    """So many links, of one peer and of all."""
    limits = {Resource.LINKS: Limit(each, total)}
    return replace(DEFAULT_LIMITS, accounts=ResourceLedger(SystemClock(), limits))


@pytest.mark.parametrize("limits", [(3, 9), (9, 3)])
async def test_open_links_are_capped_and_a_closed_one_makes_room(limits: tuple[int, int]) -> None:
    async with listening(at_most(*limits)) as house:
        links = [await house.dial() for _ in range(3)]
        with pytest.raises(Busy, match="3 links here"):
            await house.dial()
        assert len(house.handlers) == 3
        links.pop().close()
        await until(lambda: len(house.server.links) == 2)
        links.append(await house.dial())
        for link in links:
            link.close()


async def test_the_links_of_one_peer_leave_room_for_another() -> None:
    async with listening(at_most(2, 9)) as house:
        links = [await house.dial() for _ in range(2)]
        other = replace(hello("other"), node_id="another")
        links.append(await connect("127.0.0.1", house.server.port, hello=other, handler=Recorder()))
        assert len(house.server.links) == 3
        for link in links:
            link.close()


async def test_another_path_is_not_found_and_plain_http_is_hung_up_on() -> None:
    async with listening() as house:
        with pytest.raises(InvalidStatus, match="404"):
            await high_client.connect(
                f"ws://127.0.0.1:{house.server.port}/other", proxy=None, compression=None
            )
        reader, writer = await asyncio.open_connection("127.0.0.1", house.server.port)
        writer.write(b"\x16\x03\x01 no http\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_link_stays_and_measures_its_round_trip() -> None:
    """Also where the machine stands still for longer than a peer may be silent."""
    async with listening(QUICK) as house:
        loop = asyncio.get_running_loop()
        began = loop.time()
        link = await house.dial(limits=QUICK)
        quiet_until = loop.time() + 2 * QUICK.silence_s
        await until(lambda: link.rtt_ms is not None and loop.time() > quiet_until)
        assert not link.is_closed
        for end in (link, house.server.links[0]):
            assert end.rtt_ms is not None
            assert 0 < end.rtt_ms < (loop.time() - began) * 1000
        time.sleep(2 * QUICK.silence_s)  # noqa: ASYNC251 - as it does for all on it
        await asyncio.sleep(2 * QUICK.ping_interval_s)
        assert not link.is_closed
        link.close()


@pytest.fixture
def passing_address() -> Iterator[str]:
    """An address of this machine (TEST-NET-1) that can be taken away."""
    address = "192.0.2.201"
    command = [IP, "addr", "add", f"{address}/32", "dev", "lo"]
    try:
        added = subprocess.run(command, capture_output=True, check=False, text=True, timeout=20)
    except FileNotFoundError as error:
        pytest.skip(f"taking an address away needs ip: {error}")
    if added.returncode and "File exists" not in added.stderr:
        pytest.skip(f"taking an address away needs root: {added.stderr.strip()}")
    try:
        yield address
    finally:
        take_away(address)


def take_away(address: str) -> None:
    command = [IP, "addr", "del", f"{address}/32", "dev", "lo"]
    subprocess.run(command, capture_output=True, check=False, timeout=20)


async def test_a_link_ends_with_the_address_that_it_is_at(passing_address: str) -> None:
    """TCP would go on sending from there until the peer was silent for too long."""
    patient = replace(QUICK, silence_s=60.0)
    heard = Recorder()
    async with listening(patient, host=passing_address) as house:
        port = house.server.port
        link = await connect(
            passing_address, port, hello=hello("client"), handler=heard, limits=patient
        )
        await asyncio.sleep(2 * QUICK.ping_interval_s)
        assert not link.is_closed
        await asyncio.to_thread(take_away, passing_address)
        for handler in (heard, house.handlers[0]):
            error = await handler.end()
            assert isinstance(error, AddressLost)
            assert passing_address in error.message
