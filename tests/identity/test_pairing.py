"""Pairing over real sockets: the happy way, and everybody who should not get in."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import Busy, ConnectFailed, MeshError, PairingRejected
from mesh.identity.invitations import Invitation, Ticket, Window, WindowEnding, parse_ticket
from mesh.identity.keys import NodeKey
from mesh.identity.pairing import MAX_FRAME_BYTES, Inviter, Joined, Joiner, JoinRequest, Welcome
from mesh.identity.pairing_tcp import DEFAULT_LIMITS, PairingLimits, PairingListener, join, listen
from mesh.identity.roster import Member, TrustLevel
from tests.identity.support import ManualClock, Party, new_key

HEARTH = "hh1" + "a" * 32
HOME_NAME = "Grandmother's machine"


@dataclass
class Open:
    """An open window of `home`, and what came of it."""

    home: Party
    invitation: Invitation
    window: Window
    listener: PairingListener
    admitted: list[JoinRequest] = field(default_factory=list)

    async def join(self, guest: Party, text: str, port: int | None = None) -> Joined:
        kept: list[Joined] = []

        async def keep(joined: Joined) -> None:
            kept.append(joined)

        joined = await join(
            "127.0.0.1", port or self.listener.port, key=guest.key, name=guest.name,
            ticket=parse_ticket(text), keep=keep,
        )  # fmt: skip
        assert kept == [joined]
        return joined

    async def miss(self, guest: Party, times: int) -> None:
        """Guess wrong so often; each is answered as a wrong guess at an open window."""
        for _ in range(times):
            with pytest.raises(PairingRejected) as caught:
                await self.join(guest, wrong(self.invitation.code))
            assert caught.value.param == "code"

    @property
    def link(self) -> str:
        return self.invitation.link(self.home.id, "127.0.0.1", self.listener.port)


def card(party: Party) -> Member:
    return Member(
        party.id, party.key.public_bytes, party.name, TrustLevel.ANCHOR, party.id,
        party.certificate,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def open_window(
    limits: PairingLimits = DEFAULT_LIMITS,
    refuse: MeshError | None = None,
    others: int = 0,
    ttl_s: float = 60,
    host: str | Callable[[str], bool] = "127.0.0.1",
) -> AsyncIterator[Open]:
    home = Party(HOME_NAME)
    invitation = Invitation.create(TrustLevel.TRUSTED, ttl_s)
    window = Window(invitation, ManualClock())

    async def admit(request: JoinRequest) -> Welcome:
        if refuse is not None:
            raise refuse
        opened.admitted.append(request)
        members = (card(home), *(card(Party(f"member {n}")) for n in range(others)))
        return Welcome(HEARTH, "Our home", members)

    listener = await listen(host, 0, key=home.key, window=window, admit=admit, limits=limits)
    opened = Open(home, invitation, window, listener)
    try:
        yield opened
    finally:
        await listener.close()


@pytest.fixture
def guest() -> Party:
    return Party("guest")


def wrong(code: str) -> str:
    """Another valid code."""
    first, second, digits = code.split("-")
    return f"{first}-{second}-{(int(digits) + 1) % 100:02}"


# How it should go.


def test_a_point_off_the_curve_is_a_wrong_guess() -> None:
    home, guest = Party("home"), Party("guest")
    window = Window(Invitation.create(), ManualClock())
    for left in (2, 1, 0):
        inviter = Inviter(home.key, window)
        joiner = Joiner(guest.key, "guest", parse_ticket(window.invitation.code))
        inviter.greet(joiner.start())
        off_curve = b"A" + (2).to_bytes(32, "little")
        with pytest.raises(PairingRejected) as caught:
            inviter.examine(msgpack.packb([3, off_curve, bytes(32), b""]))
        assert caught.value.param == "code"
        assert (window.ending is WindowEnding.GUESSED) == (left == 0)
    assert window.ending is WindowEnding.GUESSED


@pytest.mark.parametrize("form", ["code", "link"])
async def test_both_sides_end_up_with_each_others_certificate(form: str, guest: Party) -> None:
    async with open_window() as opened:
        text = opened.invitation.code if form == "code" else opened.link
        joined = await opened.join(guest, text)
        ending, request = await opened.listener.wait()
    assert ending is WindowEnding.USED
    assert request == JoinRequest(guest.id, "guest", guest.certificate, TrustLevel.TRUSTED)
    assert opened.admitted == [request]
    assert joined.inviter == opened.home.id
    assert joined.certificate == opened.home.certificate
    assert joined.welcome == Welcome(HEARTH, "Our home", (card(opened.home),))


async def test_the_window_is_open_at_some_addresses_of_this_machine_only(guest: Party) -> None:
    async with open_window(host={"127.0.0.1"}.__contains__) as opened:
        reader, writer = await asyncio.open_connection("127.0.0.2", opened.listener.port)
        async with asyncio.timeout(5):
            # cut off before a word was said
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.close()
        await opened.join(guest, opened.invitation.code)


@pytest.mark.parametrize("spelling", ["upper", "spaces", "dots"])
async def test_code_may_be_typed_as_it_was_heard(spelling: str, guest: Party) -> None:
    change = {
        "upper": str.upper,
        "spaces": lambda code: f"  {code.replace('-', ' ')} ",
        "dots": lambda code: code.replace("-", "."),
    }[spelling]
    async with open_window() as opened:
        await opened.join(guest, change(opened.invitation.code))


async def test_large_hearth_still_fits_in_a_frame(guest: Party) -> None:
    async with open_window(others=60) as opened:
        joined = await opened.join(guest, opened.invitation.code)
    assert joined.welcome.members[0] == card(opened.home)
    assert 20 < len(joined.welcome.members) < 61


async def test_invitation_is_good_once(guest: Party) -> None:
    async with open_window() as opened:
        await opened.join(guest, opened.invitation.code)
        await opened.listener.wait()
        with pytest.raises((ConnectFailed, PairingRejected)):
            await opened.join(Party("second"), opened.invitation.code)
    assert len(opened.admitted) == 1


async def test_listener_is_gone_when_the_time_is_up(guest: Party) -> None:
    async with open_window(ttl_s=0.05) as opened:
        assert await opened.listener.wait() == (WindowEnding.EXPIRED, None)
        with pytest.raises(ConnectFailed):
            await opened.join(guest, opened.invitation.code)


async def test_expired_window_refuses_who_is_connected_already(guest: Party) -> None:
    clock = ManualClock()
    window = Window(Invitation.create(), clock)
    inviter = Inviter(Party("home").key, window)
    joiner = Joiner(guest.key, "guest", parse_ticket(window.invitation.code))
    reply = inviter.greet(joiner.start())
    clock.seconds += 200
    with pytest.raises(PairingRejected) as caught:
        inviter.examine(joiner.prove(reply))
    assert caught.value.param == "window"


async def test_refused_joiner_is_told(guest: Party) -> None:
    async with open_window(refuse=Busy("The log is full.", fix="")) as opened:
        with pytest.raises(PairingRejected) as caught:
            await opened.join(guest, opened.invitation.code)
        assert caught.value.param == "refused"
        assert await opened.listener.wait() == (WindowEnding.USED, None)


# Guessing.


async def test_three_wrong_codes_burn_the_invitation(guest: Party) -> None:
    async with open_window() as opened:
        for still_open in (True, True, False):
            with pytest.raises(PairingRejected) as caught:
                await opened.join(guest, wrong(opened.invitation.code))
            assert caught.value.param == "code"
            assert (opened.window.ending is None) == still_open
        assert await opened.listener.wait() == (WindowEnding.GUESSED, None)
        with pytest.raises((ConnectFailed, PairingRejected)):
            await opened.join(guest, opened.invitation.code)
    assert opened.admitted == []


async def test_guesses_made_at_the_same_time_count_alike() -> None:
    limits = PairingLimits(callers_per_host=8)
    async with open_window(limits) as opened:
        code = wrong(opened.invitation.code)
        results = await asyncio.gather(
            *(opened.join(Party(f"{n}"), code) for n in range(8)), return_exceptions=True
        )
        assert [type(r) for r in results] == [PairingRejected] * 8
        reasons = [r.param for r in results if isinstance(r, PairingRejected)]
        assert reasons.count("code") <= 3
        assert opened.window.ending is WindowEnding.GUESSED


async def test_wrong_word_is_noticed_before_it_costs_a_guess() -> None:
    with pytest.raises(MeshError) as caught:
        parse_ticket("amber-rivver-42")
    assert "rivver" in str(caught.value)


async def test_short_code_does_not_open_the_long_form(guest: Party) -> None:
    """The two secrets are apart: knowing one form's does not help with the other."""
    async with open_window() as opened:
        ticket = parse_ticket(opened.link)
        forged = Ticket(ticket.form, opened.invitation.code.encode())
        with pytest.raises(PairingRejected):
            await join(
                "127.0.0.1", opened.listener.port, key=guest.key, name="guest", ticket=forged,
                keep=_keep_nothing,
            )  # fmt: skip
    assert opened.admitted == []


