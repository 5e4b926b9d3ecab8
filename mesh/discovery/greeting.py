"""What two daemons tell each other about themselves in their hello, and the checks on it.

Plain data. Whether a peer is wanted is decided by `mesh.discovery.peering`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Text
from mesh.errors import SAME_VERSION, PeerRefused
from mesh.identity.keys import NodeIdText, short_id
from mesh.wire.messages import Hello

PURPOSE = "control"
_MAX_HOSTS = 16


@dataclass(frozen=True, slots=True)
class PeerHello:
    """A peer as it presents itself. `run` is new at every start of its daemon.

    `dial` counts the dials of whoever initiated the link (0 in the other side's hello); `address`
    is where it says its control port is, ``HOST:PORT``, for people to read. `hosts` are the
    addresses at which it and its shards listen. `calls_back`: it answers a `CallBack`, which nodes
    of earlier versions do not.
    """

    node_id: NodeIdText
    name: Text
    software: Text
    hearth: Text
    run: Text
    dial: Annotated[int, Meta(ge=0, lt=1 << 53)]
    address: Text
    hosts: Annotated[tuple[Text, ...], Meta(max_length=_MAX_HOSTS)] = ()
    calls_back: bool = False


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
            **({"calls_back": True} if own.calls_back else {}),
        },
    )


def from_hello(hello: Hello) -> PeerHello:
    """Check a peer's hello. Raises PeerRefused naming the field that is unusable."""
    if hello.purpose != PURPOSE:
        raise _unusable(Fault("this port is for links between daemons", "purpose"))
    known = {"node_id": hello.node_id, "name": hello.node_name, "software": hello.software}
    try:
        return codec.convert({**hello.fields, **known}, PeerHello)
    except Fault as fault:
        raise _unusable(fault) from fault


def label(peer: PeerHello) -> str:
    """How the node is called in a sentence."""
    return f"{peer.name} ({short_id(peer.node_id)})"


def _unusable(fault: Fault) -> PeerRefused:
    return PeerRefused(
        f"The hello's field {fault.field!r} cannot be used: {fault.why}.",
        fix=SAME_VERSION,
        param=fault.field,
    )
