"""Background tasks that do not die unseen. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar, cast

T = TypeVar("T")

logger = logging.getLogger(__name__)


def spawn(
    work: Coroutine[Any, Any, None], name: str, *, among: set[asyncio.Task[None]] | None = None
) -> asyncio.Task[None]:
    """A named task whose failure is logged; the caller owns it and ends it with `end`. What it does
    is on behalf of no request, whoever caused it. While it runs it is `among` those."""
    task = asyncio.create_task(work, name=name, context=Context())
    task.add_done_callback(_report)
    if among is not None:
        among.add(task)
        task.add_done_callback(among.discard)
    return task


async def end(tasks: Iterable[asyncio.Task[None] | None], timeout_s: float = 5.0) -> None:
    """Cancel the tasks, as far as there are any, and wait until they are gone."""
    waiting = [task for task in tasks if task is not None]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)


async def to_its_end(work: Callable[..., T], *args: Any) -> T:
    """What `work` returns, from a thread. Who is cancelled meanwhile hears so once it has ended:
    nothing that it uses is taken from under it. Raises what it raises."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # it was cancelled: an error of the work is of no interest any more
        raise


async def abandonable(work: Callable[..., T], *args: Any) -> T:
    """What `work` returns, from a thread that ends with the process at the latest. Who is cancelled
    meanwhile leaves it behind, and the process may end at once. Raises what it raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work(*args)
        except BaseException as caught:  # noqa: BLE001 - raised where it is awaited
            error = caught
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await done


def unheard(task: asyncio.Task[Any]) -> None:
    """For a task that is done and whose error nobody may be there to hear: that is none of its
    own."""
    if not task.cancelled():
        task.exception()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task ended: name=%s", task.get_name(), exc_info=error)
