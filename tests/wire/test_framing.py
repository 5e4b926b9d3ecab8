"""The shortcut past the websocket parser."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from mesh.wire.framing import FrameReader, frame_size, unwrap, wrap


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 1792, 65535, 65536, 70000])
def test_the_shortcut_past_websockets_agrees_with_websockets(masked: bool, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    data = wrap(payload, masked=masked)
    assert len(data) == frame_size(size, masked=masked)
    theirs = (
        ServerProtocol(state=State.OPEN)
        if masked
        else ClientProtocol(WebSocketURI(False, "h", 1, "/", ""), state=State.OPEN)
    )
    theirs.receive_data(data)
    (event,) = theirs.events_received()
    assert bytes(event.data) == payload  # type: ignore[union-attr]
    plain = unwrap(data, masked=masked)
    assert (plain is not None) is (126 <= size <= 65535)
    assert plain is None or bytes(plain) == payload
    assert unwrap(data[:-1], masked=masked) is None
    assert unwrap(data + b"\0", masked=masked) is None
    assert unwrap(data, masked=not masked) is None


@settings(max_examples=60)
@given(
    masked=st.booleans(),
    frames=st.lists(st.integers(0, 200_000), max_size=6),
    cuts=st.lists(st.integers(1, 90_000), min_size=1, max_size=9),
)
def test_frames_are_read_however_they_are_cut(
    masked: bool, frames: list[int], cuts: list[int]
) -> None:
    payloads = [bytes([number]) * size for number, size in enumerate(frames, 1)]
    control = Frame(Opcode.PING, b"there?").serialize(mask=masked)
    data = b"".join(wrap(payload, masked=masked) for payload in payloads) + control
    reader, read, turn, rest = FrameReader(200_000, masked=masked), list[bytes](), 0, b""
    while data and not rest:
        size = cuts[turn % len(cuts)]
        found, rest = reader.take(data[:size])
        read += map(bytes, found)
        data, turn = data[size:], turn + 1
    assert read == payloads
    assert rest + data == control


@pytest.mark.parametrize(
    "data",
    [
        wrap(bytes(1001), masked=False),  # above the limit
        b"\x82\x7e\x00\x05hello",  # a length that could be said in fewer bytes
        b"\x82\x7f" + (200).to_bytes(8, "big") + bytes(200),
        b"\x82\xff" + bytes(12),  # masked, where nobody masks
        b"\xc2\x00",  # an extension's bit
        b"\x02\x05hello",  # a fragment
        b"\x81\x05hello",  # text
    ],
)
def test_what_is_odd_is_left_to_websockets(data: bytes) -> None:
    reader = FrameReader(1000, masked=False)
    assert reader.take(wrap(b"plain", masked=False) + data) == ([b"plain"], data)
    # The way past it, for what is alone in its read, is as strict.
    assert unwrap(b"\x81" + wrap(bytes(200), masked=False)[1:], masked=False) is None
    assert unwrap(wrap(bytes(200), masked=True), masked=False) is None
    head, mask = b"\x82\x7e", wrap(bytes(200), masked=True)[2:]
    assert unwrap(head + mask, masked=True) is None


def test_what_looks_like_a_frame_within_another_is_none() -> None:
    """Also in a read of its own: weights have any bytes, and so have lengths."""
    inner = wrap(bytes(200), masked=False)
    cases = ((bytes(296) + inner + b"end", 300), (inner[2:] + bytes(0x827E - 202), 2))
    for payload, cut in cases:
        data, reader = wrap(payload, masked=False), FrameReader(1 << 16, masked=False)
        reads = data[:cut], data[cut : cut + len(inner)], data[cut + len(inner) :]
        assert unwrap(reads[1], masked=False) is not None
        assert [bytes(each) for read in reads for each in reader.take(read)[0]] == [payload]
