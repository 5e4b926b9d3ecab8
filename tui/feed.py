"""The one worker that talks to the daemon by itself: follows its feed, finds it when it is lost.

Knows nothing of screens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from mesh.errors import MeshError, NotRunning
from tui.messages import Arrived, Connected
from tui.picture import Lost
from tui.words import clean

if TYPE_CHECKING:
    from mesh.client import Client

RETRIES_S = (1.0, 2.0, 3.0, 5.0)
"""Seconds before each attempt to find the daemon again; the last stays."""

Tell = Callable[[Connected | Arrived | Lost], object]


async def follow(connect: Callable[[], Client], tell: Tell) -> None:
    """Tell what the daemon's feed says, for ever. `connect` reads files: it runs in a thread.

    Each attempt looks for the daemon anew: one that was started again has another port and key.
    """
    after, failures = 0, 0
    while True:
        lost: MeshError | None = None
        try:
            client = await asyncio.to_thread(connect)
            async with client, aclosing(client.follow(after)) as updates:
                async for update in updates:
                    if failures >= 0:
                        tell(Connected(client))
                        failures = -1
                    after = update["last_id"] or after
                    events = tuple(clean(event) for event in update["events"])
                    tell(Arrived(events, update["missed"], clean(update["status"])))
        except NotRunning as error:
            lost, after = error, 0  # whoever comes next counts anew
        except MeshError as error:
            lost = error
        failures = max(failures, 0)
        retry_s = RETRIES_S[min(failures, len(RETRIES_S) - 1)]
        failures += 1
        if lost is None:
            tell(Lost("The daemon has stopped.", "hearthnet up", retry_s))
        else:
            tell(Lost(clean(lost.message), clean(lost.fix), retry_s))
        await asyncio.sleep(retry_s)
