"""What reads bytes that anybody may send. Each target may refuse with a MeshError and nothing else.

A target also checks that what it let through is whole: what was read says the same when written.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mesh import codec
from mesh.clock import SystemClock
from mesh.codec import Fault
from mesh.discovery import advertisement
from mesh.discovery.greeting import from_hello
from mesh.errors import BadFrame, MeshError, PairingRejected, TokenRejected
from mesh.events import decision as decision_codec
from mesh.events import ephemera, messages, types
from mesh.hearth.record import read_record
from mesh.identity import decisions
from mesh.identity.api_keys import ApiKeys
from mesh.identity.certificates import check_certificate
from mesh.identity.invitations import Invitation, Window, parse_ticket
from mesh.identity.pairing import Inviter, Joiner
from mesh.identity.roster import TrustLevel
from mesh.identity.tokens import TokenVerifier
from mesh.models.edits import assemble
from mesh.models.harvest import HarvestBatch
from mesh.private_files import write_private
from mesh.types import NodeId
from mesh.wire.control import frames_for
from mesh.wire.frames import Frame, FrameType, pack_frame
from mesh.wire.limits import DEFAULT_LIMITS
from mesh.wire.messages import Hello
from mesh.wire.protocol import TensorSession
from tests.events.support import key
from tests.wire.support import frames, hello, session_pair

NODE = key(0).node_id
JWS_HEADER = base64.urlsafe_b64encode(b'{"alg":"EdDSA","typ":"JWT"}').rstrip(b"=").decode()
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
    """Every step of pairing, on both sides: anybody may begin and answer, nobody gets in."""
    inviter, joiner, _, reply = opened_pairing()
    joiner.prove(reply)
    refused = []
    for step in (inviter.examine, joiner.read_welcome):
        try:
            step(data)
        except PairingRejected as error:
            refused.append(error)
        else:
            raise AssertionError("nothing made up is ever accepted")
    inviter, joiner = pairing_sides()
    joiner.start()
    begun: list[bytes] = []
    for begin in (inviter.greet, joiner.prove):
        with suppress(PairingRejected):
            begun.append(begin(data))
    if not begun:
        raise next((error for error in refused if error.param == "code"), refused[0])


def pairing_sides() -> tuple[Inviter, Joiner]:
    """Both sides of a new invitation."""
    invitation = Invitation.create()
    ticket = parse_ticket(invitation.code)
    return Inviter(key(0), Window(invitation, SystemClock())), Joiner(key(1), "b", ticket)


def opened_pairing() -> tuple[Inviter, Joiner, bytes, bytes]:
    """Both sides after START and REPLY, and these frames."""
    inviter, joiner = pairing_sides()
    start = joiner.start()
    return inviter, joiner, start, inviter.greet(start)


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
    message = messages.from_dict(_unpacked(data))
    assert messages.from_dict(messages.to_dict(message)) == message


def token(data: bytes) -> None:
    """A capability token: its payload is read before its signature is checked."""
    payload = base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    verifier = TokenVerifier(NODE, lambda _: key(0).public_bytes, SystemClock())
    try:
        verifier.take(f"{JWS_HEADER}.{payload}.{'A' * 86}", holder=NODE, scope="x")
    except TokenRejected as error:
        if error.param != "signature":
            raise
    else:
        raise AssertionError("nothing made up is ever accepted")


def described(data: bytes) -> None:
    """What the opening of a session says of a harvest or an edit."""
    fields = _unpacked(data)
    if "run" in fields:
        batch = HarvestBatch.from_fields(fields)
        assert HarvestBatch.from_fields(batch.to_fields()) == batch
    else:
        for edit in assemble([fields], bytes(8)):
            assert len(edit.data) == 8


def record(data: bytes) -> None:
    """What this node itself has written, and somebody may have damaged."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record.json"
        write_private(path, data)
        if b"hearth_id" in data:
            read_record(path)
        else:
            ApiKeys.load(path)


def form(data: bytes) -> None:
    """The codec by itself, on a form with everything that a form can have."""
    try:
        value = codec.convert(codec.unpack(data), Form)
    except Fault as fault:
        raise BadFrame(f"{fault.field} {fault.why}", fix="") from fault
    assert codec.convert(codec.plain(value), Form) == value


@dataclass(frozen=True, slots=True)
class Inner:
    """A form in a form."""

    text: codec.Text
    count: codec.UInt32 = 0


@dataclass(frozen=True, slots=True)
class Form:
    """All kinds of annotations."""

    inner: Inner
    several: tuple[Inner, ...]
    pair: tuple[codec.Text, bytes]
    number: Annotated[float, codec.finite]
    level: TrustLevel
    by_name: dict[str, codec.Int63]
    maybe: codec.Sha256 | None = None


def _unpacked(data: bytes) -> dict[str, Any]:
    try:
        return codec.unpack_map(data)
    except Fault as fault:
        raise BadFrame(fault.why, fix="") from fault


def _framed(kind: FrameType, sequence: int, chunk: bytes) -> bytes:
    return pack_frame(kind, sequence, 0, chunk[1:])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        frame, session, handshake, pairing, certificate, event, decision, notice, gossip, token,
        described, record, form,
    )
}  # fmt: skip


def attempt(target: str, data: bytes) -> None:
    """Run a target on some bytes; a refusal is as good as an acceptance."""
    with suppress(MeshError):
        TARGETS[target](data)
