"""docs/reference/wire.md: conversations between two real sessions, every frame as a table of bytes.

Nothing here encodes: `TensorSession` does. What a conversation consists of is the data below; the
tests read the page's hexadecimal again with the decoder and write it again with the encoder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import getdoc

import msgpack
import numpy as np

from mesh.errors import BadFrame
from mesh.types import WireDtype
from mesh.wire import messages as m
from mesh.wire.call_back import CallBack, CalledBack
from mesh.wire.frames import COUNT, HEADER, Frame, FrameFlags, FrameType, pack_frame
from mesh.wire.limits import Limits
from mesh.wire.protocol import TensorSession
from mesh.wire.tensors import CODES, NAMES
from mesh.wire.token_rows import ids_to_wire, top_layout, top_to_wire

LIMITS = Limits(chunk_bytes=16, window=4)
"""So that a tensor in chunks is short enough to print. Links have chunks of 1 MiB and 16 of them."""

INTRO = f"""# The wire

Between nodes: WebSocket over TLS 1.3, both sides with certificates, no permessage-deflate. One binary
WebSocket message is one frame. A link is for one purpose: `tensors` (asker to shard), `control`
(daemon to daemon) or `weights` (who fetches a checkpoint to who has it), and bears only that purpose's frames. Numbers are big-endian, tensors row-major and
little-endian. `mesh/wire/` is the implementation, `mesh.wire.protocol.TensorSession` its state machine
without I/O.

## A frame

| offset | size | field | |
|---|---|---|---|
| 0 | 1 | version | 1 |
| 1 | 1 | type | see below |
| 2 | 2 | reserved | 0 |
| 4 | 4 | sequence | counts from 0 in each direction, modulo 2^32; a gap is refused |
| 8 | 4 | length | of the payload |
| 12 | 4 | flags | {", ".join(f"{f.value} {str(f.name).lower()}" for f in FrameFlags)}; a flag that a type does not take is refused |

*Compressed*: the payload, behind a tensor header if it has one, is one zstd frame. hearthnet compresses
control bodies where that pays, and no tensors: fp16 activations hardly compress. *Final*: the tensor's
last chunk. *Gradient*: what a tensor bears is one.

A **tensor header** is: id u16 (0 where the tensor is whole), dtype u8
({", ".join(f"{code} {name}" for name, code in CODES.items())}), rank u8 (at most 8), one u32 for each
dimension.

A **control body** is one msgpack map. Every key of the message is there and no other, keys are text;
extension types, duplicate keys and trailing bytes are refused.

## Flow control

A chunk is a frame that bears tensor bytes: DATA, STEP, RESULT or BLOB. It has at most 1 MiB of them, and at most
16 chunks per direction are unacknowledged. Credits come back in the first field of the next STEP, RESULT,
BLOB or END, or in an ACK once half a window is owed; a step's last chunk is credited by its answer. A tensor
above one chunk travels as DATA frames and an END that has the message's fields. Whoever breaks a rule
gets a NACK with the reason, and the link is closed.

