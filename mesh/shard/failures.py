"""A failure of the device, made an error that an asker can act upon."""

from __future__ import annotations

from mesh.errors import DeviceFailed, DeviceLost
from mesh.shard.device import is_lost


def lost(error: BaseException) -> DeviceLost | None:
    """What to end a process with after this error; None when the device may still compute."""
    if not is_lost(error):
        return None
    first_line = str(error).partition("\n")[0][:200].rstrip(".")
    return DeviceLost(
        f"The device failed for good: {first_line}.",
        fix="The process starts again by itself; see its log if this repeats.",
    )


def device_failed(error: Exception) -> DeviceFailed:
    """What stands for an error that nobody foresaw (`mesh.errors.as_mesh_error`)."""
    if (gone := lost(error)) is not None:
        return gone
    return DeviceFailed(
        f"The shard failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}.",
        fix="Use another shard meanwhile; the details are in that node's log.",
    )
