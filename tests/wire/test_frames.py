"""Frame headers: what goes in comes out, and each thing that can be wrong is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadFrame, FrameTooLarge, VersionMismatch
from mesh.wire.frames import HEADER, Frame, FrameFlags, FrameType, version_mismatch


@given(
    kind=st.sampled_from(FrameType),
    sequence=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=100),
)
def test_a_frame_survives_the_round_trip(kind: FrameType, sequence: int, payload: bytes) -> None:
    frame = Frame.parse(Frame(kind, sequence, payload).serialize(), 100)
    assert (frame.type, frame.sequence, bytes(frame.payload), frame.flags) == (
        kind,
        sequence,
        payload,
        0,
    )


def test_the_header_is_laid_out_as_the_transport_fixes_it() -> None:
    message = Frame(FrameType.DATA, 0x01020304, b"xy", FrameFlags.FINAL).serialize()
    assert message.hex(" ") == "01 01 00 00 01 02 03 04 00 00 00 02 00 00 00 02 78 79"


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (b"", BadFrame, "shorter than its header"),
        (HEADER.pack(1, 1, 0, 0, 0, 0)[:-1], BadFrame, "shorter than its header"),
        (HEADER.pack(2, 1, 0, 0, 0, 0), VersionMismatch, "this node is too old"),
        (HEADER.pack(0, 1, 0, 0, 0, 0), VersionMismatch, "the other side is too old"),
        (HEADER.pack(1, 0, 0, 0, 0, 0), BadFrame, "Unknown frame type 0x00"),
        (HEADER.pack(1, 0x7F, 0, 0, 0, 0), BadFrame, "Unknown frame type 0x7f"),
        (HEADER.pack(1, 1, 1, 0, 0, 0), BadFrame, "reserved field"),
        (HEADER.pack(1, 1, 0, 0, 0, 8), BadFrame, "Unknown frame flags"),
        (HEADER.pack(1, 0x10, 0, 0, 0, 2), BadFrame, "STEP does not take these"),
        (HEADER.pack(1, 0x12, 0, 0, 0, 4), BadFrame, "OPEN does not take these"),
        (HEADER.pack(1, 0x08, 0, 0, 0, 1), BadFrame, "PING does not take these"),
        (HEADER.pack(1, 1, 0, 0, 5, 0), BadFrame, "says 5 bytes of payload and has 0"),
        (HEADER.pack(1, 1, 0, 0, 0, 0) + b"x", BadFrame, "says 0 bytes of payload and has 1"),
        (HEADER.pack(1, 1, 0, 0, 101, 0) + bytes(101), FrameTooLarge, "exceeds the limit of 100"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(
    message: bytes, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        Frame.parse(message, 100)


def test_a_frame_prints_without_its_payload() -> None:
    frame = Frame(FrameType.DATA, 3, bytes(1000), FrameFlags.FINAL | FrameFlags.GRADIENT)
    assert len(str(frame)) < 150
    assert str(frame).startswith("DATA seq=3 ")
    assert "FINAL" in str(frame)
    assert str(frame).endswith("1000 bytes]")
    assert str(Frame(FrameType.ACK, 0, b"\1\2")) == "ACK seq=0 [01 02, 2 bytes]"
    assert str(Frame(FrameType.PARK, 0, b"")) == "PARK seq=0 [0 bytes]"


def test_a_version_mismatch_says_who_is_too_old() -> None:
    assert "attic is too old" in version_mismatch("attic", 1, "cellar", 2).message
    assert version_mismatch("attic", 2, "cellar", 1).fix == "Update hearthnet on cellar."
