"""What nobody foresaw in a shard, made an error that an asker can act upon."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from mesh.errors import DeviceFailed
from mesh.errors.foreseen import foreseen as foreseen_or

T = TypeVar("T")


async def foreseen(work: Awaitable[T], doing: str) -> T:
    """See `mesh.errors.foreseen`: DeviceFailed stands for what nobody foresaw."""
    return await foreseen_or(work, doing, _device_failed)


def _device_failed(error: Exception) -> DeviceFailed:
    return DeviceFailed(
        f"The shard failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}.",
        fix="Use another shard meanwhile; the details are in that node's log.",
    )
