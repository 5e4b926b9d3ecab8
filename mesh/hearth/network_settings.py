"""What a network is told as it is made: how to link, and whom to tell what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from mesh.config import Config
from mesh.discovery import interfaces
from mesh.discovery.events import PeerEvent
from mesh.discovery.peering import PeeringSettings
from mesh.hearth.publishing import Serving
from mesh.types import NodeId


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """`peering` without its hearth, which is known once one is founded or joined."""

    peering: PeeringSettings
    interfaces: tuple[str, ...]
    is_enabled: bool

    @classmethod
    def of(cls, config: Config, own: NodeId, software: str, address: str) -> Self:
        """What the configuration says; `address` is the first interface's."""
        peering = PeeringSettings(
            node_id=own,
            name=config.name,
            hearth="",
            software=software,
            host=address,
            answers_at=interfaces.Reach.of(config.interface, address),
            port=config.port,
            static_peers=config.peer,
            shard_health_timeout_s=config.distributed.shard_health_timeout_seconds,
        )
        return cls(peering, config.interface, config.is_distributed)


@dataclass(frozen=True, slots=True)
class NetworkHooks:
    """Callbacks of the node around a network; all in the event loop, none may block.

    `on_members` says that somebody came, went, or changed its level, or that a token was revoked;
    `on_notice` has an event's type and fields.
    """

    serving: Callable[[], Serving]
    on_event: Callable[[PeerEvent], None]
    on_members: Callable[[], None]
    on_notice: Callable[[str, dict[str, object]], None]
