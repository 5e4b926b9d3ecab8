"""Well-formed inputs for every target: where a search for bad ones starts."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

import msgpack

from mesh.clock import SystemClock
from mesh.discovery.advertisement import encode
from mesh.discovery.greeting import PeerHello, to_hello
from mesh.events.ephemera import Notice, seal_notice
from mesh.events.messages import Ask, Heads, Pull, to_dict
from mesh.hearth.record import HearthRecord, write_record
from mesh.identity.api_keys import ApiKeys, Quota, Scope
from mesh.identity.certificates import make_certificate
from mesh.identity.pairing import Welcome
from mesh.identity.roster import Member, TrustLevel
from mesh.identity.tokens import issue
from mesh.models.edits import describe
from mesh.models.harvest import HarvestBatch
from mesh.types import Edit, Site, WireDtype
from mesh.wire import control
from mesh.wire.frames import pack_frame
from mesh.wire.messages import Drain, Gossip, Open
from tests.discovery.network import advertised
from tests.events.support import HEARTH, Author, House, key
from tests.fuzz.targets import opened_pairing

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
        "pairing": _pairing(),
        "certificate": [make_certificate(key(0))],
        "event": [author.publish("m").body],
        "decision": [house.founded.body, house.add(Author(1)).body],
        "notice": [seal_notice(said, key(0).sign)[0]],
        "token": [_claims()],
        "described": [
            msgpack.packb(HarvestBatch("0" * 16, 1, 2, "model.layers.", "*").to_fields()),
            msgpack.packb(describe([Edit(Site(1, "mlp"), 0.5, bytes(8))])[0]),
        ],
        "record": _records(),
        "form": [
            msgpack.packb(
                {
                    "inner": {"text": "a", "count": 1},
                    "several": [{"text": "b"}],
                    "pair": ["c", b"d"],
                    "number": 1.5,
                    "level": 2,
                    "by_name": {"e": 3},
                    "maybe": "ab" * 32,
                }
            )
        ],
        "gossip": [msgpack.packb(to_dict(message)) for message in asked],
    }


def _pairing() -> list[bytes]:
    """The frames of a real exchange, which get nobody into another."""
    inviter, joiner, start, reply = opened_pairing()
    proof = joiner.prove(reply)
    inviter.examine(proof)
    return [start, reply, proof, inviter.welcome(Welcome(HEARTH, "h", ()))]


def _claims() -> bytes:
    clock = SystemClock()
    token = issue(key(0), clock, holder=_NODE, audience=_NODE, subject="s", scope=frozenset({"x"}))
    payload = token.split(".")[1]
    return base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))


def _records() -> list[bytes]:
    """What the files hold after something was kept in them."""
    with tempfile.TemporaryDirectory() as directory:
        keys, hearth = Path(directory) / "keys.json", Path(directory) / "hearth.json"
        ApiKeys.load(keys).create("x", frozenset({Scope.CHAT}), Quota(1), SystemClock())
        member = Member(
            _NODE, key(0).public_bytes, "a", TrustLevel.ANCHOR, _NODE, make_certificate(key(0))
        )
        write_record(hearth, HearthRecord("hh2abc", "h", (member,)))
        return [keys.read_bytes(), hearth.read_bytes()]
