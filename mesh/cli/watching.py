"""Going on to show what changes, until Ctrl-C or the end of the daemon: `--watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mesh.cli.output import print_json_line, say

if TYPE_CHECKING:
    from mesh.client import Client

_CLEAR = "\x1b[H\x1b[2J"
_REDRAW_S = 0.5
"""What changes faster is drawn together."""

Pick = Callable[[dict[str, Any]], dict[str, Any] | None]
"""What of an update's status is shown; None or nothing where that has not changed."""
Draw = Callable[[dict[str, Any], bool], None]
"""Prints the picture; True: on a screen that was cleared."""


async def watch(client: Client, pick: Pick, draw: Draw, *, as_json: bool) -> None:
    """The picture, drawn anew when it changes; as JSON, a line for each. Ends with the daemon."""
    import asyncio

    from mesh.config import terminal_features

    picture: dict[str, Any] = {}
    news = asyncio.Event()

    async def hear() -> None:
        """Never waits for what is drawn: then that would be of the past."""
        async with aclosing(client.follow()) as updates:
            async for update in updates:
                if changed := pick(update["status"]):
                    picture.update(changed)
                    news.set()
                    if as_json:
                        print_json_line(picture)

    async def show() -> None:
        clears = sys.stdout.isatty() and terminal_features()[0]
        while await news.wait():
            news.clear()
            if not as_json:
                sys.stdout.write(_CLEAR if clears else "")
                draw(picture, clears)
                say("" if clears else "---")
            await asyncio.sleep(_REDRAW_S)

    tasks = [asyncio.create_task(hear(), name="hear"), asyncio.create_task(show(), name="show")]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
