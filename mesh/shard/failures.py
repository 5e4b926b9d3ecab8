"""What nobody foresaw, made an error that an asker can act upon."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from mesh.errors import DeviceFailed, DeviceLost
from mesh.errors.foreseen import foreseen as foreseen_or
from mesh.shard.device import is_lost

T = TypeVar("T")


async def foreseen(work: Awaitable[T], doing: str) -> T:
    """See `mesh.errors.foreseen`: DeviceFailed stands for what nobody foresaw."""
    return await foreseen_or(work, doing, _device_failed)


def lost(error: BaseException) -> DeviceLost | None:
    """What to end a process with after this error; None when the device may still compute."""
    if not is_lost(error):
        return None
    first_line = str(error).partition("\n")[0][:200].rstrip(".")
    return DeviceLost(
        f"The device failed for good: {first_line}.",
        fix="The process starts again by itself; see its log if this repeats.",
    )


def _device_failed(error: Exception) -> DeviceFailed:
    if (gone := lost(error)) is not None:
        return gone
    return DeviceFailed(
        f"The shard failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}.",
        fix="Use another shard meanwhile; the details are in that node's log.",
    )