# Somebody in between.


@dataclass
class Relay:
    """Sits between joiner and inviter; `tamper` changes frames; keeps all it saw."""

    port: int
    tamper: Callable[[str, int, bytes], bytes]
    seen: bytes = b""

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._relay, "127.0.0.1", 0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump("joiner", reader, there[1]))
            group.create_task(self._pump("inviter", there[0], writer))

    async def _pump(
        self, who: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = 0
        try:
            while True:
                (length,) = struct.unpack(">H", await reader.readexactly(2))
                frame = await reader.readexactly(length)
                number += 1
                self.seen += frame
                frame = self.tamper(who, number, frame)
                writer.write(struct.pack(">H", len(frame)) + frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def test_relay_that_puts_in_its_own_key_is_detected(guest: Party) -> None:
    """Both sides think that they talk to the relay's key; the session keys then differ."""
    relay_key = Party("relay").key

    def tamper(who: str, number: int, frame: bytes) -> bytes:
        fields = msgpack.unpackb(frame)
        if number == 1 and who == "joiner":
            fields[3] = relay_key.public_bytes
        elif number == 1 and who == "inviter":
            fields[1] = relay_key.public_bytes
        return bytes(msgpack.packb(fields))

    async with open_window() as opened:
        relay = Relay(opened.listener.port, tamper)
        async with await relay.serve() as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(PairingRejected) as caught:
                await opened.join(guest, opened.invitation.code, port)
        assert caught.value.param == "code"
        await opened.miss(guest, 1)
        assert opened.window.ending is None
        await opened.miss(guest, 1)
        assert opened.window.ending is WindowEnding.GUESSED
    assert opened.admitted == []


async def test_relay_that_changes_what_is_encrypted_is_detected(guest: Party) -> None:
    def tamper(who: str, number: int, frame: bytes) -> bytes:
        if (who, number) != ("joiner", 2):
            return frame
        fields = msgpack.unpackb(frame)
        fields[3] = fields[3][:-1] + bytes([fields[3][-1] ^ 1])
        return bytes(msgpack.packb(fields))

    async with open_window() as opened, await Relay(opened.listener.port, tamper).serve() as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PairingRejected):
            await opened.join(guest, opened.invitation.code, port)
    assert opened.admitted == []


async def test_rogue_inviter_that_does_not_know_the_code_gets_no_member(guest: Party) -> None:
    """It accepts every proof, but cannot make its own."""
    rogue = Party("rogue")
    window = Window(Invitation.create(), ManualClock())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read() -> bytes:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
            return await reader.readexactly(length)

        def write(frame: bytes) -> None:
            writer.write(struct.pack(">H", len(frame)) + frame)

        write(Inviter(rogue.key, window).greet(await read()))
        await read()
        write(bytes(msgpack.packb([4, bytes(32), bytes(64)])))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(PairingRejected) as caught:
            await join(
                "127.0.0.1", server.sockets[0].getsockname()[1], key=guest.key, name="guest",
                ticket=parse_ticket(wrong(window.invitation.code)), keep=_keep_nothing,
            )  # fmt: skip
    assert caught.value.param == "code"


async def test_link_pins_the_inviters_key(guest: Party) -> None:
    """Even an inviter that knows the secret must have the key whose hash is in the link."""
    async with open_window() as opened:
        other = opened.invitation.link(Party("other").id, "127.0.0.1", opened.listener.port)
        with pytest.raises(PairingRejected):
            await opened.join(guest, other)
        await opened.miss(guest, 2)
        assert opened.window.ending is None
    assert opened.admitted == []


async def test_listener_in_between_learns_neither_code_nor_roster(guest: Party) -> None:
    async with open_window() as opened:
        relay = Relay(opened.listener.port, lambda who, number, frame: frame)
        async with await relay.serve() as server:
            port = server.sockets[0].getsockname()[1]
            await opened.join(guest, opened.invitation.code, port)
            await opened.listener.wait()
    assert len(relay.seen) > 1000
    hidden = [
        opened.invitation.code.encode(), opened.invitation.secret, HEARTH.encode(), b"Our home",
        HOME_NAME.encode(), opened.home.certificate[:64], guest.certificate[:64], b"guest",
        *(word.encode() for word in opened.invitation.code.split("-")[:2]),
    ]  # fmt: skip
    assert [secret for secret in hidden if secret in relay.seen] == []
    # What it saw cannot be replayed either: the invitation is used up, and the session is another.
    assert opened.window.ending is WindowEnding.USED


# Nonsense.


async def talk(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">H", MAX_FRAME_BYTES + 1),
        struct.pack(">H", 0),
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        struct.pack(">H", 5) + b"\xdd\xff\xff\xff\xff",
        struct.pack(">H", 3) + msgpack.packb([0, []]),
        struct.pack(">H", 8) + b"\x91" * 8,
    ],
)
async def test_nonsense_ends_the_call_and_costs_no_guess(data: bytes, guest: Party) -> None:
    async with open_window() as opened:
        answer = await talk(opened.listener.port, data)
        assert len(answer) < 32
        await opened.miss(guest, 2)
        await opened.join(guest, opened.invitation.code)


