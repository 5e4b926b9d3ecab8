"""Signed short-lived advertisements: the newest of each node and key, for as long as it says.

Beside the log, never in it. Whoever receives one counts its life on its own monotonic clock, so no
other machine's clock matters. Knows nothing of what is advertised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from mesh.clock import Clock
from mesh.errors import BadEvent
from mesh.events.types import MAX_INT63, SIGNATURE_BYTES, Sign, is_plain
from mesh.types import NodeId

VERSION = 1
DOMAIN = b"hearthnet/ephemeral/v1\0"
MAX_TTL_S = 60.0
MAX_BYTES = 16 << 10
MAX_KEYS_PER_NODE = 64
MAX_NODES = 256
_MAX_ELEMENTS = 1024

VerifyBytes = Callable[[NodeId, bytes, bytes], bool]
"""Whether the third argument is the node's signature of the second; False for unknown nodes."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One advertisement. `epoch` grows with every start of its node, `counter` within one."""

    hearth_id: str
    node: NodeId
    key: str
    epoch: int
    counter: int
    ttl_ms: int
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    notice: Notice
    until: float


def seal_notice(notice: Notice, sign: Sign) -> tuple[bytes, bytes]:
    """Its body and signature. Raises BadEvent for a payload that is not plain or too large."""
    body: bytes = msgpack.packb(
        [
            VERSION, notice.hearth_id, notice.node, notice.key, notice.epoch, notice.counter,
            notice.ttl_ms, notice.payload,
        ]
    )  # fmt: skip
    decode_notice(body)
    return body, sign(DOMAIN + body)


def decode_notice(body: bytes) -> Notice:
    """Read an advertisement's bytes, as strictly as events. Raises BadEvent."""
    if len(body) > MAX_BYTES:
        raise _unusable(f"it has {len(body)} bytes")
    try:
        fields = msgpack.unpackb(body, max_array_len=_MAX_ELEMENTS, max_map_len=_MAX_ELEMENTS)
    # msgpack raises whatever the input provokes: all of it means that this is no advertisement.
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise _unusable(str(error)) from error
    if type(fields) is not list or len(fields) != 8 or not is_plain(fields):
        raise _unusable("it has another shape than this version knows")
    version, hearth_id, node, key, epoch, counter, ttl_ms, payload = fields
    if (
        type(version) is not int
        or version != VERSION
        or any(type(text) is not str or not 0 < len(text) <= 512 for text in (hearth_id, node, key))
        or any(type(n) is not int or not 0 <= n <= MAX_INT63 for n in (epoch, counter, ttl_ms))
        or type(payload) is not dict
        or msgpack.packb(fields) != body
    ):
        raise _unusable("it has a field of the wrong form")
    return Notice(hearth_id, NodeId(node), key, epoch, counter, ttl_ms, payload)


class Ephemera:
    """What is advertised now. Bounded in nodes, and in keys per node."""

    def __init__(self, hearth_id: str, verify: VerifyBytes, clock: Clock) -> None:
        self._hearth_id = hearth_id
        self._verify = verify
        self._clock = clock
        self._kept: dict[NodeId, dict[str, _Kept]] = {}

    def offer(self, body: bytes, signature: bytes) -> bool:
        """Take in an advertisement; True when it is news. Raises BadEvent when it is malformed.

        Older, repeated, foreign and forged ones are not news. The newest stays known after its end,
        so that a recording of it, or of an older one, does not come back to life.
        """
        notice = decode_notice(body)
        node = self._kept.get(notice.node, {})
        known = node.get(notice.key)
        if notice.hearth_id != self._hearth_id or len(signature) != SIGNATURE_BYTES:
            return False
        if known is not None and _rank(notice) <= _rank(known.notice):
            return False
        if not self._verify(notice.node, DOMAIN + body, signature):
            return False
        if known is None and not self._make_room(notice.node, node):
            return False
        until = self._clock.monotonic() + min(notice.ttl_ms / 1000, MAX_TTL_S)
        self._kept.setdefault(notice.node, {})[notice.key] = _Kept(notice, until)
        return True

    def live(self) -> list[Notice]:
        """What has not expired."""
        now = self._clock.monotonic()
        return [k.notice for node in self._kept.values() for k in node.values() if k.until > now]

    def forget(self, node: NodeId) -> None:
        """Drop all of a node that was put out; its signature must not verify any more."""
        self._kept.pop(node, None)

    def _make_room(self, name: NodeId, node: dict[str, _Kept]) -> bool:
        if name not in self._kept and len(self._kept) >= MAX_NODES:
            return False
        if len(node) < MAX_KEYS_PER_NODE:
            return True
        oldest = min(node, key=lambda key: node[key].until)
        if node[oldest].until > self._clock.monotonic():
            return False
        del node[oldest]
        return True


def _rank(notice: Notice) -> tuple[int, int]:
    return notice.epoch, notice.counter


def _unusable(why: str) -> BadEvent:
    return BadEvent(
        f"An advertisement is unusable: {why}.",
        fix="Run the same hearthnet version on both machines.",
    )
