"""What nobody foresaw, made an error that an asker can act upon."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from mesh.errors import DeviceFailed, MeshError

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def foreseen(work: Awaitable[T], doing: str) -> T:
    """What `work` gives; `doing` names it in the log.

    Raises MeshError only: DeviceFailed stands for what nobody foresaw.
    """
    try:
        return await work
    except MeshError:
        raise
    except Exception as error:
        logger.exception("%s failed", doing)
        raise DeviceFailed(
            f"The shard failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}.",
            fix="Use another shard meanwhile; the details are in that node's log.",
        ) from error
