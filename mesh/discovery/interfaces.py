"""Which network interfaces to announce on, with a reason for each one left out.

Looks at the machine's interface table. Knows nothing of mDNS or peers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

import psutil

from mesh.errors import BadValue

_VIRTUAL = (
    ("container bridge", r"docker.*|br-.+|cni.*|cbr\d+|flannel.*|cali.*|podman\d*|lx[cd]br\d+"),
    ("container link", r"veth.*|vethernet.*"),
    ("virtual machine network", r"virbr.*|vboxnet.*|vmnet.*|vnet\d+|vmenet\d+|bridge1\d\d"),
    ("VPN or tunnel",
     r"tun\d*|tap\d*|u?tun\d+|wg.*|tailscale.*|zt.*|feth\d+|ppp\d+|ipsec.*|gif\d+|stf\d+"),
    ("Apple peer-to-peer link", r"awdl\d*|llw\d*|anpi\d*|ap\d+"),
)  # fmt: skip
"""On macOS bridge0 is Thunderbolt to another Mac, and bridge100 and up lead to virtual machines."""

LOOPBACK = "127.0.0.1"
"""Where a node reaches itself, whatever becomes of its network."""
ASKED = "asked for"
"""The reason of an interface that a setting or a flag names."""


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """An IPv4 address to announce and listen on, and the subnet it is in."""

    name: str
    address: IPv4Address
    network: IPv4Network
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """An interface that is not used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: skipped, {self.reason}"


