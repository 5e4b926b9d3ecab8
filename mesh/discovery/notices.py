"""Advertisements as they travel: signed by the node that serves, believed only when they verify.

One notice holds all that a node serves, so that a withdrawn shard is gone with the next one.
Notices are not passed on: a node is heard from itself or not at all. Knows nothing of links, nor of
who is trusted to serve.

`PeerTrust` is what discovery asks of whoever knows the members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from mesh import codec
from mesh.accounts.ledger import ResourceLedger
from mesh.codec import Fault
from mesh.discovery import advertisement
from mesh.discovery.directory import Offering
from mesh.discovery.weights import fitting
from mesh.errors import BadAdvertisement, BadEvent
from mesh.events.ephemera import Ephemera, Notice, seal_notice
from mesh.identity.tls import TlsContexts
from mesh.types import NodeId
from mesh.wire.messages import Advertise


class PeerTrust(Protocol):
    """Who may link, and whose shards count. The hearth provides it."""

    @property
    def tls(self) -> TlsContexts:
        """The contexts of all links between daemons; they follow the members."""

    @property
    def accounts(self) -> ResourceLedger:
        """What each peer holds and uses in this process."""

    def may_serve(self, node: NodeId) -> bool:
        """Whether what the node advertises may be listed."""

    def sign(self, data: bytes) -> bytes:
        """This node's signature, 64 bytes."""

    def verify(self, node: NodeId, data: bytes, signature: bytes) -> bool:
        """Whether the signature is that of a present member; False for everybody else."""


EXPIRY_FACTOR = 4
"""A notice outlives this many health timeouts without a renewal (specification, 5.1)."""

_KEY = "shards"
_BESIDE = {"weights", "capacity", "progress", "neighbours"}
"""Beside the shards; nodes of earlier versions neither say these nor read them."""


class Notices:
    """Signs this node's notices, reads the others'.

    `epoch` must be greater than at any earlier start of this node; `ttl_s` is how long its notices
    hold.
    """

    def __init__(
        self, own: NodeId, hearth: str, trust: PeerTrust, *, epoch: int, ttl_s: float
    ) -> None:
        self._own = own
        self._hearth = hearth
        self._trust = trust
        self._epoch = epoch
        self._ttl_ms = int(ttl_s * 1000)
        self._counter = 0
        self._heard = Ephemera(hearth, trust.verify)
        self._runs: dict[NodeId, str] = {}

    def seal(self, offering: Offering) -> Advertise:
        """A newer notice than all before. How far this node is with what others wish for, in their
        words, is left out where it would be too large with that, or nobody heard what is served.
        Raises BadEvent when it is too large without."""
        progress = offering.progress
        try:
            return self._sealed(offering)
        except BadEvent:
            if progress is None or not progress.spans:
                raise
            return self._sealed(replace(offering, progress=replace(progress, spans=())))

    def _sealed(self, offering: Offering) -> Advertise:
        self._counter += 1
        beside = codec.plain(replace(offering, shards=(), weights=fitting(offering.weights)))
        shards = [advertisement.encode(shard) for shard in offering.shards]
        said = {**beside, _KEY: shards}
        payload = {key: value for key, value in said.items() if value is not None}
        notice = Notice(
            self._hearth, self._own, _KEY, self._epoch, self._counter, self._ttl_ms, payload
        )
        return Advertise(*seal_notice(notice, self._trust.sign))

    def linked(self, node: NodeId, run: str) -> None:
        """This run of the node holds its link, so that it alone is heard: what another run has
        said, as one with a copy of its key may have, does not count as newer."""
        if self._runs.get(node) != run:
            self._heard.forget(node)
            self._runs[node] = run

    def read(self, message: Advertise, sender: NodeId) -> tuple[Offering, float]:
        """What the sender offers, and for how many seconds that holds from its arrival on.

        Raises BadAdvertisement when it is malformed, forged, about another node, or not newer than
        this run of the sender said before.
        """
        try:
            notice = self._heard.offer(message.body, message.signature, sender)
        except BadEvent as error:
            raise BadAdvertisement(error.message, fix=error.fix, param="signature") from error
        if notice is None:
            raise BadAdvertisement(
                "It repeats an advertisement, or signs an older one than before.",
                fix="Restart hearthnet on the node that sent it.",
                param="epoch",
            )
        entries = notice.payload.get(_KEY)
        if notice.key != _KEY or not isinstance(entries, list):
            raise BadAdvertisement(
                "It does not say what its sender serves.",
                fix="Update hearthnet on the node that sent it.",
                param="shards",
            )
        shards = advertisement.decode_all(entries, host=sender)
        return replace(_beside(notice.payload), shards=tuple(shards)), notice.ttl_ms / 1000

    def forget(self, node: NodeId) -> None:
        """The node is no member any more."""
        self._heard.forget(node)
        self._runs.pop(node, None)


def _beside(payload: Mapping[str, object]) -> Offering:
    """What stands beside the shards. Raises BadAdvertisement."""
    found = Offering()
    for key in sorted(_BESIDE & payload.keys()):
        try:
            said = codec.convert({key: payload[key]}, Offering)
        except Fault as fault:
            raise BadAdvertisement(
                f"Field {fault.field or key!r} of its {key} cannot be used: {fault.why}.",
                fix="Update hearthnet on the node that sent it.",
                param=key,
            ) from fault
        found = replace(found, **{key: getattr(said, key)})
    return found
