"""Sessions on a shard are opened by token only: every wrong one, presented over real mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

from mesh.clock import Clock, SteadyClock, SystemClock
from mesh.errors import MeshError, SessionGone, TokenRejected
from mesh.identity.tls import TlsContexts, require_node
from mesh.identity.tokens import issue
from mesh.pipeline.dialing import secured
from mesh.pipeline.links import HopLinks
from mesh.shard.permits import PERMIT_TTL_S, Permits, clock_of, dated, permit
from mesh.shard.scheduler import Scheduler
from mesh.types import Endpoint, NodeId, WireDtype
from mesh.wire.connection import WebSocketLink
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Failure, Hello, Message, Open, Opened, OpenTaps, Step
from mesh.wire.websocket import connect, serve
from tests.identity.support import ManualClock, Party
from tests.shard.asker import MODEL, SHA, Asker, Attic, settled
from tests.shard.spans import rows

torch.set_num_threads(1)

HOST, HOLDER, THIEF, STRANGER = (Party(n) for n in ("host", "holder", "thief", "stranger"))
OPEN = Open(1, MODEL, SHA, 0, 4, 128, WireDtype.FP32)
MINUTE = timedelta(minutes=1)
TAPS = OpenTaps(1, MODEL, SHA, 0, 4)


@dataclass
class House:
    """A shard behind a listener of `HOST`, whose members are `HOLDER` and `THIEF`."""

    attic: Attic
    clock: ManualClock
    port: int
    steps: list[Step]

    async def asker(self, party: Party) -> Asker:
        asker = Asker()
        client = (await party.trusting(HOST)).client(HOST.id)
        asker.use(
            await connect("127.0.0.1", self.port, hello=party.hello(), handler=asker, ssl=client)
        )
        return asker

    def token(self, party: Party = HOLDER, request: Open | OpenTaps = OPEN) -> str:
        return permit(party.key, self.clock, HOST.id, request)


class CountingQueue(Scheduler):
    """Remembers what it was given to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def submit(self, sequence: Any, step: Step, reply: Any) -> None:
        self.steps.append(step)
        super().submit(sequence, step, reply)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    queue = CountingQueue()
    async with Attic(queue=queue) as attic, listening(attic) as (tls, port):
        clock = ManualClock()
        attic.service.permits = Permits(tls, clock)
        yield House(attic, clock, port, queue.steps)


@asynccontextmanager
async def listening(
    attic: Attic, hello: Callable[[], Hello] = HOST.hello
) -> AsyncIterator[tuple[TlsContexts, int]]:
    tls = await HOST.trusting(HOLDER, THIEF)

    def accept(link: WebSocketLink) -> LinkHandler:
        require_node(link.peer_certificate, link.peer.node_id)
        return attic.service.handler(link)

    server = await serve("127.0.0.1", 0, accept=accept, hello=hello, ssl=tls.server)
    try:
        yield tls, server.port
    finally:
        await server.close(timeout_s=0.1)


async def refused(asker: Asker, request: Open | OpenTaps) -> str | None:
    """Which check refused the session; then its first step is tried all the same."""
    asker.link.send(request)
    answer = await asker.answer()
    assert isinstance(answer, Failure)
    assert answer.error["code"] == TokenRejected.code, answer.error
    asker.send_step(0, 0, rows(2))
    with pytest.raises(SessionGone):
        await asker.hidden(0)
    param: str | None = answer.error["param"]
    return param


