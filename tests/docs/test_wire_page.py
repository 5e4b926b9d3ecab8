"""The frames of docs/reference/wire.md, read by the real decoder and written by the real encoder.

Every conversation on the page is held again between two fresh sessions: what one frame means to the
receiver, the sender is told to say, and has to say in the same bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mesh.errors import MeshError
from mesh.wire.frames import COUNT, TOKEN, Frame, FrameType, number
from mesh.wire.limits import Limits
from mesh.wire.messages import Hello, Message, Ping
from mesh.wire.protocol import TensorSession

PAGE = Path(__file__).parents[2] / "docs/reference/wire.md"
LIMITS = Limits(chunk_bytes=16, window=4)
"""Those that the page says its examples were made with."""

_CONVERSATION = re.compile(r"^## ", re.MULTILINE)
_FRAME = re.compile(
    r"^### (\w+) \(0x([0-9a-f]{2})\), from (\w+)$.*?```hex\n([0-9a-f]+)\n```",
    re.MULTILINE | re.DOTALL,
)
_ROW = re.compile(r"^\| \d+ \| `([0-9a-f ]+)` \|", re.MULTILINE)

Spoken = tuple[str, bytes]


def conversations() -> list[list[Spoken]]:
    """Who sent which bytes, per conversation of the page."""
    parts = _CONVERSATION.split(PAGE.read_text(encoding="utf-8"))
    told = [[(who, bytes.fromhex(h)) for *_, who, h in _FRAME.findall(part)] for part in parts]
    return [conversation for conversation in told if conversation]


def sessions_of(conversation: list[Spoken]) -> dict[str, TensorSession]:
    """A session for each side, with the hello that the page has it say."""
    sessions = {}
    for who, frame in conversation[:2]:
        (hello,) = TensorSession(Hello("", "", "", ""), LIMITS).receive(frame)
        assert isinstance(hello, Hello)
        assert hello.node_name == who
        sessions[who] = TensorSession(hello, LIMITS)
    for session in sessions.values():
        session.start()
    return sessions


def written_again(sender: TensorSession, receiver: TensorSession, data: bytes) -> bool:
    """Let the receiver read a frame and the sender say what it meant; False for FLOW, which no
    session sends by itself."""
    frame = Frame.parse(data, 1 << 20)
    if frame.type is FrameType.FLOW:
        receiver.receive(data)
        assert Frame(FrameType.FLOW, frame.sequence, COUNT.pack(2)).serialize() == data
        return False
    if frame.type is FrameType.NACK:
        with pytest.raises(MeshError) as refused:
            receiver.receive(data)
        sender.refuse(refused.value)
        return True
    meant: list[Message] = receiver.receive(data)
    if frame.type is FrameType.PING:
        meant = [Ping(number(frame, TOKEN))]
    # A session says HELLO when it starts, and answers PONG and ACK by itself.
    if frame.type not in {FrameType.HELLO, FrameType.PONG, FrameType.ACK}:
        for message in meant:
            sender.send(message)
    return True


@pytest.mark.parametrize(
    "conversation", conversations(), ids=lambda spoken: f"{len(spoken)} frames"
)
def test_frames_are_decoded_and_encoded_back(conversation: list[Spoken]) -> None:
    sessions = sessions_of(conversation)
    names = list(sessions)
    held: list[bytes] = []  # chunks, until the message that they are part of is known
    for who, data in conversation:
        sender, receiver = sessions[who], sessions[names[names.index(who) - 1]]
        if not written_again(sender, receiver, data):
            continue
        held.append(data)
        if Frame.parse(data, 1 << 20).type is not FrameType.DATA:
            assert [sender.next_frame() for _ in held] == held
            held = []
    assert held == []
    assert all(session.next_frame() is None for session in sessions.values())


def test_every_type_of_frame_is_on_the_page_under_its_number() -> None:
    found = {(name, int(code, 16)) for name, code, *_ in _FRAME.findall(PAGE.read_text("utf-8"))}
    assert found == {(kind.name, int(kind)) for kind in FrameType}


def test_the_rows_of_each_table_are_the_whole_frame() -> None:
    for match in _FRAME.finditer(PAGE.read_text(encoding="utf-8")):
        assert b"".join(map(bytes.fromhex, _ROW.findall(match[0]))).hex() == match[4]
