"""A session that begins as another did: a part of its cache is copied instead of computed.

What two texts of one asker have in common, a system prompt for example, is computed once then.
Knows no links and no admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mesh.shard.scheduler import Scheduler, Sequence

T = TypeVar("T")

PIECE = 512
"""Positions that are copied before steps have their turn."""


async def copy_prefix(
    scheduler: Scheduler, target: Sequence, source: Sequence, positions: int
) -> int:
    """Copy what `source` holds of its first `positions` into the empty cache of `target`, in turns
    with steps; how many that were. Where the two compute differently, none.

    Raises ContextTooLong, or what the device raises.
    """
    ours, theirs = target.cache, source.cache
    is_alike = type(ours) is type(theirs) and ours is not theirs and ours.short == theirs.short
    if target.runtime is not source.runtime or target.layers != source.layers or not is_alike:
        return 0

    def copy_piece() -> bool:
        """On the device's thread: nobody computes with either meanwhile."""
        held = theirs.held(positions)
        stop = min(held, ours.length + PIECE) if theirs.in_pieces else held
        if stop > ours.length:
            ours.copy(theirs, stop)
        return ours.length < held

    while await visited(scheduler, copy_piece):
        pass
    return ours.length


async def visited(scheduler: Scheduler, work: Callable[[], T]) -> T:
    """What `work` gives, run by the device's thread in turns with steps. Raises what it raises."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def settle(result: Future[T]) -> None:
        if done.done():  # nobody waits any more
            return
        error = result.exception()
        if error is None:
            done.set_result(result.result())
        else:
            done.set_exception(error)

    scheduler.visit(work, settle)
    return await done
