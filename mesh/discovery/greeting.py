"""What two daemons tell each other about themselves in their hello, and the checks on it.

Plain data. Whether a peer is wanted is decided by `mesh.discovery.peering`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mesh.errors import PeerRefused
from mesh.identity.keys import is_node_id, short_id
from mesh.types import NodeId
from mesh.wire.messages import Hello

PURPOSE = "control"
_MAX_TEXT = 256
_MAX_HOSTS = 16


@dataclass(frozen=True, slots=True)
class PeerHello:
    """A peer as it presents itself. `run` is new at every start of its daemon.

    `dial` counts the dials of whoever initiated the link (0 in the other side's hello); `address`
    is where it says its control port is, ``HOST:PORT``, for people to read. `hosts` are the
    addresses at which it and its shards listen.
    """

    node_id: NodeId
    name: str
    software: str
    hearth: str
    run: str
    dial: int
    address: str
    hosts: tuple[str, ...] = ()


def to_hello(own: PeerHello) -> Hello:
    """The message for one link."""
    return Hello(
        node_id=own.node_id,
        node_name=own.name,
        purpose=PURPOSE,
        software=own.software,
        fields={
            "hearth": own.hearth,
            "run": own.run,
            "dial": own.dial,
            "address": own.address,
            "hosts": list(own.hosts[:_MAX_HOSTS]),
        },
    )


def from_hello(hello: Hello) -> PeerHello:
    """Check a peer's hello. Raises PeerRefused naming the field that is unusable."""
    if hello.purpose != PURPOSE:
        _refuse("purpose", "this port is for links between daemons")
    if not is_node_id(hello.node_id):
        _refuse("node_id", "it is not a node id")
    dial = hello.fields.get("dial")
    if type(dial) is not int or not 0 <= dial < 2**53:
        _refuse("dial", "it is not a count")
    hosts = hello.fields.get("hosts", [])
    if not isinstance(hosts, list) or len(hosts) > _MAX_HOSTS:
        _refuse("hosts", f"it is not a list of at most {_MAX_HOSTS}")
    node_id = NodeId(hello.node_id)
    return PeerHello(
        node_id=node_id,
        name=_text({"node_name": hello.node_name}, "node_name"),
        software=_text({"software": hello.software}, "software"),
        hearth=_text(hello.fields, "hearth"),
        run=_text(hello.fields, "run"),
        dial=dial,
        address=_text(hello.fields, "address"),
        hosts=tuple(_text({"hosts": host}, "hosts") for host in hosts),
    )


def label(peer: PeerHello) -> str:
    """How the node is called in a sentence."""
    return f"{peer.name} ({short_id(peer.node_id)})"


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        _refuse(key, f"it must be 1 to {_MAX_TEXT} printable characters")
    return value


def _refuse(field: str, why: str) -> NoReturn:
    raise PeerRefused(
        f"The hello's field {field!r} cannot be used: {why}.",
        fix="Run the same hearthnet version on both machines.",
        param=field,
    )
