"""What a node announces by multicast DNS, and what is believed of what others announce: nothing.

An announcement is a hint where to dial. Parsing bounds every field and keeps only addresses that
belong to a household's network, so that a forged record cannot point this node at the internet.
Knows nothing of sockets; `mesh.discovery.mdns` sends and receives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from mesh.discovery.interfaces import InterfaceChoice
from mesh.identity.keys import is_node_id
from mesh.types import LayerRange, ModelId, NodeId

SERVICE_TYPE = "_hearthnet._tcp.local."
MAX_ADDRESSES = 8
MAX_VALUE_BYTES = 200  # a TXT entry holds 255 with its key; all of ours fit one packet
_INSTANCE = re.compile(r"(hn1[a-z2-7]{52})-([0-9a-f]{6})\._hearthnet\._tcp\.local\.")
_PRIVATE = tuple(
    IPv4Network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
)
_LOOPBACK = IPv4Network("127.0.0.0/8")


@dataclass(frozen=True, slots=True)
class Announcement:
    """One running daemon. `instance` is new at every start; `shards` is a summary for people.

    `pairing` is the port of an open invitation's window.
    """

    instance: str
    node_id: NodeId
    hearth: str
    name: str
    version: int
    port: int
    addresses: tuple[str, ...]
    shards: str = ""
    pairing: int | None = None

    def endpoints(self) -> list[str]:
        """``HOST:PORT`` to dial, the likeliest first."""
        return [f"{address}:{self.port}" for address in self.addresses]


def instance_name(node_id: NodeId, nonce: str) -> str:
    """The service instance; `nonce` is six hex digits that tell two runs of one node apart."""
    return f"{node_id}-{nonce}.{SERVICE_TYPE}"


def is_instance(name: str) -> bool:
    """Whether a service instance can be one of ours; anything else is not even resolved."""
    return _INSTANCE.fullmatch(name) is not None


def to_txt(announcement: Announcement) -> dict[str, str]:
    """The TXT entries; long names and summaries are cut to MAX_VALUE_BYTES of UTF-8."""
    window = {} if announcement.pairing is None else {"w": str(announcement.pairing)}
    return {
        "id": announcement.node_id,
        "h": announcement.hearth,
        "n": _cut(announcement.name),
        "v": str(announcement.version),
        "p": str(announcement.port),
        "s": _cut(announcement.shards),
        **window,
    }


def from_record(
    name: str,
    txt: Mapping[bytes, bytes | None],
    addresses: Sequence[str],
    networks: Sequence[InterfaceChoice],
) -> Announcement:
    """Check a resolved record. Raises ValueError with the reason when a part of it is unusable."""
    match = _INSTANCE.fullmatch(name)
    node_id = _text(txt, "id")
    if match is None or match[1] != node_id or not is_node_id(node_id):
        raise ValueError("its instance name and node id disagree")
    usable = sorted(
        (a for a in map(_ipv4, addresses) if a is not None and is_dialable(a, networks)),
        key=lambda a: (not any(a in choice.network for choice in networks), a),
    )
    if not usable:
        raise ValueError("none of its addresses is on a local network")
    return Announcement(
        instance=name,
        node_id=NodeId(node_id),
        hearth=_text(txt, "h"),
        name=_text(txt, "n"),
        version=_number(txt, "v", 255),
        port=_number(txt, "p", 65535),
        addresses=tuple(dict.fromkeys(map(str, usable)))[:MAX_ADDRESSES],
        shards=_text(txt, "s", least=0),
        pairing=_number(txt, "w", 65535) if b"w" in txt else None,
    )


def is_dialable(address: IPv4Address, networks: Sequence[InterfaceChoice]) -> bool:
    """Whether an announced address may be dialled: private, link-local or on a chosen subnet.

    Loopback only when loopback is one of the chosen interfaces: no neighbour may point this node at
    its own services.
    """
    if address in _LOOPBACK:
        return any(choice.address in _LOOPBACK for choice in networks)
    if address.is_multicast or address.is_unspecified or int(address) == 0xFFFFFFFF:
        return False
    local = (*_PRIVATE, *(choice.network for choice in networks))
    return any(address in network for network in local)


def summarise(shards: Sequence[tuple[ModelId, LayerRange]]) -> str:
    """``model:0-7, other:8-15 +3``: as many as fit, then how many more there are."""
    text = ""
    for shown, (model, layers) in enumerate(shards):
        longer = f"{text}, {model}:{layers}" if text else f"{model}:{layers}"
        if len(longer.encode()) > MAX_VALUE_BYTES - len(" +9999"):
            return f"{text} +{len(shards) - shown}".strip()
        text = longer
    return text


def _cut(text: str) -> str:
    return text.encode()[:MAX_VALUE_BYTES].decode(errors="ignore")


def _text(txt: Mapping[bytes, bytes | None], key: str, least: int = 1) -> str:
    raw = txt.get(key.encode()) or b""
    text = raw.decode(errors="replace")
    if not least <= len(raw) <= MAX_VALUE_BYTES or not text.isprintable() or "\ufffd" in text:
        raise ValueError(f"its entry {key!r} is missing, too long or not printable")
    return text


def _number(txt: Mapping[bytes, bytes | None], key: str, most: int) -> int:
    text = _text(txt, key)
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) <= most:
        raise ValueError(f"its entry {key!r} is not a number from 1 to {most}")
    return int(text)


def _ipv4(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None
