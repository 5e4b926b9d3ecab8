"""Signed short-lived notices: the newest of each node and key, and nothing older again.

Beside the log, never in it. A notice says how long it holds; whoever takes it in counts that on its
own monotonic clock, so no other machine's clock matters. Knows nothing of what is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from mesh.codec import Canonical, Fault, Int63, SignedForm
from mesh.errors import SAME_VERSION, BadEvent
from mesh.events.types import MAX_DEPTH, SIGNATURE_BYTES, Sign, unusable
from mesh.types import NodeId

VERSION = 1
DOMAIN = b"hearthnet/ephemeral/v1\0"
MAX_BYTES = 128 << 10
MAX_KEYS_PER_NODE = 8
MAX_NODES = 256
_Name = Annotated[str, Meta(min_length=1, max_length=512)]

VerifyBytes = Callable[[NodeId, bytes, bytes], bool]
"""Whether the third argument is the node's signature of the second; False for unknown nodes."""


class Notice(SignedForm, frozen=True, tag=VERSION):
    """One notice. `epoch` grows with every start of its node, `counter` within one."""

    hearth_id: _Name
    node: Annotated[NodeId, Meta(min_length=1, max_length=512)]
    key: _Name
    epoch: Int63
    counter: Int63
    ttl_ms: Int63
    payload: dict[str, Any]


_FORM = Canonical(Notice, max_bytes=MAX_BYTES, depth=MAX_DEPTH)


def seal_notice(notice: Notice, sign: Sign) -> tuple[bytes, bytes]:
    """Its body and signature. Raises BadEvent for a payload that is not plain or too large."""
    try:
        body = _FORM.pack(notice)
    except Fault as fault:
        raise unusable("signed notice", fault) from fault
    decode_notice(body)
    return body, sign(DOMAIN + body)


def decode_notice(body: bytes) -> Notice:
    """Read a notice's bytes, as strictly as events. Raises BadEvent."""
    try:
        return _FORM.unpack(body)
    except Fault as fault:
        raise unusable("signed notice", fault) from fault


class Ephemera:
    """Lets in what is signed and newer than all before it. Bounded in nodes, and in keys per node.

    Only how new a notice was is kept, and for as long as this runs: a recording of one that has
    ended does not come back to life.
    """

    def __init__(self, hearth_id: str, verify: VerifyBytes) -> None:
        self._hearth_id = hearth_id
        self._verify = verify
        self._newest: dict[NodeId, dict[str, tuple[int, int]]] = {}

    def offer(self, body: bytes, signature: bytes, sender: NodeId) -> Notice | None:
        """The notice when it is news, None when it is not newer than what was taken in before.

        Raises BadEvent when it is malformed, of another hearth, not the sender's own, not signed by
        it, or one too many. Whoever hands on another's notice must not use up its number.
        """
        notice = decode_notice(body)
        if notice.node != sender:
            raise _unusable("it is another node's than the one that sent it")
        if notice.hearth_id != self._hearth_id:
            raise _unusable("it belongs to another hearth")
        known = self._newest.get(notice.node, {})
        rank = (notice.epoch, notice.counter)
        if notice.key in known and rank <= known[notice.key]:
            return None
        if len(signature) != SIGNATURE_BYTES or not self._verify(
            notice.node, DOMAIN + body, signature
        ):
            raise _unusable("its signature is not that of the member it names")
        if notice.key not in known and (
            len(known) >= MAX_KEYS_PER_NODE
            or (notice.node not in self._newest and len(self._newest) >= MAX_NODES)
        ):
            raise _unusable("there are too many")
        self._newest.setdefault(notice.node, {})[notice.key] = rank
        return notice

    def forget(self, node: NodeId) -> None:
        """Make room: the node was put out, so its signature does not verify any more."""
        self._newest.pop(node, None)


def _unusable(why: str) -> BadEvent:
    return BadEvent(
        f"A signed notice is unusable: {why}.",
        fix=SAME_VERSION,
    )
