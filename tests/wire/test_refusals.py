"""Whatever the peer sends: a refusal with a reason, and never more memory than the limits say."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import BadFrame, FrameTooLarge, MeshError, WireError
from mesh.wire.compression import compress_if_it_pays, decompress
from mesh.wire.control import pack_map
from mesh.wire.frames import Frame, FrameType, pack_frame
from mesh.wire.limits import Limits
from mesh.wire.messages import Message, Park, Ping, Step, WireTensor
from mesh.wire.protocol import TensorSession
from mesh.wire.tensors import pack_header
from tests.wire.support import SMALL, frames, hello, session_pair, tensor

HEAD = pack_header(WireTensor("int8", (200,), b""), 5)
FIELDS = struct.pack("!HHIII", 0, 0, 1, 0, 0)
END = struct.pack("!HBB", 5, 0x10, 0) + FIELDS
T = FrameType
AFTER_HELLO = 1
"""The number of the next frame of a session that has heard a HELLO."""


def blob(kind: int = 1, length: int = 16, offset: int = 0, of: WireTensor | None = None) -> bytes:
    """The body of a BLOB frame of session 1."""
    held = of or tensor("int8", (16,))
    return struct.pack("!HHIIII", 0, 0, 1, kind, length, offset) + pack_header(held, 0) + held.data


Sent = list[tuple[FrameType, int, bytes]]


def chunk(size: int = 64, head: bytes = HEAD) -> bytes:
    return head + bytes(size)


def whole(fields: bytes = FIELDS, size: int = 16) -> bytes:
    return fields + pack_header(WireTensor("int8", (16,), b""), 0) + bytes(size)


def squeezed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


CASES: dict[str, tuple[Sent, str]] = {
    "second hello": ([(T.HELLO, 0, pack_map({"version": 1}))], "second HELLO"),
    "window overrun": ([(T.STEP, 0, whole())] * 17, "unacknowledged chunks"),
    "window overrun in chunks": (
        [(T.STEP, 0, whole())] * 16 + [(T.DATA, 0, chunk())], "unacknowledged chunks"
    ),
    "shape change": (
        [(T.DATA, 0, chunk()), (T.DATA, 0, chunk(64, pack_header(tensor("int8", (201,)), 5)))],
        "changed its shape",
    ),
    "gradient change": ([(T.DATA, 0, chunk()), (T.DATA, 4, chunk())], "gradient flag"),
    "empty chunk": ([(T.DATA, 0, chunk(0))], "bears no bytes"),
    "chunk above the limit": ([(T.DATA, 0, chunk(65))], "A chunk of 65 bytes exceeds 64"),
    "surplus bytes": ([(T.DATA, 0, chunk())] * 4, "more bytes than its shape"),
    "chunk after the final one": (
        [(T.DATA, 2, chunk()), (T.DATA, 0, chunk())], "follows the final chunk"
    ),
    "final too early": ([(T.DATA, 2, chunk()), (T.END, 0, END)], "needs 200 bytes, 64 came"),
    "END too early": ([(T.DATA, 0, chunk()), (T.END, 0, END)], "before its final chunk"),
    "END of nothing": ([(T.END, 0, END)], "nobody started"),
    "END cut short": ([(T.END, 0, END[:3])], "cut short"),
    "END without fields": ([(T.END, 0, END[:-1])], "names no step"),
    "END of a park": ([(T.END, 0, struct.pack("!HBB", 5, 0x14, 0) + FIELDS)], "names no step"),
    "END with reserved": ([(T.END, 0, struct.pack("!HBB", 5, 0x10, 1) + FIELDS)], "names no step"),
    "END with reserved fields": (
        [(T.END, 0, END[:4] + struct.pack("!HHIII", 0, 1, 1, 0, 0))], "reserved field"
    ),
    "too many tensors": (
        [(T.DATA, 0, chunk(1, pack_header(tensor("int8", (9,)), n))) for n in range(17)],
        "tensors are open",
    ),
    "tensor above the limit": (
        [(T.DATA, 0, chunk(1, pack_header(WireTensor("fp32", (1025,), b""), 0)))], "the limit is"
    ),
    "step cut short": ([(T.STEP, 0, FIELDS[:-1])], "cut short"),
    "step with reserved": (
        [(T.STEP, 0, whole(struct.pack("!HHIII", 0, 9, 1, 0, 0)))], "reserved field"
    ),
    "step with too few bytes": ([(T.STEP, 0, whole(size=15))], "needs 16 bytes, 15 came"),
    "step with too many bytes": ([(T.STEP, 0, whole(size=17))], "needs 16 bytes, 17 came"),
    "step of rank 9": ([(T.STEP, 0, FIELDS + b"\0\0\4\x09" + bytes(40))], "rank 9"),
    "step without a dtype": ([(T.STEP, 0, FIELDS + b"\0\0\x09\1" + bytes(40))], "dtype 9"),
    "step too large for one frame": (
        [(T.STEP, 0, FIELDS + pack_header(WireTensor("int8", (65,), b""), 0) + bytes(65))],
        "the limit is 64",
    ),
    "blob of no kind": ([(T.BLOB, 0, blob(kind=3))], "none of a blob"),
    "blob beyond its length": ([(T.BLOB, 0, blob(length=15))], "none of a blob"),
    "blob behind its end": ([(T.BLOB, 0, blob(offset=1))], "none of a blob"),
    "blob of numbers": (
        [(T.BLOB, 0, blob(of=tensor("fp16", (8,))))], "none of a blob"
    ),
    "blob with a shape": ([(T.BLOB, 0, blob(of=tensor("int8", (4, 4))))], "none of a blob"),
    "blob with a gradient": ([(T.BLOB, 4, blob())], "none of a blob"),
    "blob cut short": ([(T.BLOB, 0, blob()[:19])], "cut short"),
    "blob too large for one frame": (
        [(T.BLOB, 0, blob(length=65, of=tensor("int8", (65,))))], "the limit is 64"
    ),
    "credits for nothing": (
        [(T.STEP, 0, whole(struct.pack("!HHIII", 1, 0, 1, 0, 0)))], "1 chunks acknowledged, 0"
    ),
    "ack for nothing": ([(T.ACK, 0, struct.pack("!I", 3))], "3 chunks acknowledged, 0"),
    "ack of zero": ([(T.ACK, 0, bytes(4))], "ACK of nothing"),
    "ack of a wrong size": ([(T.ACK, 0, bytes(5))], "ACK payload of 5 bytes"),
    "window too large": ([(T.FLOW, 0, struct.pack("!I", 17))], "A window of 17"),
    "ping of a wrong size": ([(T.PING, 0, b"")], "PING payload of 0 bytes"),
    "pong for no ping": ([(T.PONG, 0, bytes(8))], "PONG for no PING"),
    "control above the limit": ([(T.BYE, 0, bytes(2049))], "2049 bytes exceeds 2048"),
    "not msgpack": ([(T.BYE, 0, b"\xc1")], "not strict msgpack"),
    "not a map": ([(T.BYE, 0, msgpack.packb([1]))], "not a map"),
    "trailing bytes": ([(T.BYE, 0, pack_map({"reason": ""}) + b"\0")], "not strict msgpack"),
    "duplicate key": ([(T.PARK, 0, b"\x82\xa7session\1\xa7session\1")], "duplicate key"),
    "key of bytes": ([(T.PARK, 0, b"\x81\xc4\7session\1")], "not text"),
    "key of a number": ([(T.PARK, 0, b"\x81\1\1")], "not strict msgpack"),
    "extension": ([(T.PARK, 0, msgpack.packb({"session": msgpack.ExtType(5, b"x")}))], "strict"),
    "empty extension": ([(T.PARK, 0, b"\x81\xa7session\xc7\0\5")], "extension type 5"),
    "timestamp": ([(T.PARK, 0, msgpack.packb({"session": msgpack.Timestamp(1)}))], "strict"),
    "wrong utf-8": ([(T.BYE, 0, b"\x81\xa6reason\xa1\xff")], "strict"),
    "array bomb": ([(T.BYE, 0, b"\xdd\x7f\xff\xff\xff")], "strict"),
    "nested arrays": ([(T.BYE, 0, b"\x81\xa6reason" + b"\x91" * 300 + b"\0")], "nested deeper"),
    "nested maps": ([(T.BYE, 0, b"\x81\xa1a" * 300 + b"\0")], "nested deeper"),
    "nested beyond msgpack": ([(T.BYE, 0, b"\x81\xa6reason" + b"\x91" * 1900)], "strict"),
    "missing key": ([(T.BYE, 0, pack_map({}))], "missing or unknown keys"),
    "unknown key": ([(T.PARK, 0, pack_map({"session": 1, "more": 1}))], "unknown keys"),
    "wrong type": ([(T.PARK, 0, pack_map({"session": True}))], "wrong type or size"),
    "list of non-maps": (
        [(T.SEALED, 0, pack_map({"session": 1, "files": [1]}))], "files in a SEALED"
    ),
    "not zstd": ([(T.BYE, 1, b"no zstd")], "cannot be read"),
    "compressed control bomb": ([(T.BYE, 1, squeezed(bytes(10**6)))], "more than 2048 bytes"),
    "compressed chunk bomb": ([(T.DATA, 1, HEAD + squeezed(bytes(10**6)))], "more than 64 bytes"),
    "compressed step bomb": (
        [(T.STEP, 1, whole(size=0) + squeezed(bytes(10**6)))], "more than 16 bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_stream_is_nacked_with_the_reason(case: str) -> None:
    sent, reason = CASES[case]
    a, b = session_pair()
    stream = [
        pack_frame(kind, AFTER_HELLO + index, flags, payload)
        for index, (kind, flags, payload) in enumerate(sent)
    ]
    for message in stream[:-1]:
        b.receive(message)
    with pytest.raises(WireError, match=reason) as caught:
        b.receive(stream[-1])
    *_, nack = frames(b)
    assert b.is_closed
    assert Frame.parse(nack, 4096).type is FrameType.NACK
    with pytest.raises(type(caught.value), match=reason):
        a.receive(nack)
    assert a.is_closed


def test_a_gap_in_the_sequence_is_refused() -> None:
    a, b = session_pair()
    a.send(Park(1))
    a.send(Park(2))
    with pytest.raises(BadFrame, match=r"Frame 2 came where 1 was expected"):
        b.receive(frames(a)[1])


def test_a_plain_step_out_of_sequence_is_refused() -> None:
    a, b = session_pair()
    a.send(Step(1, 0, 0, tensor()))
    (step,) = frames(a)
    b.receive(step)
    with pytest.raises(BadFrame, match=r"Frame 1 came where 2 was expected"):
        b.receive(step)


def test_nothing_comes_before_hello() -> None:
    a, fresh = session_pair()[0], TensorSession(hello(), SMALL)
    a.send(Ping(1))
    (ping,) = frames(a)
    with pytest.raises(BadFrame, match="PING came before HELLO"):
        fresh.receive(pack_frame(FrameType.PING, 0, 0, ping[16:]))


def test_a_hello_above_its_own_limit_is_refused() -> None:
    fresh = TensorSession(hello(), SMALL)
    with pytest.raises(FrameTooLarge, match="HELLO body"):
        fresh.receive(pack_frame(FrameType.HELLO, 0, 0, bytes(1025)))


def test_a_malformed_nack_closes_too() -> None:
    a, b = session_pair()
    with pytest.raises(BadFrame):
        b.receive(pack_frame(FrameType.NACK, AFTER_HELLO, 0, b"\xc1"))
    assert b.is_closed
    assert not a.is_closed


def test_incomplete_tensors_are_bounded_together() -> None:
    _, b = session_pair(Limits(chunk_bytes=64, tensor_bytes=640, reassembly_bytes=640))
    heads = [pack_header(WireTensor("int8", (640,), b""), number % 2) for number in range(11)]
    *fit, last = (
        pack_frame(FrameType.DATA, AFTER_HELLO + number, 0, head, bytes(64))
        for number, head in enumerate(heads)
    )
    for frame in fit:
        b.receive(frame)
    assert b.held_bytes == 640
    with pytest.raises(FrameTooLarge, match="Incomplete tensors exceed 640 bytes"):
        b.receive(last)


def bomb(*, states_its_size: bool) -> bytes:
    """A gibibyte of zeros, made without holding one."""
    compressor = zstandard.ZstdCompressor().compressobj(1 << 30 if states_its_size else -1)
    block = bytes(1 << 20)
    return b"".join([compressor.compress(block) for _ in range(1024)]) + compressor.flush()


@pytest.mark.parametrize("states_its_size", [True, False])
def test_a_zstd_bomb_is_refused_within_the_limit(states_its_size: bool) -> None:
    data = bomb(states_its_size=states_its_size)
    assert len(data) < 200_000
    tracemalloc.start()
    with pytest.raises(FrameTooLarge, match="more than 1048576 bytes"):
        decompress(data, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_zstd_window_above_the_bound_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(random.Random(1).randbytes(1 << 20)) + compressor.flush()
    with pytest.raises(BadFrame, match="cannot be read"):
        decompress(data, 1 << 21)


def test_compression_is_only_used_where_it_pays() -> None:
    assert compress_if_it_pays(bytes(64 * 1024)) is None
    assert compress_if_it_pays(random.Random(1).randbytes(100_000)) is None
    packed = compress_if_it_pays(bytes(100_000))
    assert packed is not None
    assert decompress(packed, 100_000) == bytes(100_000)


@pytest.mark.parametrize("kind", [FrameType.STEP, FrameType.DATA])
def test_compressed_tensors_are_understood(kind: FrameType) -> None:
    _, b = session_pair()
    head = pack_header(WireTensor("int8", (64,), b""), 5)
    packed = squeezed(b"\3" * 64)
    if kind is FrameType.STEP:
        got = b.receive(pack_frame(kind, AFTER_HELLO, 1, FIELDS, head, packed))
    else:
        b.receive(pack_frame(kind, AFTER_HELLO, 1 | 2, head, packed))
        got = b.receive(pack_frame(FrameType.END, AFTER_HELLO + 1, 0, END))
    (step,) = got
    assert isinstance(step, Step)
    assert bytes(step.tensor.data) == b"\3" * 64


# Fuzzing


def valid_stream() -> list[bytes]:
    """Frames of every kind, in an order a peer would accept."""
    a, b = session_pair()
    stream: list[bytes] = []
    outgoing: list[Message] = [
        Park(1), Step(1, 0, 0, tensor()), Step(2, 0, 0, tensor("int8", (300,))), Ping(5)
    ]  # fmt: skip
    for message in outgoing:
        a.send(message)
        stream += frames(a)
    assert all(b.receive(frame) is not None for frame in stream)
    return stream


STREAM = valid_stream()


def feed(session: TensorSession, stream: list[bytes]) -> None:
    """Deliver until the session refuses; anything but a refusal is the test's failure."""
    tracemalloc.start()
    try:
        for message in stream:
            session.receive(message)
    except MeshError:
        assert session.is_closed
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
    assert session.held_bytes <= SMALL.reassembly_bytes + SMALL.window * SMALL.chunk_bytes


