"""The pairing exchange without I/O: frames in, frames out, one method per step.

SPAKE2 keyed with the invitation's secret, with both sides' public keys as identities. Somebody in
the middle who puts in a key of their own, or who does not know the secret, ends up with another
session key; whoever listens learns the two public keys. The joiner proves first, so that a stranger
who calls the inviter pays one guess for each answer; then everything personal travels encrypted
under the session key.

    joiner                                inviter
    START  form, key             ->
                                 <-       REPLY   key, SPAKE2 message
    PROOF  SPAKE2 message, MAC,  ->
           {name, certificate, signature}
                                 <-       WELCOME MAC, {certificate, signature, hearth, members}
    DONE   {}                    ->

Knows nothing of sockets, time (`Window` does) or of what becomes of a new member.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import msgpack
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from mesh import codec
from mesh.codec import Fault, printable
from mesh.errors import PairingRejected, UntrustedPeer
from mesh.identity.certificates import Certificate, check_certificate, make_certificate
from mesh.identity.decisions import MAX_NAME, Name
from mesh.identity.invitations import Form, Ticket, Window, WindowEnding
from mesh.identity.keys import NodeIdText, NodeKey, node_id
from mesh.identity.roster import Member, TrustLevel
from mesh.types import NodeId

MAX_FRAME_BYTES = 16 << 10
ELSEWHERE = "elsewhere"
"""Why a joiner gives its proof to nobody but those that it knows."""

_VERSION = 1
_DOMAIN = b"hearthnet/pair/v1\0"
_MEMBERS_BYTES = 14 << 10
_SPAKE_BYTES = 33
_MAC_BYTES = 32
T = TypeVar("T")


class _MemberRow(NamedTuple):
    """A member as a welcome lists it."""

    certificate: Certificate
    name: Annotated[str, Meta(max_length=MAX_NAME), printable]
    level: TrustLevel
    added_by: NodeIdText


class _Kind(IntEnum):
    REFUSE = 0
    START = 1
    REPLY = 2
    PROOF = 3
    WELCOME = 4
    DONE = 5


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The joiner: it has proved that it knows the secret and owns the certificate's key."""

    node_id: NodeId
    name: str
    certificate: bytes
    level: TrustLevel


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a new member. The first members are enough to fetch the log and verify it."""

    hearth_id: str
    hearth_name: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The joiner's result: who let it in, and the welcome."""

    inviter: NodeId
    certificate: bytes
    welcome: Welcome


class Inviter:
    """The side that has the window; one per connection. Every method raises PairingRejected."""

    def __init__(self, key: NodeKey, window: Window) -> None:
        self._key = key
        self._window = window
        self._start = self._reply = b""
        self._peer_key = b""
        self._spake: Any = None
        self._keys: _SessionKeys | None = None

    def greet(self, start: bytes) -> bytes:
        """START to REPLY."""
        version, form, self._peer_key = _open(start, _Kind.START, tuple[int, str, bytes])
        if version != _VERSION or form not in set(Form) or len(self._peer_key) != 32:
            _refuse("protocol", "The joiner speaks another version.")
        self._window.require_open()
        password = self._window.invitation.password(Form(form))
        self._spake = SPAKE2_B(
            _password(Form(form), password), idA=_spki_hash(self._peer_key),
            idB=_spki_hash(self._key.public_bytes),
        )  # fmt: skip
        self._start = start
        self._reply = _pack(_Kind.REPLY, self._key.public_bytes, self._spake.start())
        return self._reply

    def examine(self, proof: bytes) -> JoinRequest:
        """PROOF; costs a guess. A right one burns the invitation."""
        message, mac, box = _open(proof, _Kind.PROOF, tuple[bytes, bytes, bytes])
        if len(message) != _SPAKE_BYTES or len(mac) != _MAC_BYTES:
            _refuse("protocol", "The joiner's proof has the wrong form.")
        self._window.guess()
        try:
            keys = _finish(self._spake, message, [self._start, self._reply, message])
            right = hmac.compare_digest(mac, keys.mac(b"joiner"))
        except PairingRejected:
            right = False
        if not right:
            self._window.missed()
            _refuse("code", "The code is wrong.")
        self._window.shut(WindowEnding.USED)
        self._keys = keys
        name, certificate, signature = _fields(keys.open(b"joiner", box), tuple[Name, bytes, bytes])
        _check_peer(keys, b"joiner", self._peer_key, certificate, signature)
        level = self._window.invitation.level
        return JoinRequest(node_id(self._peer_key), name, certificate, level)

    def welcome(self, welcome: Welcome) -> bytes:
        """WELCOME; of the members, as many as fit in a frame, in the order given."""
        keys = self._proven()
        own = make_certificate(self._key)
        body = [own, keys.sign(self._key, b"inviter"), welcome.hearth_id, welcome.hearth_name]
        box = keys.seal(b"inviter", msgpack.packb([*body, _encode_members(welcome.members)]))
        return _pack(_Kind.WELCOME, keys.mac(b"inviter"), box)

    def finish(self, done: bytes) -> None:
        """DONE: the joiner has kept what it was told."""
        (box,) = _open(done, _Kind.DONE, tuple[bytes])
        self._proven().open(b"done", box)

    def _proven(self) -> _SessionKeys:
        if self._keys is None:
            _refuse("protocol", "The joiner has not proved itself.")
        return self._keys