Below, {LIMITS.chunk_bytes} bytes are a chunk and {LIMITS.window} chunks a window, so that every frame can
be printed whole; all else is as on a link.
"""

PARTS = {
    FrameType.DATA: "A chunk of a tensor that is larger than one chunk.",
    FrameType.END: "The tensor is complete; the fields of the step or result that it belongs to.",
    FrameType.ACK: "So many chunks were consumed.",
    FrameType.FLOW: "Keep at most so many chunks in flight. Obeyed; hearthnet itself never sends it.",
    FrameType.NACK: "The peer broke the protocol, which is named; the link is closed. "
    "`mesh.errors.MeshError.to_dict` has the form.",
}
"""Frames that are no message of their own."""

_CREDITS = (("credits", "H"), ("reserved", "H"))
_STEP = (("session", "I"), ("step", "I"), ("position", "I"))
_RESULT = (("session", "I"), ("step", "I"), ("compute_us", "I"), ("queue_us", "I"))
_BLOB = (("session", "I"), ("kind", "I"), ("length", "I"), ("offset", "I"))
_HEAD = (("tensor id", "H"), ("dtype", "B"), ("rank", "B"))
_END = (("tensor id", "H"), ("kind", "B"), ("reserved", "B"))
Layout = tuple[tuple[str, str], ...]
BINARY: dict[FrameType, Layout] = {
    FrameType.STEP: (*_CREDITS, *_STEP, *_HEAD),
    FrameType.RESULT: (*_CREDITS, *_RESULT, *_HEAD),
    FrameType.BLOB: (*_CREDITS, *_BLOB, *_HEAD),
    FrameType.DATA: _HEAD,
    FrameType.ACK: (("chunks", "I"),),
    FrameType.FLOW: (("window", "I"),),
    FrameType.PING: (("token", "Q"),),
    FrameType.PONG: (("token", "Q"),),
}
_BEARERS = {FrameType.STEP: _STEP, FrameType.RESULT: _RESULT, FrameType.BLOB: _BLOB}
_SIZES = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}
Row = tuple[bytes, str, str]


@dataclass(frozen=True, slots=True)
class Spoken:
    """One frame of a conversation and who sent it."""

    sender: str
    frame: bytes


def page() -> str:
    """The whole page."""
    told: set[FrameType] = set()
    parts = [INTRO]
    for title, conversation in CONVERSATIONS.items():
        parts.append(f"## {title}\n")
        for spoken in conversation():
            parts.append("\n".join(_section(spoken, told)) + "\n")
    missing = set(FrameType) - told
    if missing:
        raise LookupError(f"no conversation of docs/wire_page.py has {missing}")
    return "\n".join(parts)


# What is said.


def _answer() -> Iterator[Spoken]:
    asker, hop = _linked("tensors", "attic", "barn")
    yield from _hellos(asker, hop)
    yield from _say(asker, hop, m.OpenPart(7, b"edit"))
    yield from _say(asker, hop, m.Open(7, "tiny", "5f" * 4, 0, 4, 64, WireDtype.FP16, token="sig"))
    yield from _say(hop, asker, m.Loading(7))
    yield from _say(hop, asker, m.Opened(7, 64))
    yield from _say(asker, hop, m.CopyPrefix(7, 5, 64))
    yield from _say(hop, asker, m.PrefixCopied(7, 0))
    yield from _say(asker, hop, m.Step(7, 0, 0, _rows(6)))
    yield from _say(hop, asker, m.Result(7, 0, _rows(1), 850, 40))
    yield from _say(asker, hop, m.Step(7, 1, 6, _rows(1)))
    yield from _say(
        hop, asker,
        m.Failure({"code": "cache_full", "message": "No room.", "fix": "Wait."}, 7, 1),
    )  # fmt: skip
    yield from _say(asker, hop, m.Park(7))
    yield from _say(asker, hop, m.Resume(7, 128))
    yield from _say(asker, hop, m.Seal(7))
    yield from _say(hop, asker, m.Sealed(7, [{"file": "layer0.bin", "rows": 6}]))
    yield from _say(hop, asker, m.Drain("it is stopping"))
    yield from _say(asker, hop, m.Close(7))
    thin = m.OpenEnds(
        9, "tiny", "5f" * 4, 0, 4, 64, WireDtype.FP16, token="sig", ids=True, candidates=1, rows=1
    )
    yield from _say(asker, hop, thin)
    yield from _say(hop, asker, m.Opened(9, 64))
    yield from _say(asker, hop, m.Step(9, 1, 0, ids_to_wire([17, 5])))
    yield from _say(hop, asker, m.Result(9, 1, top_to_wire(_TOP), 850, 40))
    yield from _say(asker, hop, m.RowAsk(9, 2, 1))
    yield from _say(hop, asker, m.Result(9, 2, _ROW, 0, 0))
    normed = m.OpenNormed(10, "tiny", "5f" * 4, 0, 4, 64, WireDtype.FP32, token="sig", ids=True)
    yield from _say(asker, hop, normed)
    yield from _say(hop, asker, m.Opened(10, 64))
    yield from _say(asker, hop, m.OpenTaps(8, "tiny", "5f" * 4, 0, 4, token="sig"))
    yield from _say(asker, hop, m.Blob(8, m.BlobKind.QUESTION, 4, 0, b"run?"))
    yield from _say(
        hop, asker, m.Blob(8, m.BlobKind.ANSWER, 24, 0, b"what the layers made of it"[:24])
    )
    yield from _say(asker, hop, m.Ping(99))
    yield from _say(asker, hop, m.Bye("done"))


def _daemons() -> Iterator[Spoken]:
    attic, barn = _linked("control", "attic", "barn")
    yield from _hellos(attic, barn)
    yield from _say(attic, barn, m.Advertise(b"body", b"signature"))
    yield from _say(attic, barn, m.Gossip({"heads": {}}))
    yield from _say(attic, barn, m.FileAsk(1, "5f" * 4, 0))
    yield from _say(barn, attic, m.FilePart(1, b"edit"))
    yield from _say(attic, barn, CallBack(1, [8421, 43107]))
    yield from _say(barn, attic, CalledBack(1, 1_893_456_000_000, ["", "timed out"]))


def _weights() -> Iterator[Spoken]:
    attic, barn = _linked("weights", "attic", "barn")
    yield from _hellos(attic, barn)
    yield from _say(attic, barn, m.WeightsAsk(1, "5f" * 32, m.Part.TENSOR, "norm.weight", 0, 24))
    yield from _say(barn, attic, m.Blob(1, m.BlobKind.ANSWER, 24, 0, bytes(16)))
    yield from _say(barn, attic, m.Blob(1, m.BlobKind.ANSWER, 24, 16, bytes(8)))


def _narrowed() -> Iterator[Spoken]:
    asker, hop = _linked("tensors", "attic", "barn")
    yield from _hellos(asker, hop)
    flow = pack_frame(FrameType.FLOW, 1, 0, COUNT.pack(2))
    asker.receive(flow)
    yield Spoken("barn", flow)
    asker.refuse(BadFrame("A second HELLO.", fix="Update."))
    yield from _frames(asker)


CONVERSATIONS = {
    "An answer: asker and hop": _answer,
    "Two daemons": _daemons,
    "Weights of a checkpoint: who fetches and who has them": _weights,
    "A narrower window, and a refusal": _narrowed,
}


def _linked(purpose: str, *names: str) -> Sequence[TensorSession]:
    return [TensorSession(m.Hello(f"id-{n}", n, purpose, "hearthnet"), LIMITS) for n in names]


def _hellos(a: TensorSession, b: TensorSession) -> Iterator[Spoken]:
    for sender, receiver in ((a, b), (b, a)):
        sender.start()
        for spoken in _frames(sender):
            receiver.receive(spoken.frame)
            yield spoken


def _say(a: TensorSession, b: TensorSession, message: m.Message) -> Iterator[Spoken]:
    """The message's frames, and what the other side answers by itself (ACK, PONG)."""
    a.send(message)
    for sender, receiver in ((a, b), (b, a)):
        for spoken in list(_frames(sender)):
            receiver.receive(spoken.frame)
            yield spoken


