"""Whether a peer reaches this node, asked of it over real links, and knocking at TCP ports."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import datetime, timedelta

import pytest

from mesh.clock import SystemClock
from mesh.discovery.calling_back import CallBacks
from mesh.discovery.knocking import REFUSED, TIMED_OUT, knock
from mesh.errors import ConnectFailed, LinkLost
from mesh.types import NodeId
from mesh.wire.call_back import CallBack, CalledBack
from tests.discovery.network import Node, running
from tests.discovery.test_links import LARGE, SMALL, End, control_link


class WrongClock(SystemClock):
    """An hour ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=1)


class Caller:
    """A node's call-backs on the links of its peering."""

    def __init__(
        self, node: Node, *, clock: SystemClock | None = None, knock_s: float = 2.0
    ) -> None:
        self.node = node
        self.calls = CallBacks(node.peering.links.get, clock or SystemClock(), knock_s=knock_s)


@asynccontextmanager
async def linked(clock: SystemClock | None = None) -> AsyncIterator[tuple[Caller, Caller]]:
    """Two nodes with a link; the clock is the second one's."""
    hearth = secrets.token_hex(8)
    heard: dict[str, Caller] = {}

    def hear(own: str, peer: NodeId, message: object) -> None:
        if isinstance(message, CallBack | CalledBack):
            heard[own].calls.receive(peer, message)

    async with (
        running(hearth, multicast=False, on_message=lambda p, m: hear("one", p, m)) as one,
        running(
            hearth, one.peering.address, multicast=False,
            on_message=lambda p, m: hear("other", p, m),
        ) as other,
    ):  # fmt: skip
        heard |= {"one": Caller(one), "other": Caller(other, clock=clock)}
        await one.event(lambda event: event.type == "peer_up")
        await other.event(lambda event: event.type == "peer_up")
        yield heard["one"], heard["other"]
        for caller in heard.values():
            await caller.calls.close()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and nobody else begins to."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_a_peer_says_which_ports_it_reaches_and_what_its_clock_says() -> None:
    async with linked(WrongClock()) as (one, other):
        with closed_port() as closed:
            open_, asked = one.node.peering.port, other.node.id
            returned = await one.calls.ask(asked, [open_, closed])
            assert returned.found == {open_: "", closed: REFUSED}
            assert returned.ahead_s == pytest.approx(3600, abs=5)
            # And the other way round, over the same link.
            back = await other.calls.ask(one.node.id, [other.node.peering.port])
            assert back.found == {other.node.peering.port: ""}
            assert back.ahead_s == pytest.approx(-3600, abs=5)


async def test_who_asks_twice_at_once_is_told_to_wait() -> None:
    async with linked() as (one, other):
        asked = [one.calls.ask(other.node.id, [one.node.peering.port]) for _ in range(5)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ConnectFailed)]
        assert len(refused) == 4
        assert all("ask again" in str(end) for end in refused)


async def test_nobody_answers_for_another_node() -> None:
    async with linked() as (one, other):
        port = one.node.peering.port
        asked = asyncio.create_task(one.calls.ask(other.node.id, [port]))
        await asyncio.sleep(0)
        one.calls.receive(NodeId("another"), CalledBack(1, 0, ["forged"]))
        assert (await asked).found == {port: ""}


async def test_a_node_of_an_earlier_version_is_sent_nothing_that_it_does_not_know() -> None:
    older = control_link(SMALL, 1, SMALL, End())  # its hello says nothing of it; sending raises
    calls = CallBacks(lambda peer: older, SystemClock())
    with pytest.raises(ConnectFailed, match="cannot call back"):
        await calls.ask(LARGE, [1])


async def test_who_is_not_linked_is_not_asked() -> None:
    async with linked() as (one, _):
        with pytest.raises(LinkLost):
            await one.calls.ask(NodeId("nobody"), [1])


async def test_knocking_tells_closed_from_silent() -> None:
    with closed_port() as closed:
        assert await knock("127.0.0.1", closed, 5) == REFUSED
    with closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        host, port = full.getsockname()
        with closing(socket.create_connection((host, port))):  # its line is full: nobody answers
            waiting = [knock(host, port, 0.2) for _ in range(3)]
            assert TIMED_OUT in await asyncio.gather(*waiting)
    assert await knock("no.such.host.invalid", 1, 5) not in ("", REFUSED)
    assert "0-65535" in await knock("127.0.0.1", 70_000, 5)  # a member may say so of itself
