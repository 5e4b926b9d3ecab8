"""What daemons say to each other to find out who can open connections to whom; as `messages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mesh.codec import Int63, UInt32
from mesh.wire.frames import FrameType
from mesh.wire.messages import CONTROL, Message, Reason

MAX_PORTS = 16
"""What a `CallBack` may name."""
Ports = Annotated[list[Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=MAX_PORTS)]


@dataclass(frozen=True, slots=True)
class CallBack(Message, frame=FrameType.CALL_BACK, link=CONTROL):
    """Ask another daemon whether it can open TCP connections to these ports of the sender, at the
    address at which this link has it. Sent only to those whose hello says ``calls_back``."""

    number: UInt32
    ports: Ports


@dataclass(frozen=True, slots=True)
class CalledBack(Message, frame=FrameType.CALLED_BACK, link=CONTROL):
    """The answer to the `CallBack` of this number: for each of its ports, in their order, why it
    could not be reached, empty where it could. `wall_ms` is what the sender's clock said as the
    question came, in ms since 1970. `refused` says why nothing was tried, and is empty else."""

    number: UInt32
    wall_ms: Int63
    found: Annotated[list[Reason], Meta(max_length=MAX_PORTS)]
    refused: Reason = ""
