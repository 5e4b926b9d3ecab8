"""What reads bytes that anybody may send. Each target may refuse with a MeshError and nothing else.

A target also checks that what it let through is whole: what was read says the same when written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgpack

from mesh.clock import SystemClock
from mesh.discovery import advertisement
from mesh.discovery.greeting import from_hello
from mesh.errors import MeshError
from mesh.events import decision as decision_codec
from mesh.events import ephemera, messages, types
from mesh.identity import decisions
from mesh.identity.certificates import check_certificate
from mesh.identity.invitations import Invitation, Window, parse_ticket
from mesh.identity.pairing import Inviter, Joiner
from mesh.types import NodeId
from mesh.wire.frames import Frame, FrameType, frames_for, pack_frame
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.messages import Hello
from mesh.wire.protocol import TensorSession
from tests.events.support import key
from tests.wire.support import frames, hello, session_pair

MAX_HELD_BYTES = DEFAULT_LIMITS.reassembly_bytes


def frame(data: bytes) -> None:
    """One frame by itself."""
    parsed = Frame.parse(data, DEFAULT_LIMITS.chunk_bytes)
    assert Frame.parse(parsed.serialize(), DEFAULT_LIMITS.chunk_bytes) == parsed
    str(parsed)


def session(data: bytes) -> None:
    """Frames of our making with a body, or as a whole, of somebody else's, on open links."""
    receivers = {name: session_pair(DEFAULT_LIMITS, name)[1] for name in ("tensors", "control")}
    sequences = dict.fromkeys(receivers, 1)
    kinds = list(FrameType)
    for chunk in data.split(b"\xff\xfe"):
        kind = kinds[chunk[0] % len(kinds)] if chunk else FrameType.PING
        purpose = "tensors" if kind in frames_for("tensors") else "control"
        receiver, sequence = receivers[purpose], sequences[purpose]
        sequences[purpose] += 1
        receiver.receive(chunk if not chunk or chunk[0] > 200 else _framed(kind, sequence, chunk))
        assert receiver.held_bytes <= MAX_HELD_BYTES
        if receiver.is_closed:
            break
    for receiver in receivers.values():
        frames(receiver)


def handshake(data: bytes) -> None:
    """The first frame of a link, and what a daemon makes of the hello in it."""
    waiting = TensorSession(hello("waiting"))
    waiting.start()
    for message in waiting.receive(_framed(FrameType.HELLO, 0, b"\0" + data)):
        if isinstance(message, Hello):
            from_hello(message)


def pairing(data: bytes) -> None:
    """Every step of pairing, on both sides."""
    window = Window(Invitation.create(), SystemClock())
    ticket = parse_ticket(window.invitation.code)
    inviter, joiner = Inviter(key(0), window), Joiner(key(1), "b", ticket)
    with suppress(MeshError):
        inviter.greet(data)
    inviter = Inviter(key(0), Window(window.invitation, SystemClock()))
    inviter.greet(joiner.start())
    for step in (inviter.examine, joiner.prove, joiner.read_welcome):
        with suppress(MeshError):
            step(data)
            raise AssertionError("nothing made up is ever accepted")


def certificate(data: bytes) -> None:
    """The certificate of a peer."""
    check_certificate(data)


def event(data: bytes) -> None:
    """An event of the log."""
    decoded = types.decode(data, bytes(types.SIGNATURE_BYTES))
    assert decoded.body == data


def decision(data: bytes) -> None:
    """A decision about members, and what it says."""
    decoded = decision_codec.decode(data, bytes(types.SIGNATURE_BYTES))
    assert decoded.body == data
    said = decisions.decode(decoded.type, decoded.payload)
    if said is not None:
        kind, payload = decisions.encode(said)
        assert decisions.decode(kind, payload) == said


def notice(data: bytes) -> None:
    """A signed notice, and the shards it may list."""
    said = ephemera.decode_notice(data)
    shards = said.payload.get("shards")
    if isinstance(shards, list):
        advertisement.decode_all(shards, host=NodeId(said.node))


def gossip(data: bytes) -> None:
    """What is said about the log."""
    try:
        fields = msgpack.unpackb(data, max_array_len=1024, max_map_len=64)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return
    message = messages.from_dict(fields)
    assert messages.to_dict(message) == fields


def _framed(kind: FrameType, sequence: int, chunk: bytes) -> bytes:
    return pack_frame(kind, sequence, 0, chunk[1:])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (frame, session, handshake, pairing, certificate, event, decision, notice, gossip)
}


def attempt(target: str, data: bytes) -> None:
    """Run a target on some bytes; a refusal is as good as an acceptance."""
    with suppress(MeshError):
        TARGETS[target](data)