Forge = Callable[[House], str]
WRONG: dict[str, tuple[Party, Forge, str]] = {
    "no token": (HOLDER, lambda house: "", "form"),
    "nonsense": (HOLDER, lambda house: "x" * 200, "form"),
    "another holder's": (THIEF, lambda house: house.token(HOLDER), "holder"),
    "for another host": (
        HOLDER, lambda house: permit(HOLDER.key, house.clock, THIEF.id, OPEN), "audience"
    ),
    "for taps": (HOLDER, lambda house: house.token(request=TAPS), "scope"),
    "for other layers": (
        HOLDER, lambda house: house.token(request=replace(OPEN, stop=3)), "subject"
    ),
    "for another session": (
        HOLDER, lambda house: house.token(request=replace(OPEN, session=2)), "subject"
    ),
    "for other weights": (
        HOLDER, lambda house: house.token(request=replace(OPEN, weights_sha256="0")), "subject"
    ),
    "by a stranger": (
        HOLDER,
        lambda house: issue(
            STRANGER.key, house.clock, holder=HOLDER.id, audience=HOST.id,
            subject="1/0:4/" + SHA, scope=frozenset({"tensors"}),
        ),
        "issuer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_token_opens_nothing(name: str, house: House) -> None:
    party, forge, check = WRONG[name]
    asker = await house.asker(party)
    assert await refused(asker, replace(OPEN, token=forge(house))) == check
    # Who is refused keeps the link, and may come with a good one.
    asker.link.send(replace(OPEN, token=house.token(party)))
    assert isinstance(await asker.answer(), Opened)
    assert house.steps == []
    asker.link.close()


async def test_tokens_for_tensors_open_no_taps(house: House) -> None:
    asker = await house.asker(HOLDER)
    assert await refused(asker, replace(TAPS, token=house.token())) == "scope"
    assert await refused(asker, TAPS) == "form"
    asker.link.close()


async def test_expired_and_used_tokens_are_refused(house: House) -> None:
    asker = await house.asker(HOLDER)
    early, used = house.token(), house.token()
    house.clock.seconds += PERMIT_TTL_S + 121
    assert await refused(asker, replace(OPEN, token=early)) == "expiry"
    fresh = house.token()
    asker.link.send(replace(OPEN, token=fresh))
    assert isinstance(await asker.answer(), Opened)
    asker.close()
    assert used != fresh
    assert await refused(asker, replace(OPEN, token=fresh)) == "replay"
    other = await house.asker(HOLDER)
    assert await refused(other, replace(OPEN, token=fresh)) == "replay"
    for each in (asker, other):
        each.link.close()


async def test_a_session_outlives_its_tokens_time(house: House) -> None:
    asker = await house.asker(HOLDER)
    await asker.open(token=house.token())
    house.clock.seconds += 3600
    assert torch.isfinite(await asker.step(0, 0, rows(2))).all()
    asker.link.close()


async def test_revoking_a_token_ends_its_session_and_no_other(house: House) -> None:
    asker = await house.asker(HOLDER)
    await asker.open(token=house.token())
    await asker.open(2, token=house.token(request=replace(OPEN, session=2)))
    first, second = house.attic.service.sessions()
    assert (first["node"], first["purpose"]) == ("holder", "tensors")
    house.attic.service.revoke(frozenset({first["token_id"]}))
    ended = await asker.answer()
    assert isinstance(ended, Failure)
    assert (ended.session, ended.error["param"]) == (1, "revoked")
    with pytest.raises(SessionGone):
        await asker.step(0, 0, rows(2))
    assert torch.isfinite(await asker.step(0, 0, rows(2), session=2)).all()
    assert house.attic.service.sessions() == [second]
    asker.link.close()


async def test_a_session_that_was_ended_while_it_rested_is_not_said_to_be_open(
    house: House,
) -> None:
    asker = await house.asker(HOLDER)
    await asker.open(token=house.token())
    asker.park()
    await settled(lambda: house.attic.server.sessions.parked == 1)
    assert len(house.attic.service.sessions()) == 1
    await house.attic.server.evict()
    assert house.attic.service.sessions() == []
    asker.link.close()


async def test_a_token_revoked_before_it_is_used_opens_nothing(house: House) -> None:
    asker = await house.asker(HOLDER)
    token = house.token()
    verifier_sees = Permits(await HOST.trusting(HOLDER), house.clock)
    house.attic.service.revoke(
        frozenset({verifier_sees.take(HOLDER.id, replace(OPEN, token=token))})
    )
    assert await refused(asker, replace(OPEN, token=token)) == "revoked"
    asker.link.close()


class Waiting:
    """A session's asking end that waits for one answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def message(self, message: Message) -> None:
        self.answer.set_result(message)

    def lost(self, error: MeshError) -> None:
        self.answer.set_exception(error)


async def asking(attic: Attic, tls: TlsContexts, clock: Clock) -> HopLinks:
    """HopLinks of `HOLDER`; the host judges their tokens by `clock`."""
    attic.service.permits = Permits(tls, clock)
    return HopLinks(secured(HOLDER.hello(), await HOLDER.trusting(HOST)))


async def opened(lines: HopLinks, port: int) -> Message:
    """What the host behind `port` answers an asker that opens a session as askers do."""
    line = await lines.link(NodeId(HOST.id), Endpoint(f"wss://127.0.0.1:{port}"))
    waiting = Waiting()
    number = line.register(waiting)
    line.ask([replace(OPEN, session=number)])
    async with asyncio.timeout(10):
        return await waiting.answer


async def test_the_askers_own_lines_bring_a_fresh_token_each_time(house: House) -> None:
    lines = await asking(house.attic, await HOST.trusting(HOLDER), SystemClock())
    for _ in range(2):
        assert isinstance(await opened(lines, house.port), Opened)
    await lines.close()


@pytest.mark.parametrize("told", ["nonsense", float("nan"), -1.0, 1e18, True, None])
def test_a_clock_that_cannot_be_is_not_believed(told: object) -> None:
    ours = datetime.now(UTC)
    assert abs(clock_of(replace(HOST.hello(), fields={"clock_s": told})).now() - ours) < MINUTE


@pytest.mark.parametrize("days", [-1, 1, 4000])
async def test_the_clocks_of_asker_and_host_may_differ_by_days(days: int) -> None:
    clock = SteadyClock(datetime.now(UTC) + timedelta(days=days))
    async with (
        Attic() as attic,
        listening(attic, lambda: dated(HOST.hello(), clock)) as (tls, port),
    ):
        lines = await asking(attic, tls, clock)
        assert isinstance(await opened(lines, port), Opened)
        await lines.close()
    # It is the host's hello that makes the difference: without it the token is not of its time.
    async with Attic() as attic, listening(attic) as (tls, port):
        lines = await asking(attic, tls, clock)
        refusal = await opened(lines, port)
        assert isinstance(refusal, Failure)
        assert refusal.error["param"] == "expiry"
        await lines.close()


async def test_clocks_that_drift_apart_on_one_link_cost_one_session() -> None:
    """The host's time is told once per link; its refusal is what brings a new link."""
    clock = ManualClock()
    async with (
        Attic() as attic,
        listening(attic, lambda: dated(HOST.hello(), clock)) as (tls, port),
    ):
        lines = await asking(attic, tls, clock)
        assert isinstance(await opened(lines, port), Opened)
        clock.seconds += 3600
        assert isinstance(await opened(lines, port), Failure)
        assert isinstance(await opened(lines, port), Opened)
        await lines.close()