@dataclass(frozen=True, slots=True)
class Interface:
    """One row of the machine's interface table."""

    name: str
    is_up: bool
    addresses: tuple[IPv4Interface, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether all it has are loopback addresses."""
        return bool(self.addresses) and all(a.ip.is_loopback for a in self.addresses)


def choose(requested: Sequence[str]) -> tuple[list[InterfaceChoice], list[Skipped]]:
    """`select` on this machine's interfaces as they are now."""
    return select(read_table(), requested)


def present(
    requested: Sequence[str], table: Sequence[Interface] | None = None
) -> list[InterfaceChoice]:
    """The addresses to use now; none while something that was asked for is not there."""
    try:
        return select(read_table() if table is None else table, requested)[0]
    except BadValue:
        return []


def told(
    requested: Sequence[str], table: Sequence[Interface] | None = None
) -> list[dict[str, Any]]:
    """What `choose` gives now, for people: ``{"name", "address", "network", "used", "why"}``.

    `address` and `network` are None of an interface that is left out. What was asked for and is
    not there is a row like any other: it comes back, or it never was. Loopback is told of where it
    is used: everywhere else it is left out.
    """
    table = read_table() if table is None else table
    try:
        chosen, skipped = select(table, requested)
    except BadValue as error:
        return [_row(name, why=error.message) for name in requested if not _is_there(table, name)]
    inner = {each.name for each in table if each.is_loopback}
    return [
        *(_row(c.name, str(c.address), str(c.network), why=c.reason) for c in chosen),
        *(_row(each.name, why=each.reason) for each in skipped if each.name not in inner),
    ]


class Reach:
    """At which of this machine's addresses its listeners answer, also when they change.

    At those that `choose` gives now, at `first`, and at loopback: the node's own processes find
    each other there when the machine changes networks. Has no effect on who may come in.
    """

    def __init__(
        self,
        requested: Sequence[str],
        first: str,
        read: Callable[[], Sequence[Interface]] | None = None,
        look_every_s: float = 1.0,
    ) -> None:
        """`read` gives the machine's interfaces: `read_table`, unless something else is given."""
        self._read = read or read_table
        self._look_every_s = look_every_s
        self._requested = tuple(requested)
        self._always = frozenset({first, LOOPBACK})
        self._known = self._always
        self._looked_at = float("-inf")

    @classmethod
    def of(cls, requested: Sequence[str], first: str) -> Reach | None:
        """None when one address was asked for: that is then listened at, and nothing else."""
        return None if list(requested) == [first] else cls(requested, first)

    def addresses(self) -> tuple[str, ...]:
        """Those that `choose` gives now; none while what was asked for is not there."""
        return tuple(str(each.address) for each in present(self._requested, self._read()))

    def __call__(self, address: str) -> bool:
        """Whether to answer at this address."""
        if address not in self._known and time.monotonic() - self._looked_at >= self._look_every_s:
            self._looked_at = time.monotonic()
            self._known = self._always.union(self.addresses())
        return address in self._known


def read_table() -> list[Interface]:
    """The machine's interfaces with their IPv4 addresses, by name. As they were when they were read
    last where they cannot be, for want of descriptors. Raises OSError at the first time."""
    try:
        _last_read[:] = _table()
    except OSError:
        if not _last_read:
            raise
    return list(_last_read)


_last_read: list[Interface] = []


def _table() -> list[Interface]:
    states: Mapping[str, Any] = psutil.net_if_stats()
    table = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        ipv4 = tuple(
            ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
            for entry in addresses
            if entry.family == socket.AF_INET
        )
        state = states.get(name)
        table.append(Interface(name, state is not None and state.isup, ipv4))
    return table


def select(
    table: Sequence[Interface], requested: Sequence[str]
) -> tuple[list[InterfaceChoice], list[Skipped]]:
    """The addresses to use and the interfaces left out.

    `requested` are names or IPv4 addresses: exactly those are then used, whatever kind they are.
    Without any, every LAN interface is; when none is usable, loopback with the reason. Raises
    BadValue for a name or address that this machine does not have.
    """
    if requested:
        return _select_requested(table, requested)
    chosen: list[InterfaceChoice] = []
    skipped: list[Skipped] = []
    for interface in table:
        reason = _why_not(interface)
        if reason is not None:
            skipped.append(Skipped(interface.name, reason))
        else:
            chosen += [_choice(interface, a, "local network") for a in interface.addresses]
    if not chosen:
        loopback = next((i for i in table if i.is_loopback and i.is_up), None)
        if loopback is not None:
            reason = "no usable network; only nodes on this machine can be found"
            chosen = [_choice(loopback, loopback.addresses[0], reason)]
            skipped = [entry for entry in skipped if entry.name != loopback.name]
    return chosen, skipped


def _select_requested(
    table: Sequence[Interface], requested: Sequence[str]
) -> tuple[list[InterfaceChoice], list[Skipped]]:
    chosen: dict[IPv4Address, InterfaceChoice] = {}
    for wanted in requested:
        found = [
            (interface, address)
            for interface in table
            for address in interface.addresses
            if wanted in (interface.name, str(address.ip))
        ]
        if not found:
            raise _unknown(table, wanted)
        for interface, address in found:
            chosen[address.ip] = _choice(interface, address, ASKED)
    used = {choice.name for choice in chosen.values()}
    return list(chosen.values()), [
        Skipped(interface.name, "not among the interfaces asked for")
        for interface in table
        if interface.name not in used
    ]


def _is_there(table: Sequence[Interface], wanted: str) -> bool:
    return any(wanted in (i.name, str(a.ip)) for i in table for a in i.addresses)


def _row(
    name: str, address: str | None = None, network: str | None = None, *, why: str
) -> dict[str, Any]:
    used = address is not None
    return {"name": name, "address": address, "network": network, "used": used, "why": why}


def _unknown(table: Sequence[Interface], wanted: str) -> BadValue:
    usable = ", ".join(
        f"{i.name} ({', '.join(str(a.ip) for a in i.addresses)})" for i in table if i.addresses
    )
    give = f"Give {wanted} one, or use" if any(i.name == wanted for i in table) else "Use"
    return BadValue(
        f"This machine has no interface {wanted!r} with an IPv4 address, and nodes call each other"
        " over IPv4.",
        fix=f"{give} one of: {usable}.",
        param="interface",
    )


def _choice(interface: Interface, address: IPv4Interface, reason: str) -> InterfaceChoice:
    return InterfaceChoice(interface.name, address.ip, address.network, reason)


def _why_not(interface: Interface) -> str | None:
    if interface.is_loopback:
        return "loopback reaches this machine only"
    if not interface.is_up:
        return "it is down"
    for kind, pattern in _VIRTUAL:
        if re.fullmatch(pattern, interface.name, re.IGNORECASE):
            return f"it looks like a {kind}; use --interface {interface.name} if it is your network"
    if not interface.addresses:
        return "no IPv4 address"
    return None
