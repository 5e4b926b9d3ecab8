"""What nobody foresaw, made an error with a code where a piece of work ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mesh.errors.root import MeshError

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def foreseen(
    work: Awaitable[T], doing: str, otherwise: Callable[[Exception], MeshError]
) -> T:
    """What `work` gives; `doing` names it in the log.

    Raises MeshError only: what `otherwise` makes of an error stands for what nobody foresaw.
    """
    try:
        return await work
    except MeshError:
        raise
    except Exception as error:
        logger.exception("%s failed", doing)
        raise otherwise(error) from error
