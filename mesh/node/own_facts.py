"""What a node says of itself in the status: names, addresses, interfaces. Reads what others own."""

from __future__ import annotations

from typing import Any

from mesh.api.server import ApiServer
from mesh.config import Config
from mesh.discovery import interfaces
from mesh.hearth.network import Network
from mesh.node.wiring import SOFTWARE
from mesh.types import NodeId


def own_facts(
    config: Config, own: NodeId, network: Network, api: ApiServer | None
) -> dict[str, Any]:
    """The ``node`` of `mesh.api.services.MeshView.status`, but for since when it runs and whether
    it is paused. What is not there yet is None."""
    hearth = network.hearth
    return {
        "id": own,
        "name": config.name,
        "software": SOFTWARE,
        "api": api.url(network.host) if api is not None else None,
        "api_tls": api.tls.shown() if api is not None and api.tls is not None else None,
        "endpoint": network.address,
        "state_dir": str(config.state_dir),
        "hearth": {"id": hearth.id, "name": hearth.roster.name} if hearth else None,
        "away": [member.row() for member in network.away()],
        "enabled": config.is_distributed,
        "interfaces": interfaces.told(config.interface) if config.is_distributed else [],
    }
