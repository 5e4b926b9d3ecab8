"""Going on to show what changes, until Ctrl-C or the end of the daemon: `--watch`."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from mesh.cli.output import print_json_line, say

if TYPE_CHECKING:
    from mesh.client import Client

_CLEAR = "\x1b[H\x1b[2J"
_STYLE = re.compile("\x1b\\[[0-9;]*m")
_REDRAW_S = 0.5
"""What changes faster is drawn together."""

Pick = Callable[[dict[str, Any]], dict[str, Any] | None]
"""What of an update's status is shown; None or nothing where that has not changed."""
Draw = Callable[[dict[str, Any], bool], None]
"""Prints the picture; True: on a screen that was cleared."""


async def watch(client: Client, pick: Pick, draw: Draw, *, as_json: bool) -> None:
    """The picture, drawn anew when it changes, or its window; as JSON, a line for each. Ends with
    the daemon."""
    import asyncio

    from mesh.config import terminal_features

    clears = sys.stdout.isatty() and terminal_features()[0]
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
        while await news.wait():
            news.clear()
            if not as_json:
                _draw(partial(draw, picture), clears=clears)
            await asyncio.sleep(_REDRAW_S)

    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, news.set)
    tasks = [asyncio.create_task(hear(), name="hear"), asyncio.create_task(show(), name="show")]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Page(StringIO):
    """What is to be on a terminal at once, and is drawn as on one."""

    def isatty(self) -> bool:
        return True


def _draw(draw: Callable[[bool], None], *, clears: bool) -> None:
    """Draw below what is there, or clear the screen for as many lines as it has room for: without
    that the first ones would leave it at its top."""
    if not clears:
        draw(False)
        say("---")
        return
    page = _Page()
    with redirect_stdout(page), redirect_stderr(page):
        draw(True)
    columns, left = get_terminal_size()
    lines = page.getvalue().splitlines()
    for number, line in enumerate(lines):
        left -= max(1, -(-len(_STYLE.sub("", line)) // columns))
        if left < (2 if number + 1 < len(lines) else 1):
            lines[number:] = [f"and {len(lines) - number} more lines; the window has too few"]
            break
    sys.stdout.write(_CLEAR + "".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
