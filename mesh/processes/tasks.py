"""Background tasks that do not die unseen. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A named task whose failure is logged; the caller owns it and ends it with `end`."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def end(tasks: Iterable[asyncio.Task[None]], timeout_s: float = 5.0) -> None:
    """Cancel the tasks and wait until they are gone."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task ended: name=%s", task.get_name(), exc_info=error)
