"""Invitations, each good once: a short code to type, a long link to scan, the window for both.

The code has 22 bits, which is enough because it is only ever tested by talking to the inviter (see
`mesh.identity.pairing`), which allows a few guesses in a few minutes. Knows nothing of sockets.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

import msgpack
from msgspec import Meta

from mesh import codec
from mesh.clock import Clock
from mesh.errors import BadValue, PairingRejected
from mesh.identity.fingerprints import WORDS, id_digest
from mesh.identity.keys import is_node_id
from mesh.identity.roster import TrustLevel
from mesh.types import NodeId

DEFAULT_TTL_S = 180.0
MAX_TTL_S = 3600.0
MAX_GUESSES = 3

_SCHEME = "HEARTHNET:"
_SECRET_BYTES = 16
_LINK_VERSION = 1
_CODE = re.compile(r"([a-z]+)-([a-z]+)-([0-9]{2})")


class Form(StrEnum):
    """The form of an invitation's secret."""

    CODE = "code"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A joiner's secret. `inviter`, `host` and `port` are known from a link only; `among` are the
    only ones that may be the inviter, where that is known from elsewhere."""

    form: Form
    password: bytes = field(repr=False)
    inviter: NodeId | None = None
    host: str | None = None
    port: int | None = None
    among: frozenset[NodeId] | None = None


@dataclass(frozen=True, slots=True)
class Invitation:
    """One offer to join at `level`; good once, for `ttl_s` seconds."""

    code: str = field(repr=False)
    secret: bytes = field(repr=False)
    level: TrustLevel = TrustLevel.MEMBER
    ttl_s: float = DEFAULT_TTL_S

    @classmethod
    def create(
        cls, level: TrustLevel = TrustLevel.MEMBER, ttl_s: float = DEFAULT_TTL_S
    ) -> Invitation:
        """A fresh one. Raises BadValue for a level or lifetime that no invitation may have."""
        if level is TrustLevel.ANCHOR:
            raise BadValue(
                "Nobody is invited as an anchor.",
                fix="Invite as trusted, then run `hearthnet members promote`.",
                param="level",
            )
        if not 0 < ttl_s <= MAX_TTL_S:
            raise BadValue(
                f"An invitation lasts up to {MAX_TTL_S:g} s.", fix="Use less.", param="ttl"
            )
        words = [secrets.choice(WORDS) for _ in range(2)]
        code = "-".join([*words, f"{secrets.randbelow(100):02}"])
        return cls(code, secrets.token_bytes(_SECRET_BYTES), level, ttl_s)

    def link(self, inviter: NodeId, host: str, port: int) -> str:
        """The long form: where the window is, whose it is, and its secret; fit for a QR code."""
        fields = [_LINK_VERSION, host, port, id_digest(inviter), self.secret]
        return _SCHEME + base64.b32encode(msgpack.packb(fields)).decode().rstrip("=")

    def password(self, form: Form) -> bytes:
        """What the exchange is keyed with."""
        return self.code.encode() if form is Form.CODE else self.secret


def parse_ticket(text: str) -> Ticket:
    """Read a code or a link as somebody typed or scanned it.

    Case, and what stands between the words of a code, do not matter. A word that is in no code is
    noticed here, before it costs a guess. Raises BadValue.
    """
    compact = text.strip()
    if compact.upper().startswith(_SCHEME):
        return _parse_link(compact.upper().removeprefix(_SCHEME))
    code = re.sub(r"[\s_.-]+", "-", compact.lower())
    match = _CODE.fullmatch(code)
    if match is None:
        raise BadValue(
            "This is not an invitation code.",
            fix="A code has two words and two digits, for example amber-river-42.",
            param="code",
        )
    for word in match.group(1, 2):
        if word not in WORDS:
            raise BadValue(f"{word!r} is in no code.", fix="Check the spelling.", param="code")
    return Ticket(Form.CODE, code.encode())


class _Link(NamedTuple):
    version: Literal[1]
    host: Annotated[str, Meta(min_length=1, max_length=253)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    digest: bytes
    secret: Annotated[bytes, Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]


def _parse_link(encoded: str) -> Ticket:
    damaged = BadValue("The link is damaged.", fix="Copy it whole, or scan again.", param="code")
    try:
        body = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
        link = codec.convert(codec.unpack(body), _Link)
    except (binascii.Error, ValueError) as error:
        raise damaged from error
    inviter = NodeId("hn1" + base64.b32encode(link.digest).decode().rstrip("=").lower())
    if not is_node_id(inviter):
        raise damaged
    return Ticket(Form.LINK, link.secret, inviter, link.host, link.port)


def qr_code(link: str) -> str:
    """The link as a QR code of half-block characters for a dark terminal."""
    import segno  # with an XML writer: for the few who draw one

    drawn = io.StringIO()
    segno.make(link, error="l", micro=False).terminal(drawn, border=2, compact=True)
    return drawn.getvalue()


class WindowEnding(StrEnum):
    """Why a window is shut."""

    USED = "used"
    GUESSED = "guessed"
    EXPIRED = "expired"
    CLOSED = "closed"


class Window:
    """One invitation's validity: a time, a number of guesses, one success."""

    def __init__(self, invitation: Invitation, clock: Clock) -> None:
        self.invitation = invitation
        self._clock = clock
        self._ends_at = clock.monotonic() + invitation.ttl_s
        self._guesses = 0
        self._ending: WindowEnding | None = None

    @property
    def ending(self) -> WindowEnding | None:
        """Why it is shut; None while it is open."""
        if self._ending is None and self._clock.monotonic() >= self._ends_at:
            self._ending = WindowEnding.EXPIRED
        return self._ending

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires by itself."""
        return max(0.0, self._ends_at - self._clock.monotonic())

    def require_open(self) -> None:
        """Raises PairingRejected when the window is shut."""
        if self.ending is not None:
            raise PairingRejected(
                f"The invitation is no longer valid: {self.ending}.",
                fix="Run `hearthnet invite` again.",
                param="window",
            )

    def guess(self) -> None:
        """Count a guess, before it is looked at. Raises PairingRejected when the window is shut."""
        self.require_open()
        self._guesses += 1

    def missed(self) -> None:
        """The guess was wrong: too many of them burn the invitation."""
        if self._guesses >= MAX_GUESSES:
            self.shut(WindowEnding.GUESSED)

    def shut(self, ending: WindowEnding) -> None:
        """Burn the invitation."""
        if self.ending is None:
            self._ending = ending
