"""Capability tokens for sessions: what an asker sends with `Open`, what a shard makes of it.

A link proves which node is at its other end. The token adds that this node asks for this very
session, now: its signature covers the host, the purpose, the layers, the checkpoint and the number.
It is good once, only over its holder's own link, and can be revoked. It is looked at when a session
is opened, never per step: a session lives on after its token has expired, until it is closed, its
token revoked or its node put out. Both sides of the form are here; links are not.

A token is dated by the host's clock, which the host tells in the hello of each link: nobody's clock
has to be right. A host that lies about it gets tokens that only it would take.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from mesh.clock import Clock, SteadyClock, SystemClock
from mesh.errors import SAME_VERSION, TokenRejected
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsContexts
from mesh.identity.tokens import TokenVerifier, issue
from mesh.types import NodeId
from mesh.wire.messages import Hello, Open, OpenTaps

PERMIT_TTL_S = 60

_CLOCK = "clock_s"
"""The field of a host's hello: Unix seconds, by the clock that it judges tokens by."""

_LATEST_S = 2.0**36  # the year 4147, well within what a datetime holds

_TENSORS = "tensors"
_TAPS = "taps"


def dated(hello: Hello, clock: Clock) -> Hello:
    """A host's hello that tells what time it is by `clock`, by which it judges tokens."""
    return replace(hello, fields={**hello.fields, _CLOCK: clock.now().timestamp()})


def clock_of(host: Hello) -> Clock:
    """The clock of the host whose hello has just come; ours, when it tells none that can be."""
    told = host.fields.get(_CLOCK)
    if type(told) is not float or not 0 <= told < _LATEST_S:
        return SteadyClock(SystemClock().now())
    return SteadyClock(datetime.fromtimestamp(told, UTC))


def permit(key: NodeKey, clock: Clock, host: NodeId, request: Open | OpenTaps) -> str:
    """A token with which `key`'s node may ask `host`, whose clock is given, for this session."""
    return issue(
        key,
        clock,
        holder=key.node_id,
        audience=host,
        subject=_subject(request),
        scope=frozenset({_purpose(request)}),
        ttl_s=PERMIT_TTL_S,
    )


class Permits:
    """Checks the tokens of one shard process. Tokens are by nodes that `tls` lets in."""

    def __init__(self, tls: TlsContexts, clock: Clock) -> None:
        self._verifier = TokenVerifier(tls.own, tls.public_key, clock)
        self._revoked: frozenset[str] = frozenset()

    def take(self, holder: NodeId, request: Open | OpenTaps) -> str:
        """The id of the request's token, which is used up by this. Raises TokenRejected."""
        if not request.token:
            raise TokenRejected(
                "The session was asked for without a token.",
                fix=SAME_VERSION,
                param="form",
            )
        purpose, subject = _purpose(request), _subject(request)
        return self._verifier.take(
            request.token, holder=holder, scope=purpose, subject=subject
        ).token_id

    def revoke(self, token_ids: frozenset[str]) -> None:
        """From now on exactly these ids are revoked."""
        self._revoked = token_ids
        self._verifier.revoke(token_ids)

    def check(self, token_id: str) -> None:
        """Whether a session may go on. Raises TokenRejected."""
        if token_id in self._revoked:
            raise TokenRejected(
                "The session's token was revoked.", fix="Ask for a new session.", param="revoked"
            )


def _purpose(request: Open | OpenTaps) -> str:
    return _TENSORS if isinstance(request, Open) else _TAPS


def _subject(request: Open | OpenTaps) -> str:
    """What a token is about: the session as its `Open` names it."""
    span = f"{request.start}:{request.stop}"
    return f"{request.session}/{span}/{request.weights_sha256}"