async def test_silent_caller_is_hung_up_on_and_does_not_block_others(guest: Party) -> None:
    limits = PairingLimits(frame_s=2.5)
    async with open_window(limits) as opened:
        silent = asyncio.create_task(talk(opened.listener.port, b""))
        await opened.join(guest, opened.invitation.code)
        answer = await silent
        assert answer == b"" or msgpack.unpackb(answer[2:]) == [0, "timeout"]


async def test_caller_who_sends_one_byte_at_a_time_is_hung_up_on() -> None:
    limits = PairingLimits(frame_s=0.2)
    async with open_window(limits) as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.listener.port)
        frame = struct.pack(">H", 100) + bytes(100)

        async def drip() -> None:
            for byte in frame:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(20):
            answer = await reader.read(64)
            with contextlib.suppress(ConnectionError):  # where the last byte was not read any more
                assert await reader.read() == b""
        assert msgpack.unpackb(answer[2:]) == [0, "timeout"]
        dripping.cancel()
        writer.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_who_listens_for_something_else_is_told_from_an_inviter(
    said: bytes, guest: Party
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PairingRejected, match=f"127.0.0.1:{port} hung up") as caught:
            await join(
                "127.0.0.1", port, key=guest.key, name="guest",
                ticket=parse_ticket("amber-river-42"), keep=_keep_nothing,
            )  # fmt: skip
    assert "a node's own port is another" in caught.value.fix


