"""Well-formed inputs for every target: where a search for bad ones starts."""

from __future__ import annotations

import msgpack

from mesh.discovery.advertisement import encode
from mesh.discovery.greeting import PeerHello, to_hello
from mesh.events.ephemera import Notice, seal_notice
from mesh.events.messages import Ask, Heads, Pull, to_dict
from mesh.identity.certificates import make_certificate
from mesh.types import WireDtype
from mesh.wire import control
from mesh.wire.frames import pack_frame
from mesh.wire.messages import Drain, Gossip, Open
from tests.discovery.network import advertised
from tests.events.support import HEARTH, Author, House, key

_NODE = key(0).node_id


def seeds() -> dict[str, list[bytes]]:
    """Per target a few inputs that it accepts, or nearly."""
    author, house = Author(0), House()
    kind, hello = control.encode(
        to_hello(PeerHello(_NODE, "n", "s", HEARTH, "run", 1, "127.0.0.1:1"))
    )
    talk = [Drain("x"), Open(1, "m", "ab" * 32, 0, 4, 9, WireDtype.FP16, []), Gossip({"a": 1})]
    bodies = [control.encode(message) for message in talk]
    said = Notice(HEARTH, _NODE, "shards", 1, 1, 9, {"shards": [encode(advertised(_NODE))]})
    asked = [
        Ask(1),
        Heads(2, {_NODE: (1, 3, bytes(8))}, {_NODE: (1, 2)}),
        Pull(4, ((_NODE, 1, 1, 2),)),
    ]
    return {
        "frame": [pack_frame(kind, 0, 0, hello)],
        "session": [b"\xff\xfe".join(bytes([list(type(k)).index(k)]) + b for k, b in bodies)],
        "handshake": [hello],
        "pairing": [msgpack.packb([1, b"A" + bytes(32)])],
        "certificate": [make_certificate(key(0))],
        "event": [author.publish("m").body],
        "decision": [house.founded.body, house.add(Author(1)).body],
        "notice": [seal_notice(said, key(0).sign)[0]],
        "gossip": [msgpack.packb(to_dict(message)) for message in asked],
    }
