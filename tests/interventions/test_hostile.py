"""A job that sends what no job would: every message is answered with an error, and nothing else."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch

from mesh.errors import BadRequest
from mesh.shard.taps.codec import read_tensor, unpack
from mesh.shard.taps.session import TapLimits, TapSession
from mesh.types import LayerRange
from tests.interventions.cases import CASES, Parts
from tests.interventions.raw_messages import raw_message
from tests.interventions.worlds import DirectChannel, equal, remote, tree, whole

LAYERS = LayerRange(1, 4)
HELD = LayerRange(1, 6)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def session() -> TapSession:
    return TapSession(tree("llama", HELD), LAYERS, TapLimits())


def answer(target: TapSession, header: dict[str, Any], buffers: list[bytes] | None = None) -> Any:
    reply = target.exchange(raw_message(header, buffers or []))
    assert reply is not None
    return unpack(reply)[0]


CALL = {"op": "call", "changed": [], "want": [], "watch": True, "path": "1.mlp", "value": None}
SPAN = {"op": "span", "changed": [], "want": [], "start": 1, "stop": 4, "calls": [0, 0, 0],
        "between": False, "capture": []}  # fmt: skip
HOSTILE: dict[str, dict[str, Any]] = {
    "no operation": {},
    "an unknown one": {"op": "eval"},
    "an attribute as one": {"op": "__class__"},
    "a number as one": {"op": 3},
    "a resume of nothing": {"op": "resume", "changed": [], "want": [], "value": None},
    "a layer of another session": CALL | {"path": "4.mlp"},
    "a layer of another shard": CALL | {"path": "0.mlp"},
    "a module that is none": CALL | {"path": "1.mlp.forward"},
    "a path upwards": CALL | {"path": "1...mlp"},
    "no arguments": CALL,
    "arguments that are no pair": CALL | {"value": [1, [1, 2, 3]]},
    "a tensor nobody knows": CALL | {"value": [2, [[2, [[0, 77, 0, None]]], [3, []]]]},
    "a tensor without bytes": CALL | {"value": [2, [[2, [[0, 2, 0, ["fp32", [4]]]]], [3, []]]]},
    "a tensor inside another": CALL
    | {"value": [2, [[2, [[0, 2, 0, [1, 0, [9], [9]]]]], [3, []]]]},
    "a kind that is none": CALL | {"value": [99, 1]},
    "a kept object never shown": CALL | {"value": [2, [[2, [[12, 1]]], [3, []]]]},
    "an output class of its own": CALL | {"value": [9, "Popen", []]},
    "wants outside": CALL | {"want": [["5.output", [0]]]},
    "wants that are none": CALL | {"want": [[["x"], 0]]},
    "observers outside": CALL | {"obs": ["model.lm_head.output"]},
    "sources outside": CALL | {"sourced": ["0.mlp.source.x_0"]},
    "a source of no module": CALL | {"want": [["1.nothing.source.x_0.output", [0]]]},
    "layers out of range": SPAN | {"start": 0, "value": [2, [1.0, [1, []]]]},
    "layers without calls": SPAN | {"calls": [], "value": [2, [1.0, [1, []]]]},
    "endless layers": SPAN | {"stop": 1 << 62, "value": [2, [1.0, [1, []]]]},
    "another attention": CALL | {"attn": "kernels-community/flash-attn"},
    "a weight by attribute": {"op": "weight", "path": "1.mlp", "name": "__dict__"},
    "a weight outside": {"op": "weight", "path": "5.mlp.up_proj", "name": "weight"},
    "a cache operation": {"op": "cacheop", "cache": 1, "name": "__init__", "args": [2, []]},
    "a joint nobody knows": {"op": "backward", "joint": 5, "grad": None, "earlier": []},
    "joints that are none": {"op": "backward", "joint": [], "grad": None, "earlier": 3},
    "caches that are none": {"op": "abort", "free": 7},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_job_sends_is_refused(name: str) -> None:
    target = session()
    assert answer(target, HOSTILE[name])["op"] == "error"
    weight = answer(target, {"op": "weight", "path": "1.mlp.up_proj", "name": "weight"})
    assert weight["op"] == "value"
    target.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0\0\0",
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 1) + b"\x93",
        struct.pack("!I", 4) + b"\xdd\xff\xff\xff\xff",
        struct.pack("!I", 5) + b"\xdf\xff\xff\xff\xff",
        struct.pack("!I", 3) + msgpack.packb([1, 2]),
        struct.pack("!I", 8) + msgpack.packb({"a": msgpack.ExtType(4, b"xx")}),
        struct.pack("!I", 14) + msgpack.packb({"sizes": [1 << 40]}),
    ],
)
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    target = session()
    reply = target.exchange(message)
    assert reply is not None
    assert unpack(reply)[0]["op"] == "error"


class Recorder(DirectChannel):
    """Keeps what a real job sends to its second hop."""

    def call(self, hop: int, message: bytes) -> bytes:
        if hop == 1:
            RECORDED.append(message)
        return super().call(hop, message)


RECORDED: list[bytes] = []


def test_a_tensor_that_the_card_cannot_have_is_refused_with_what_to_do() -> None:
    """Metal has none of 64 bit; torch says so with a TypeError."""
    with pytest.raises(BadRequest, match="no fp64 tensors") as refused:
        read_tensor(["fp64", [1]], memoryview(bytes(8)), torch.device("mps"))
    assert "tensor.float()" in refused.value.fix


def test_damaged_messages_of_a_real_job_never_break_the_shard() -> None:
    world = remote("llama", 3, over=Recorder)
    channel = world.channel
    assert isinstance(channel, Recorder)
    for name in ("inside_layers", "edit_in_place", "generate_beams", "source_edit"):
        CASES[name](Parts(world.model))
    seeded = random.Random(7)
    refused = 0
    for _ in range(150):
        target = session()
        first = seeded.randrange(len(RECORDED) - 1)
        for message in RECORDED[first : first + 2]:
            damaged = bytearray(message)
            for _ in range(seeded.randrange(1, 4)):
                damaged[seeded.randrange(min(len(damaged), 400))] = seeded.randrange(256)
            reply = target.exchange(bytes(damaged))
            while reply is None:
                reply = target.go_on()
            refused += unpack(reply)[0]["op"] == "error"
        target.close()
    assert refused > 50
    # The modules are shared by all sessions: they still compute what they should.
    fresh = Parts(remote("llama", 3).model)
    for name in ("logits", "source_read"):
        equal(CASES[name](fresh), CASES[name](Parts(whole("llama"))), 0.0)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
