"""Capability tokens: signed permission for one holder to do one thing at one node for a while.

Compact JWS (RFC 7515) with EdDSA, readable by any JOSE library. No bearer tokens: the holder
(`cnf`, RFC 7800) has to be the peer of the link that presents it. No chains: the issuer is a
member, and its signature is by its node key. Knows nothing of links; the caller says who holds the
other end.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from mesh import codec
from mesh.clock import Clock
from mesh.codec import Fault
from mesh.errors import TokenRejected
from mesh.identity.keys import NodeIdText, NodeKey
from mesh.types import NodeId

MAX_TTL_S = 600
SKEW_S = 120
"""How far the verifier's clock may be from the one that the token was dated by."""

MAX_TOKEN_BYTES = 2048
REPLAY_ENTRIES = 16_384
"""Tokens of one holder that are remembered at a time: ninety a second, if they live a minute."""

_MAX_TEXT = 256
_FIX = "Ask the issuer for a new token."


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """The content of a token. Times are Unix seconds by the clock that `issue` was given.

    `audience` is the node that is to honour it, `holder` the node that may use it, `subject` what
    it is about (a session, a job), `scope` the purposes it is good for.
    """

    issuer: NodeId
    subject: str
    audience: NodeId
    holder: NodeId
    scope: frozenset[str]
    issued_at: int
    expires_at: int
    token_id: str


def issue(
    key: NodeKey,
    clock: Clock,
    *,
    holder: NodeId,
    audience: NodeId,
    subject: str,
    scope: frozenset[str],
    ttl_s: int = MAX_TTL_S,
) -> str:
    """A token by `key`'s node. ValueError for a lifetime, subject or scope that none may have."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"a token lives 1 to {MAX_TTL_S} seconds, not {ttl_s}")
    if not 0 < len(subject) <= _MAX_TEXT or not scope or any(" " in s or not s for s in scope):
        raise ValueError("a token needs a subject and at least one scope, without spaces")
    now = int(clock.now().timestamp())
    claims = {
        "iss": key.node_id,
        "sub": subject,
        "aud": audience,
        "scope": " ".join(sorted(scope)),
        "exp": now + ttl_s,
        "iat": now,
        "jti": secrets.token_urlsafe(16),
        "cnf": {"kid": holder},
    }
    payload = _encode(json.dumps(claims, separators=(",", ":")).encode())
    signed = f"{_HEADER}.{payload}"
    return f"{signed}.{_encode(key.sign(signed.encode()))}"


class TokenVerifier:
    """Checks tokens presented to one node. `public_key` gives a member's raw key, or None.

    Remembers each token until it expires, so that none is taken twice; memory is bounded for each
    holder, and the holder for whom there is no room left is refused. What was taken before a
    restart is forgotten: only the holder itself could present it again, and only until it expires.
    """

    def __init__(
        self,
        audience: NodeId,
        public_key: Callable[[NodeId], bytes | None],
        clock: Clock,
        *,
        replay_entries: int = REPLAY_ENTRIES,
    ) -> None:
        self._replay_entries = replay_entries
        self._audience = audience
        self._public_key = public_key
        self._clock = clock
        self._seen: dict[NodeId, dict[str, int]] = {}
        self._revoked: frozenset[str] = frozenset()

    def revoke(self, token_ids: frozenset[str]) -> None:
        """From now on exactly these ids are revoked."""
        self._revoked = token_ids

    def take(
        self, token: str, *, holder: NodeId, scope: str, subject: str | None = None
    ) -> TokenClaims:
        """Accept a token from the link to `holder` for `scope`, once.

        Raises TokenRejected, whose `param` is the check that failed: form, signature, issuer,
        audience, holder, subject, scope, expiry, revoked or replay.
        """
        claims = self._authentic(token)
        if claims.audience != self._audience:
            _reject("audience", "is for another node")
        if claims.holder != holder:
            _reject("holder", "belongs to another node than the one that presents it")
        if subject is not None and claims.subject != subject:
            _reject("subject", "is about something else")
        if scope not in claims.scope:
            _reject("scope", f"does not allow {scope}")
        self.check(claims)
        self._take_once(claims)
        return claims

    def check(self, claims: TokenClaims) -> None:
        """Whether a taken token still holds; for sessions that outlive a check.

        Raises TokenRejected (expiry, revoked, issuer).
        """
        now = self._clock.now().timestamp()
        if not claims.issued_at - SKEW_S <= now <= claims.expires_at + SKEW_S:
            _reject("expiry", "has expired, or is dated by another clock than this node's")
        if claims.token_id in self._revoked:
            _reject("revoked", "was revoked")
        if self._public_key(claims.issuer) is None:
            _reject("issuer", "comes from a node that is not a member")

    def _authentic(self, token: str) -> TokenClaims:
        """The claims, once the issuer's signature holds: nothing else is looked at before."""
        signed, payload, signature = _split(token)
        claims = _read_claims(payload)
        key = self._public_key(claims.issuer)
        if key is None:
            _reject("issuer", "comes from a node that is not a member")
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
        except InvalidSignature:
            _reject("signature", "was not signed by its issuer")
        return claims

    def _take_once(self, claims: TokenClaims) -> None:
        seen = self._seen.setdefault(claims.holder, {})
        if claims.token_id in seen:
            _reject("replay", "was used before")
        if len(seen) >= self._replay_entries:
            now = self._clock.now().timestamp()
            seen = {t: until for t, until in seen.items() if until + SKEW_S >= now}
            self._seen[claims.holder] = seen
            if len(seen) >= self._replay_entries:
                _reject("replay", "comes while too many others are valid")
        seen[claims.token_id] = claims.expires_at


