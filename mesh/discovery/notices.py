"""Advertisements as they travel: signed by the node that serves, believed only when they verify.

One notice holds all that a node serves, so that a withdrawn shard is gone with the next one.
Notices are not passed on: a node is heard from itself or not at all. Knows nothing of links, nor of
who is trusted to serve.

`PeerTrust` is what discovery asks of whoever knows the members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh import codec
from mesh.accounts.ledger import ResourceLedger
from mesh.capacity import Capacity
from mesh.codec import Fault
from mesh.discovery import advertisement, progress, weights
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import NodeInfo, ShardStore
from mesh.discovery.progress import NodeProgress
from mesh.discovery.weights import HeldWeights
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
_CAPACITY = "capacity"
"""Beside the shards; nodes of earlier versions neither say it nor read it."""


@dataclass(frozen=True, slots=True)
class Offering:
    """What a node offers: the shards that it serves, what its devices hold, and how far it is with
    what it is to hold, if it says so."""

    shards: Sequence[Advertisement] = ()
    capacity: Capacity | None = None
    progress: NodeProgress | None = None

    def enlist(self, store: ShardStore, own: NodeInfo) -> None:
        """Put it into this node's own directory. Raises BadAdvertisement."""
        store.update(own, self.shards, capacity=self.capacity, progress=self.progress)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a node serves and has, and for how long that holds from its arrival on."""

    shards: tuple[Advertisement, ...]
    ttl_s: float
    weights: tuple[HeldWeights, ...] = ()
    capacity: Capacity | None = None
    progress: NodeProgress | None = None


class Notices:
    """Signs this node's notices, reads the others'.

    `epoch` must be greater than at any earlier start of this node; `ttl_s` is how long its notices
    hold. `held` is asked what of weights is on this node's disk.
    """

    def __init__(
        self,
        own: NodeId,
        hearth: str,
        trust: PeerTrust,
        *,
        epoch: int,
        ttl_s: float,
        held: Callable[[], Sequence[HeldWeights]] = tuple,
    ) -> None:
        self._own = own
        self._hearth = hearth
        self._trust = trust
        self._epoch = epoch
        self._ttl_ms = int(ttl_s * 1000)
        self._held = held
        self._counter = 0
        self._heard = Ephemera(hearth, trust.verify)

    def seal(self, offering: Offering) -> Advertise:
        """A newer notice than all before. Raises BadEvent when it is too large."""
        self._counter += 1
        payload: dict[str, object] = {
            "shards": [advertisement.encode(shard) for shard in offering.shards],
            weights.KEY: weights.encode_all(self._held()),
        }
        if offering.capacity is not None:
            payload[_CAPACITY] = codec.plain(offering.capacity)
        if offering.progress is not None:
            payload[progress.KEY] = codec.plain(offering.progress)
        notice = Notice(
            self._hearth, self._own, _KEY, self._epoch, self._counter, self._ttl_ms, payload
        )
        return Advertise(*seal_notice(notice, self._trust.sign))

    def read(self, message: Advertise, sender: NodeId) -> Heard:
        """What the sender serves.

        Raises BadAdvertisement when it is malformed, forged, about another node, or not newer than
        what the sender said before.
        """
        try:
            notice = self._heard.offer(message.body, message.signature, sender)
        except BadEvent as error:
            raise BadAdvertisement(error.message, fix=error.fix, param="signature") from error
        if notice is None:
            raise BadAdvertisement(
                "It repeats an advertisement, or signs an older one than before.",
                fix="If its --state-dir was restored from a backup, give it a new one.",
                param="epoch",
            )
        entries = notice.payload.get("shards")
        if notice.key != _KEY or not isinstance(entries, list):
            raise BadAdvertisement(
                "It does not say what its sender serves.",
                fix="Update hearthnet on the node that sent it.",
                param="shards",
            )
        shards = advertisement.decode_all(entries, host=sender)
        held = weights.decode_all(notice.payload.get(weights.KEY, []))
        capacity = _capacity(notice.payload.get(_CAPACITY))
        doing = progress.decode(notice.payload.get(progress.KEY))
        return Heard(tuple(shards), notice.ttl_ms / 1000, held, capacity, doing)

    def forget(self, node: NodeId) -> None:
        """The node is no member any more."""
        self._heard.forget(node)


def _capacity(said: object) -> Capacity | None:
    """What the devices hold; None where nothing is said. Raises BadAdvertisement."""
    if said is None:
        return None
    try:
        return codec.convert(said, Capacity)
    except Fault as fault:
        raise BadAdvertisement(
            f"Field {fault.field or _CAPACITY!r} of its capacity cannot be used: {fault.why}.",
            fix="Update hearthnet on the node that sent it.",
            param=_CAPACITY,
        ) from fault
