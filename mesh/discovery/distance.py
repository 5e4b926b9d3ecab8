"""How far away a shard is: the hop weight that routes are picked by.

From the address at which it is reached, loopback, the same LAN or neither, and from the round trip
as measured. Knows no links: what they measured is told to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from ipaddress import IPv4Network, ip_address
from urllib.parse import urlsplit

from mesh.discovery.interfaces import present
from mesh.types import Endpoint, NodeId

HERE = 0.5
LAN = 1.0
ROUTED = 1.5
"""Neither this machine nor a network it is in: a VPN, or another subnet of the same house."""

UNKNOWN = 0.5
"""What comes on top of `ROUTED` until a round trip says which it is."""

_SLOWER: tuple[tuple[float, float], ...] = ((5.0, 0.0), (20.0, 0.5), (80.0, 1.0))
"""Round trips of up to so many ms cost so much on top; wired ones take 0.3, Wi-Fi 2 to 10."""

_SLOWEST = 2.0
_SAMPLES = 8
_MAX_NODES = 256
_LOOK_EVERY_S = 10.0


def hop_weight(host: str, rtt_ms: float | None, networks: Sequence[IPv4Network]) -> float:
    """The weight of the way to `host`, an address; `networks` are those this machine is in.

    1 on the same LAN, less on this machine, 2 and more for what is as slow as if it were far away.
    """
    where = _where(host, networks)
    if where == HERE:
        return HERE
    if rtt_ms is None:
        return where + UNKNOWN if where == ROUTED else where
    return where + next((more for limit, more in _SLOWER if rtt_ms <= limit), _SLOWEST)


class Distances:
    """The weights as they are now. `interface` as in the configuration."""

    def __init__(self, own: NodeId, interface: Sequence[str]) -> None:
        self._own = own
        self._interface = tuple(interface)
        self._networks: tuple[IPv4Network, ...] = ()
        self._looked_at = float("-inf")
        self._measured: dict[NodeId, deque[float]] = {}

    def measured(self, node: NodeId, rtt_ms: float | None) -> None:
        """A link's latest round trip.

        The smallest of the last few counts: the others waited for somebody's loop.
        """
        if rtt_ms is None:
            return
        known = self._measured.pop(node, None) or deque(maxlen=_SAMPLES)
        if not known or known[-1] != rtt_ms:  # told again, of the same ping
            known.append(rtt_ms)
        self._measured[node] = known
        if len(self._measured) > _MAX_NODES:
            del self._measured[next(iter(self._measured))]

    def weight(self, node: NodeId, endpoint: Endpoint) -> float:
        """Of the way to a shard of this node."""
        if node == self._own:
            return HERE
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._networks = tuple(choice.network for choice in present(self._interface))
        host = urlsplit(endpoint).hostname or ""
        return hop_weight(host, self.rtt_ms(node), self._networks)

    def rtt_ms(self, node: NodeId) -> float | None:
        """The way there and back; None while nobody has measured it."""
        known = self._measured.get(node)
        return min(known) if known else None


def _where(host: str, networks: Sequence[IPv4Network]) -> float:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a name: only the round trip can tell
        return ROUTED
    if address.is_loopback:
        return HERE
    near = address.is_link_local or any(address in network for network in networks)
    return LAN if near else ROUTED