@settings(max_examples=150)
@given(messages=st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_refused(messages: list[bytes]) -> None:
    feed(session_pair()[1], messages)


@settings(max_examples=150)
@given(kind=st.sampled_from(FrameType), flags=st.integers(0, 7), payload=st.binary(max_size=300))
def test_random_payloads_of_every_type_are_refused_or_understood(
    kind: FrameType, flags: int, payload: bytes
) -> None:
    _, b = session_pair()
    feed(b, [pack_frame(kind, AFTER_HELLO, flags, payload)])
    feed(TensorSession(hello(), SMALL), [pack_frame(kind, 0, flags, payload)])


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_stream_is_refused_or_understood(data: st.DataObject) -> None:
    stream = [bytearray(frame) for frame in STREAM]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(stream))
        mutate(frame, data.draw)
    feed(session_pair()[1], [bytes(frame) for frame in stream])


def mutate(frame: bytearray, draw: Callable[..., int]) -> None:
    at = draw(st.integers(0, len(frame) - 1)) if frame else 0
    kind = draw(st.integers(0, 2))
    if kind == 0 and frame:
        frame[at] ^= draw(st.integers(1, 255))
    elif kind == 1:
        del frame[at : at + draw(st.integers(1, 8))]
    else:
        frame[at:at] = bytes([draw(st.integers(0, 255))])


@given(number=st.integers(0, 255), at=st.integers(0, 47))
def test_the_short_way_and_the_long_way_agree(number: int, at: int) -> None:
    """A plain step with one byte changed: taken means taken as the long way would."""
    frame = bytearray(STREAM[1])
    frame[at] = number
    outcomes = []
    for short in (True, False):
        _, session = session_pair()
        session.receive(STREAM[0])
        if not short:
            inbox = session._inbox
            assert inbox.plain
            inbox.plain = lambda *_: None  # type: ignore[method-assign]
        try:
            outcomes.append(repr([describe(m) for m in session.receive(bytes(frame))]))
        except WireError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def describe(message: Message) -> object:
    if isinstance(message, Step):
        wire = message.tensor
        return (message.session, message.step, message.position, wire.dtype, wire.shape,
                bytes(wire.data), wire.gradient)  # fmt: skip
    return message