class Joiner:
    """The side that has a ticket. Every method raises PairingRejected."""

    def __init__(self, key: NodeKey, name: str, ticket: Ticket) -> None:
        self._key = key
        self._name = name
        self._ticket = ticket
        self._start = b""
        self._peer_key = b""
        self._keys: _SessionKeys | None = None

    def start(self) -> bytes:
        """START."""
        self._start = _pack(_Kind.START, _VERSION, self._ticket.form, self._key.public_bytes)
        return self._start

    def prove(self, reply: bytes) -> bytes:
        """REPLY to PROOF."""
        self._peer_key, message = _open(reply, _Kind.REPLY, tuple[bytes, bytes])
        if len(self._peer_key) != 32 or len(message) != _SPAKE_BYTES:
            _refuse("protocol", "The inviter's reply has the wrong form.")
        inviter = node_id(self._peer_key)
        if self._ticket.inviter not in (None, inviter):
            _refuse("code", "Another node answers than the one that made the link.")
        if inviter not in (self._ticket.among or {inviter}):
            _refuse(ELSEWHERE, "Another node answers than those that may invite this one.")
        spake = SPAKE2_A(
            _password(self._ticket.form, self._ticket.password),
            idA=_spki_hash(self._key.public_bytes), idB=_spki_hash(self._peer_key),
        )  # fmt: skip
        own = spake.start()
        keys = self._keys = _finish(spake, message, [self._start, reply, own])
        certificate = make_certificate(self._key)
        body = msgpack.packb([self._name, certificate, keys.sign(self._key, b"joiner")])
        return _pack(_Kind.PROOF, own, keys.mac(b"joiner"), keys.seal(b"joiner", body))

    def read_welcome(self, frame: bytes) -> Joined:
        """WELCOME, believed only once the inviter has proved that it knows the secret too."""
        keys = self._keys
        mac, box = _open(frame, _Kind.WELCOME, tuple[bytes, bytes])
        if keys is None or not hmac.compare_digest(mac, keys.mac(b"inviter")):
            _refuse("code", "The other side does not know the code.")
        certificate, signature, hearth_id, hearth_name, members = _fields(
            keys.open(b"inviter", box), tuple[bytes, bytes, str, str, tuple[_MemberRow, ...]]
        )
        _check_peer(keys, b"inviter", self._peer_key, certificate, signature)
        welcome = Welcome(hearth_id, hearth_name, _decode_members(members))
        return Joined(node_id(self._peer_key), certificate, welcome)

    def done(self) -> bytes:
        """DONE, to be sent once the result is kept."""
        assert self._keys is not None  # noqa: S101 - called after `read_welcome`
        return _pack(_Kind.DONE, self._keys.seal(b"done", b""))


def refusal(error: PairingRejected) -> bytes:
    """The frame that tells the other side why, without details."""
    return _pack(_Kind.REFUSE, error.param or "refused")


class _SessionKeys:
    """What both sides derive from the SPAKE2 key and everything that was said before."""

    def __init__(self, secret: bytes, transcript: bytes) -> None:
        self._secret = secret
        self._transcript = transcript

    def mac(self, role: bytes) -> bytes:
        """The proof that `role` has the session key."""
        return hmac.digest(self._derive(b"mac " + role), self._transcript, "sha256")

    def seal(self, role: bytes, body: bytes) -> bytes:
        """Encrypt `role`'s only message; its key is used once, so the nonce can be constant."""
        cipher = ChaCha20Poly1305(self._derive(b"box " + role))
        return cipher.encrypt(bytes(12), body, self._transcript)

    def open(self, role: bytes, box: bytes) -> bytes:
        """Undo `seal`. Raises PairingRejected."""
        cipher = ChaCha20Poly1305(self._derive(b"box " + role))
        try:
            return cipher.decrypt(bytes(12), box, self._transcript)
        except InvalidTag:
            _refuse("protocol", "An encrypted part was changed on its way.")

    def sign(self, key: NodeKey, role: bytes) -> bytes:
        """The proof that `role` owns its node key."""
        return key.sign(self.signed_bytes(role))

    def signed_bytes(self, role: bytes) -> bytes:
        """What `sign` signs."""
        return _DOMAIN + role + b"\0" + self._transcript

    def _derive(self, label: bytes) -> bytes:
        return HKDF(SHA256(), 32, self._transcript, _DOMAIN + label).derive(self._secret)


