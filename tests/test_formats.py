"""Bytes on the wire, in the log and under signatures: the same as those in ``golden/formats.json``.

The file was written by the release before the one codec; a format that is to change gets a new
version beside it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.discovery import advertisement
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.greeting import PeerHello, from_hello, to_hello
from mesh.events import decision, ephemera, types
from mesh.events.decision import DecisionDraft, DecisionId
from mesh.events.intake import Received
from mesh.events.messages import (
    Ask,
    Heads,
    LogMessage,
    Page,
    Probe,
    Probed,
    Pull,
    from_dict,
    to_dict,
)
from mesh.events.types import GENESIS, Draft, EventId
from mesh.identity import decisions
from mesh.identity.decisions import (
    Acknowledged,
    Added,
    Decision,
    Founded,
    LevelChanged,
    Readmitted,
    Recovered,
    Revoked,
)
from mesh.identity.keys import NodeKey
from mesh.identity.roster import Cut, TrustLevel
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    ShardHealth,
    ShardMemory,
    WireDtype,
    shard_id,
)
from mesh.wire import control
from mesh.wire.call_back import CallBack, CalledBack
from mesh.wire.frames import FrameType
from mesh.wire.messages import (
    Advertise,
    Bye,
    Close,
    CopyPrefix,
    Drain,
    Failure,
    FileAsk,
    FilePart,
    Gossip,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    OpenEnds,
    OpenNormed,
    OpenPart,
    OpenTaps,
    Park,
    PrefixCopied,
    Resume,
    RowAsk,
    Seal,
    Sealed,
)

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden" / "formats.json").read_text(encoding="utf-8")
)
KEY = NodeKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
NODE = KEY.node_id
HEARTH = "hh2abc"
CERTIFICATE = bytes.fromhex(GOLDEN["certificate"])
PEER = PeerHello(
    NODE, "attic", "hearthnet 1", HEARTH, "run", 3, "127.0.0.1:1", ("10.0.0.1",)
)  # fmt: skip
WEIGHTS = "ab" * 32

WIRE: dict[str, Message] = {
    "hello": to_hello(PEER),
    "bye": Bye("tired"),
    "open": Open(
        1, "m", WEIGHTS, 0, 4, 9, WireDtype.BF16, [{"layer": 1, "strength": 0.5}],
        harvest={"run": "r"}, token="tok",  # noqa: S106
    ),
    "open_part": OpenPart(1, b"xy"),
    "open_ends": OpenEnds(
        1, "m", WEIGHTS, 0, 4, 9, WireDtype.FP16, token="tok", ids=True, candidates=64,  # noqa: S106
        rows=9, since=40,
    ),
    "open_normed": OpenNormed(1, "m", WEIGHTS, 0, 4, 9, WireDtype.FP32, token="tok", ids=True),  # noqa: S106
    "row_ask": RowAsk(1, 7, 40),
    "open_taps": OpenTaps(1, "m", WEIGHTS, 0, 4, "tok"),
    "loading": Loading(1),
    "opened": Opened(1, 70000),
    "park": Park(2**32 - 1),
    "resume": Resume(1, 9),
    "close": Close(1),
    "copy_prefix": CopyPrefix(2, 1, 640),
    "prefix_copied": PrefixCopied(2, 512),
    "seal": Seal(1),
    "sealed": Sealed(1, [{"file": "a", "rows": 3}]),
    "failure": Failure({"code": "busy"}, None, 4),
    "drain": Drain(""),
    "gossip": Gossip({"kind": "ask", "number": 1}),
    "call_back": CallBack(1, [8421, 43107]),
    "called_back": CalledBack(1, 1_893_456_000_000, ["", "timed out"]),
    "file_ask": FileAsk(1, WEIGHTS, 300),
    "file_part": FilePart(1, b"z" * 300),
    "advertise": Advertise(b"body", b"sig"),
}  # fmt: skip

A = NodeId("hn1" + "a" * 52)
LOG: dict[str, LogMessage] = {
    "ask": Ask(1),
    "heads": Heads(2, {A: (1, 3, b"12345678")}, {A: (1, 4)}, (DecisionId(b"t" * 32),)),
    "pull": Pull(3, ((A, 1, 1, 9),), (A,), (DecisionId(b"w" * 32),), (DecisionId(b"h" * 32),)),
    "page": Page.of(
        4, Received(((b"body", b"s" * 64),), (((b"a", b"b"), (b"c", b"d")),), ((b"e", b"f"),))
    ),
    "probe": Probe(5, A, 1, (1, 2)),
    "probed": Probed(6, A, {1: b"12345678"}),
}

PLACE = (HEARTH, NODE, 1, 2, EventId(b"p" * 32), 70000, 1700000000000, "model.published")
EVENTS: dict[str, Draft] = {
    "map": Draft(*PLACE, {"a": 1.5, "b": [1, None, True, -5], "c": {"d": b"x", "e": "\xfc" * 40}}),
    "list": Draft(*PLACE, [1, "x" * 300]),
    "first": Draft(HEARTH, NODE, 2, 1, GENESIS, 1, 0, "a.b", {}),
}
SAID: dict[str, Decision] = {
    "founded": Founded("Home", bytes(16), CERTIFICATE, "attic", bytes(32), 1000),
    "added": Added(CERTIFICATE, "barn", TrustLevel.TRUSTED),
    "level": LevelChanged(NODE, TrustLevel.ANCHOR),
    "revoked": Revoked(NODE, Cut(1, 7, b"h" * 32), "lost"),
    "left": Revoked(NODE, Cut(0, 0, b"")),
    "readmitted": Readmitted(NODE),
    "recovered": Recovered(CERTIFICATE, "attic", bytes(64)),
    "acknowledged": Acknowledged(),
}


def golden(name: str) -> list[bytes]:
    return [bytes.fromhex(text) for text in GOLDEN[name]]


def advertised(memory: ShardMemory | None) -> Advertisement:
    when = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    model, layers = ModelId("tiny"), LayerRange(0, 8)
    identifier = shard_id(model, layers)
    descriptor = ShardDescriptor(
        identifier, model, WEIGHTS, layers, 16, 100, 4, NODE, "attic",
        Endpoint("wss://127.0.0.1:7001"), "fp16", "x86/fp32", when,
    )  # fmt: skip
    return Advertisement(descriptor, ShardHealth(True, when, 1.5, 2.0, 3, 1, memory))


@pytest.mark.parametrize("name", WIRE)
def test_control_bodies(name: str) -> None:
    number, text = GOLDEN[f"wire.{name}"]
    kind, body = FrameType(number), bytes.fromhex(text)
    assert control.encode(WIRE[name]) == (kind, body)
    read = control.decode(kind, control.unpack_map(body))
    assert read == WIRE[name]
    if isinstance(read, Hello):
        assert from_hello(read) == PEER


@pytest.mark.parametrize("name", LOG)
def test_messages_about_the_log(name: str) -> None:
    body = bytes.fromhex(GOLDEN[f"log.{name}"])
    assert msgpack.packb(to_dict(LOG[name])) == body
    assert from_dict(msgpack.unpackb(body)) == LOG[name]


@pytest.mark.parametrize("name", EVENTS)
def test_events(name: str) -> None:
    body, signature = golden(f"event.{name}")
    sealed = types.seal(EVENTS[name], KEY.sign)
    assert (sealed.body, sealed.signature) == (body, signature)
    assert types.decode(body, signature) == sealed


@pytest.mark.parametrize("name", SAID)
def test_decisions(name: str) -> None:
    body, signature = golden(f"decision.{name}")
    kind, payload = decisions.encode(SAID[name])
    parents = (DecisionId(b"b" * 32), DecisionId(b"a" * 32))
    draft = DecisionDraft(HEARTH, NODE, 2, 1700000000000, kind, payload, parents)
    sealed = decision.seal(draft, KEY.sign)
    assert (sealed.body, sealed.signature) == (body, signature)
    read = decision.decode(body, signature)
    assert read == sealed
    assert decisions.decode(read.type, read.payload) == SAID[name]


def test_what_is_signed_beside_decisions() -> None:
    founded, recovered = SAID["founded"], SAID["recovered"]
    assert isinstance(founded, Founded)
    assert isinstance(recovered, Recovered)
    assert decisions.hearth_id(founded) == GOLDEN["hearth_id"]
    statement = decisions.recovery_statement(HEARTH, recovered, [b"b" * 32, b"a" * 32], 5)
    assert statement.hex() == GOLDEN["recovery"]


def test_notices_and_advertisements() -> None:
    shards = [advertised(None), advertised(ShardMemory(1, 2, 3))]
    payload = {"shards": [advertisement.encode(shard) for shard in shards]}
    notice = ephemera.Notice(HEARTH, NODE, "shards", 4, 5, 180000, payload)
    assert list(ephemera.seal_notice(notice, KEY.sign)) == golden("notice")
    read = ephemera.decode_notice(golden("notice")[0])
    assert read == notice
    assert advertisement.decode_all(read.payload["shards"], host=NODE) == shards
