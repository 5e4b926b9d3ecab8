"""One measurement of this machine, by a process of its own at the lowest priority; and whether the
moment is one to be believed. When to measure is `mesh.node.own_capacity`'s to say.
"""

from __future__ import annotations

import asyncio

from mesh.capacity import Measurement
from mesh.errors import DeviceFailed, NotEnoughMemory
from mesh.processes.child import Child
from mesh.processes.exchange import Exchange
from mesh.processes.lifecycle import ChildEnding
from mesh.processes.messages import Alive, LastWords
from mesh.processes.processor import OthersLoad
from mesh.shard.commands import Measure

LIMIT_S = 120.0
QUIET_SHARE = 0.15
"""Of the processors' time others may take so much while a machine is measured."""

_MODULE = "mesh.pipeline.measuring"
_STOP_S = 5.0
_SECOND_LOOK_S = 1.0


async def measured(order: Measure) -> Measurement:
    """What a process of its own finds. Raises MeshError, TimeoutError; NotEnoughMemory where it was
    killed."""
    exchange = Exchange(
        {Alive: lambda _: None, LastWords: lambda words: exchange.end(words.error)},
        lambda message: child.channel.send(message),  # noqa: PLW0108 - it is started below
    )
    gone = DeviceFailed("The measuring process ended early.", fix="See the log.")
    child = await Child.start(
        _MODULE,
        name="measuring",
        on_message=exchange.read,
        on_closed=lambda: exchange.end(gone),
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            return await exchange.ask(order)
    except DeviceFailed as error:
        if error is not gone or not ChildEnding(await child.stop(_STOP_S)).was_killed:
            raise
        why = "The measuring process was killed, most likely for memory."
        raise NotEnoughMemory(why, fix="End something else on this machine.") from None
    finally:
        await child.stop(_STOP_S)


async def is_quiet() -> bool:
    """Whether others leave the processors alone now; no, where that cannot be read."""
    try:
        load = await asyncio.to_thread(OthersLoad)
        await asyncio.sleep(_SECOND_LOOK_S)
        return await asyncio.to_thread(load.share) <= QUIET_SHARE
    except OSError:  # no descriptors
        return False