def _split(token: str) -> tuple[bytes, bytes, bytes]:
    """What is signed, the payload, the signature."""
    parts = token.split(".") if len(token) <= MAX_TOKEN_BYTES and token.isascii() else []
    # The header is compared, not parsed: the algorithm is ours to choose, not the sender's.
    if len(parts) != 3 or parts[0] != _HEADER:
        _reject("form", "is not an EdDSA token of hearthnet")
    return f"{parts[0]}.{parts[1]}".encode(), _decode(parts[1]), _decode(parts[2])


_Label = Annotated[str, Meta(min_length=1, max_length=_MAX_TEXT)]
_Time = Annotated[int, Meta(ge=0, lt=1 << 53)]


@dataclass(frozen=True, slots=True)
class _Confirmation:
    kid: NodeIdText


@dataclass(frozen=True, slots=True)
class _Payload:
    """The claims by their registered names (RFC 7519, RFC 7800)."""

    iss: NodeIdText
    sub: _Label
    aud: NodeIdText
    cnf: _Confirmation
    scope: _Label
    iat: _Time
    exp: _Time
    jti: _Label


def _read_claims(payload: bytes) -> TokenClaims:
    try:
        said = codec.convert(codec.parse_json(payload), _Payload)
    except Fault as fault:
        raise TokenRejected(
            f"The token cannot be read: {fault.field} {fault.why}.", fix=_FIX, param="form"
        ) from fault
    if not 0 < said.exp - said.iat <= MAX_TTL_S:
        _reject("form", f"lives longer than {MAX_TTL_S} s")
    scope = frozenset(said.scope.split(" "))
    return TokenClaims(
        said.iss, said.sub, said.aud, said.cnf.kid, scope, said.iat, said.exp, said.jti
    )


def _reject(check: str, why: str) -> NoReturn:
    raise TokenRejected(f"The token {why}.", fix=_FIX, param=check)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise TokenRejected("The token is not base64url.", fix=_FIX, param="form") from error
    if _encode(data) != text:  # one token, one spelling
        _reject("form", "is not written canonically")
    return data


_HEADER = _encode(b'{"alg":"EdDSA","typ":"JWT"}')