async def test_inviter_that_never_answers_times_out(guest: Party) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(PairingRejected) as caught:
            await join(
                "127.0.0.1", server.sockets[0].getsockname()[1], key=guest.key, name="guest",
                ticket=parse_ticket("amber-river-42"), keep=_keep_nothing,
                limits=PairingLimits(frame_s=0.1),
            )  # fmt: skip
    assert caught.value.param == "timeout"


async def test_callers_are_slowed_down() -> None:
    limits = PairingLimits(starts=2)
    async with open_window(limits) as opened:
        start = Joiner(Party("x").key, "x", parse_ticket("amber-river-42")).start()
        answers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.listener.port)
            writer.write(struct.pack(">H", len(start)) + start)
            (length,) = struct.unpack(">H", await reader.readexactly(2))
            answers.append(msgpack.unpackb(await reader.readexactly(length))[:1])
            writer.close()
        assert answers == [[2], [2], [0]]


async def test_one_host_cannot_take_all_places() -> None:
    limits = PairingLimits(callers=4, callers_per_host=2)
    async with open_window(limits) as opened:
        places = [
            await asyncio.open_connection("127.0.0.1", opened.listener.port) for _ in range(3)
        ]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(places[2][0].readexactly(1), 5)
        for _, writer in places:
            writer.close()