def _frames(session: TensorSession) -> Iterator[Spoken]:
    while (frame := session.next_frame()) is not None:
        yield Spoken(session.hello.node_name, frame)


_TOP = np.array([(9.75, [42], [9.5])], top_layout(1))
_ROW = m.WireTensor("fp32", (1, 1, 2), struct.pack("<2f", 9.5, -1.0))


def _rows(count: int) -> m.WireTensor:
    return m.WireTensor("fp16", (1, count, 4), struct.pack("<4e", 1.0, -2.0, 0.5, 0.0) * count)


# How it is shown.


def _section(spoken: Spoken, told: set[FrameType]) -> Iterator[str]:
    frame = Frame.parse(spoken.frame, 1 << 20)
    yield f"### {frame.type.name} (0x{frame.type:02x}), from {spoken.sender}\n"
    if frame.type not in told:
        told.add(frame.type)
        yield f"{_meaning(frame.type)}\n"
    yield "| offset | bytes | field | value |"
    yield "|---|---|---|---|"
    offset = 0
    head = f"sequence {frame.sequence}, {len(frame.payload)} bytes, flags {frame.flags}"
    for raw, field, value in [(spoken.frame[: HEADER.size], "header", head), *_payload(frame)]:
        yield f"| {offset} | `{raw.hex(' ', -4)}` | {field} | {value} |"
        offset += len(raw)
    yield f"\n```hex\n{spoken.frame.hex()}\n```"


def _meaning(kind: FrameType) -> str:
    if kind in PARTS:
        return PARTS[kind]
    name = kind.name.title().replace("_", "")
    message = m.CONTROL_MESSAGES.get(kind) or getattr(m, name)
    return " ".join((getdoc(message) or "").split("\n\n")[0].split())


def _payload(frame: Frame) -> Iterator[Row]:
    payload = bytes(frame.payload)
    if frame.type is FrameType.END:
        kind = FrameType(payload[2])
        yield from _fields((*_END, *_CREDITS, *_BEARERS[kind]), payload)
    elif frame.type not in BINARY:
        yield from _map(payload)
    else:
        layout = BINARY[frame.type]
        yield from _fields(layout, payload)
        if layout[-len(_HEAD) :] == _HEAD:
            yield from _tensor(payload, sum(struct.calcsize("!" + code) for _, code in layout))


def _fields(layout: Layout, payload: bytes) -> Iterator[Row]:
    at = 0
    for name, code in layout:
        raw = payload[at : at + struct.calcsize("!" + code)]
        (value,) = struct.unpack("!" + code, raw)
        shown = {"dtype": NAMES.get(value), "kind": f"0x{value:02x}"}.get(name, value)
        yield raw, f"{name} {_SIZES[code]}", str(shown)
        at += len(raw)


def _tensor(payload: bytes, at: int) -> Iterator[Row]:
    rank = payload[at - 1]
    shape = struct.unpack_from(f"!{rank}I", payload, at)
    yield payload[at : at + 4 * rank], f"shape {rank} x u32", str(shape)
    data = payload[at + 4 * rank :]
    yield data, "data", f"{len(data)} bytes"


def _map(payload: bytes) -> Iterator[Row]:
    reader = msgpack.Unpacker(raw=False)
    reader.feed(payload)
    entries = reader.read_map_header()
    yield payload[: reader.tell()], "map", f"{entries} entries"
    for _ in range(entries):
        start = reader.tell()
        name, value = reader.unpack(), reader.unpack()
        yield payload[start : reader.tell()], f"`{name}`", f"`{value!r}`"
