"""What a session answers when it does not do what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.errors import SAME_VERSION, BadRequest, DeviceFailed, MeshError
from mesh.shard.device import is_lost
from mesh.shard.memory import is_out_of_memory
from mesh.shard.taps.codec import Path
from mesh.shard.taps.messages import Growth, TapRefusal, to_bytes

MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading a message that is not what it should be raises."""


def nothing_else(value: Any, _path: Path) -> Any:
    """For readers and writers of messages with nothing but plain values. Raises BadRequest."""
    raise BadRequest(f"A {type(value).__name__} cannot be sent here.", fix=SAME_VERSION)


def refusal(error: MeshError, grad: bool | None = None, kv: Sequence[Growth] = ()) -> bytes:
    """The answer that carries `error`, and what of a forward it ended."""
    return to_bytes(TapRefusal(error=error.to_dict(), grad=grad, kv=list(kv)), [])


def malformed(error: Exception) -> MeshError:
    """What a message that raised `error` as it was read is answered with."""
    return BadRequest(f"An intervention message is malformed: {error!r:.200}.", fix=SAME_VERSION)


def raised(error: Exception, place: str = "") -> MeshError:
    """What an error of the model's code, or of torch, is answered with; `place` is where it was."""
    if is_lost(error):
        raise error  # it is not about this job alone: `Scheduler` acts upon it
    if is_out_of_memory(error):
        return DeviceFailed("The device has no memory left.", fix="Use a shorter input.")
    return BadRequest(
        f"{type(error).__name__}: {error!s:.2000}{place:.500}",
        fix="The model's own code raised this on the machine that holds the layer.",
    )