async def call(opened: Open, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", opened.listener.port, local_addr=(host, 0))


@pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.1 is its only loopback address")
async def test_those_who_take_all_places_and_all_starts_make_room_for_another() -> None:
    async with open_window(PairingLimits(callers=4, callers_per_host=2)) as opened:
        silent = [await call(opened, host) for host in ("127.0.0.2", "127.0.0.3") for _ in "ab"]
        start = Joiner(Party("x").key, "x", parse_ticket("amber-river-42")).start()
        for _ in range(12):
            reader, writer = await call(opened, "127.0.0.4")
            writer.write(struct.pack(">H", len(start)) + start)
            await asyncio.wait_for(reader.readexactly(2), 5)
            writer.close()
        guest = Party("guest")
        assert (await opened.join(guest, opened.invitation.code)).welcome.hearth_id == HEARTH
        for _, writer in silent:
            writer.close()


class Posing(NodeKey):
    """Somebody who has the code and says that another's key, or another's certificate, is his."""

    def __init__(self, lie: str) -> None:
        super().__init__(Ed25519PrivateKey.generate())
        other = new_key()
        if lie == "key":
            self.public_bytes = other.public_bytes
        elif lie == "certificate":
            self.to_pem = other.to_pem  # type: ignore[method-assign]


@pytest.mark.parametrize("who", ["joiner", "inviter"])
@pytest.mark.parametrize(
    ("lie", "said"), [("key", "does not own its key"), ("certificate", "of another key"), ("", "")]
)
def test_whoever_has_the_code_proves_its_key_and_shows_its_own_certificate(
    who: str, lie: str, said: str
) -> None:
    window = Window(Invitation.create(), ManualClock())
    inviter = Inviter(Posing(lie if who == "inviter" else ""), window)
    ticket = parse_ticket(window.invitation.code)
    joiner = Joiner(Posing(lie if who == "joiner" else ""), "guest", ticket)
    with pytest.raises(PairingRejected, match=said) if lie else contextlib.nullcontext():
        inviter.examine(joiner.prove(inviter.greet(joiner.start())))
        joiner.read_welcome(inviter.welcome(Welcome(HEARTH, HOME_NAME, ())))


def test_frames_of_another_form_cost_no_guess() -> None:
    home, window = Party("home"), Window(Invitation.create(), ManualClock())
    ticket = parse_ticket(window.invitation.code)
    fine = [1, 1, "code", new_key().public_bytes]
    for place, other in ((1, 2), (2, "word"), (3, bytes(31))):
        start = msgpack.packb([*fine[:place], other, *fine[place + 1 :]])
        with pytest.raises(PairingRejected, match="another version"):
            Inviter(home.key, window).greet(start)
    for message, mac in ((bytes(32), bytes(32)), (bytes(33), bytes(31))):
        inviter = Inviter(home.key, window)
        inviter.greet(msgpack.packb(fine))
        with pytest.raises(PairingRejected, match="wrong form"):
            inviter.examine(msgpack.packb([3, message, mac, b""]))
    for public, message in ((bytes(31), bytes(33)), (home.key.public_bytes, bytes(32))):
        with pytest.raises(PairingRejected, match="wrong form"):
            Joiner(new_key(), "guest", ticket).prove(msgpack.packb([2, public, message]))
    for _ in range(2):  # the third one is the last
        window.guess()
        window.missed()
    assert window.ending is None


_FRAMES = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.binary(max_size=40)
        | st.text(max_size=10) | st.just(bytes(32)) | st.just(b"A" + bytes(32)),
        lambda inner: st.lists(inner, max_size=5),
        max_leaves=8,
    ).map(lambda value: bytes(msgpack.packb(value))),
)  # fmt: skip
_KEYS = (Party("a").key, Party("b").key)


@given(st.sampled_from([1, 2, 3, 4, 5]), _FRAMES, st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=60)
def test_no_frame_does_anything_but_be_refused(kind: int, junk: bytes, fields: list[bytes]) -> None:
    window = Window(Invitation.create(), ManualClock())
    ticket = parse_ticket(window.invitation.code)
    for frame in (junk, bytes(msgpack.packb([kind, *fields]))):
        inviter, joiner = Inviter(_KEYS[0], window), Joiner(_KEYS[1], "b", ticket)
        _refused(inviter.greet, frame)
        inviter.greet(joiner.start())
        _refused(inviter.examine, frame)
        _refused(joiner.prove, frame)
        _refused(joiner.read_welcome, frame)
        if window.ending:
            window = Window(window.invitation, ManualClock())


def _refused(step: Callable[[bytes], object], frame: bytes) -> None:
    with pytest.raises(PairingRejected):
        step(frame)


async def _keep_nothing(_: Joined) -> None:
    return None