def _finish(spake: Any, message: bytes, said: Sequence[bytes]) -> _SessionKeys:
    try:
        secret = spake.finish(message)
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise PairingRejected(
            "The other side's message is no group element.", fix=_TRY_AGAIN, param="protocol"
        ) from error
    digest = hashlib.sha256(_DOMAIN)
    for part in said:
        digest.update(len(part).to_bytes(4, "big") + part)
    return _SessionKeys(secret, digest.digest())


def _check_peer(
    keys: _SessionKeys, role: bytes, public: bytes, certificate: bytes, signature: bytes
) -> None:
    """Whether certificate and signature are of the key that the session is bound to."""
    try:
        certified = check_certificate(certificate)
        Ed25519PublicKey.from_public_bytes(public).verify(signature, keys.signed_bytes(role))
    except (UntrustedPeer, InvalidSignature, ValueError) as error:
        raise PairingRejected(
            "The other side does not own its key.", fix=_TRY_AGAIN, param="protocol"
        ) from error
    if certified != public:
        _refuse("protocol", "The other side's certificate is of another key.")


def _password(form: Form, secret: bytes) -> bytes:
    return _DOMAIN + form.encode() + b"\0" + secret


def _spki_hash(public: bytes) -> bytes:
    spki = Ed25519PublicKey.from_public_bytes(public).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).digest()


def _encode_members(members: Sequence[Member]) -> list[list[Any]]:
    encoded: list[list[Any]] = []
    size = 0
    for member in members:
        fields = [member.certificate, member.name, int(member.level), member.added_by]
        size += len(msgpack.packb(fields))
        if size > _MEMBERS_BYTES:
            break
        encoded.append(fields)
    return encoded


def _decode_members(rows: Sequence[_MemberRow]) -> tuple[Member, ...]:
    members = []
    for row in rows:
        key = check_certificate(row.certificate)
        members.append(
            Member(node_id(key), key, row.name, row.level, row.added_by, row.certificate)
        )
    return tuple(members)


# Frames: msgpack arrays whose first element is the kind.


def _pack(kind: _Kind, *fields: Any) -> bytes:
    return bytes(msgpack.packb([int(kind), *fields]))


def _open(frame: bytes, expected: _Kind, form: type[T]) -> T:
    """What a frame says behind its kind; a REFUSE frame is raised as what it says."""
    fields = _unpack(frame)
    if type(fields) is list and fields[:1] == [_Kind.REFUSE] and len(fields) == 2:
        reason = fields[1] if type(fields[1]) is str and fields[1] in _SENTENCES else "refused"
        _refuse(reason, _SENTENCES[reason])
    if type(fields) is not list or not fields or fields[0] != expected:
        _refuse("protocol", f"Expected {expected.name} from the other side.")
    return _typed(fields[1:], form)


def _fields(body: bytes, form: type[T]) -> T:
    return _typed(_unpack(body), form)


def _typed(fields: object, form: type[T]) -> T:
    try:
        return codec.convert(fields, form)
    except Fault as fault:
        raise PairingRejected(
            f"A pairing message has the wrong fields: {fault.field or 'one'} {fault.why}.",
            fix=_TRY_AGAIN,
            param="protocol",
        ) from fault


def _unpack(data: bytes) -> Any:
    if len(data) > MAX_FRAME_BYTES:
        _refuse("protocol", f"A pairing message of {len(data)} bytes is too large.")
    try:
        return codec.unpack(data)
    except Fault as fault:
        raise PairingRejected(
            "A pairing message cannot be read.", fix=_TRY_AGAIN, param="protocol"
        ) from fault


_TRY_AGAIN = "Check that both machines run hearthnet, and invite again."
_SENTENCES = {
    "code": "The code is wrong.",
    "window": "The invitation is no longer valid.",
    "busy": "The inviter has too many callers at the moment.",
    "timeout": "The exchange took too long.",
    "protocol": "The other side did not understand this one.",
    "revoked": "That hearth has revoked the key of this machine, or this machine has left it.",
    "refused": "The other side refused.",
}
_FIXES = {
    "code": "Compare it with what the inviting machine shows, and try again; three wrong ones end"
    " the invitation.",
    "window": "Run `hearthnet invite` again.",
    "busy": "Wait a little, and try again.",
    "refused": "The machine that invites says why; run `hearthnet invite` again there.",
    "revoked": "That key never comes back there; a new --state-dir makes a new one.",
}


def _refuse(reason: str, sentence: str) -> NoReturn:
    raise PairingRejected(sentence, fix=_FIXES.get(reason, _TRY_AGAIN), param=reason)
