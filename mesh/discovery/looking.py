"""Seeing what others announce without announcing anything oneself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from mesh.discovery.announcement import Announcement, from_record, is_instance
from mesh.discovery.interfaces import InterfaceChoice
from mesh.discovery.mdns import MAX_INSTANCES
from mesh.discovery.multicast import Multicast

_TTL_S = 120
_RESOLVE_S = 2.0


async def announcements(
    interfaces: Sequence[InterfaceChoice],
) -> AsyncGenerator[Announcement, None]:
    """What nodes of every hearth announce there, as it is found and whenever it changes; without
    end. Raises OSError where multicast cannot be had."""
    changed: asyncio.Queue[str] = asyncio.Queue(MAX_INSTANCES)

    def on_state(instance: str, alive: bool) -> None:
        if alive and is_instance(instance):
            with suppress(asyncio.QueueFull):
                changed.put_nowait(instance)

    addresses = [str(choice.address) for choice in interfaces]
    multicast = await Multicast.open(addresses, None, on_state, ttl_s=_TTL_S)
    try:
        while True:
            record = await multicast.resolve(instance := await changed.get(), _RESOLVE_S)
            if record is None:
                continue
            with suppress(ValueError):  # somebody else's, or forged
                announcement = from_record(instance, *record, interfaces)
                yield announcement
    finally:
        await multicast.close()


async def look_around(interfaces: Sequence[InterfaceChoice], seconds: float) -> list[Announcement]:
    """What is announced within so many seconds, the last of each running daemon. Raises OSError."""
    seen: dict[str, Announcement] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), aclosing(announcements(interfaces)) as found:
            async for each in found:
                seen[each.instance] = each
    return list(seen.values())
