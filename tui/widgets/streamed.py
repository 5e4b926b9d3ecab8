"""Markdown that is drawn while it comes, at a cost that its length does not raise.

Textual draws the last block anew with each piece, and the widgets of a list are many: so what is
long is cut into pieces, and only the last of them is still drawn. Between two drawings it is idle
for twice as long as one took, so that keys are answered.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from textual.containers import Vertical
from textual.widgets import Markdown
from textual.worker import Worker, WorkerCancelled

from tui.markdown import cut, spelled

_IDLE_SHARE = 2
_LONGEST_IDLE_S = 1.0


class Streamed(Vertical):
    """`write` while it comes, then `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Markdown | None = None
        self._shown = self._pending = ""
        self._news, self._ended = asyncio.Event(), asyncio.Event()
        self._drawing: Worker[None] | None = None

    def on_mount(self) -> None:
        """Draw until all is said."""
        self._drawing = self.run_worker(self._draw_all(), exit_on_error=False)

    def write(self, piece: str) -> None:
        """More of it."""
        self._pending += piece
        self._news.set()

    async def stop(self) -> None:
        """That was all; it is drawn when this returns, unless it was removed."""
        self._ended.set()
        self._news.set()
        if self._drawing is not None:
            with suppress(WorkerCancelled):
                await self._drawing.wait()

    async def _draw_all(self) -> None:
        now = asyncio.get_running_loop().time
        while self._pending or not self._ended.is_set():
            await self._news.wait()
            self._news.clear()
            begun = now()
            await self._draw()
            await self._refreshed()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LONGEST_IDLE_S, _IDLE_SHARE * (now() - begun))):
                    await self._ended.wait()

    async def _refreshed(self) -> None:
        """Until the screen shows it: laying that out costs more than the drawing, the longer a
        conversation the more."""
        shown = asyncio.Event()
        self.call_after_refresh(shown.set)
        with suppress(TimeoutError):  # nobody looks at another screen than the one that is shown
            async with asyncio.timeout(_LONGEST_IDLE_S):
                await shown.wait()

    async def _draw(self) -> None:
        text, self._pending = self._shown + self._pending, ""
        while (found := cut(text)) is not None:
            before, is_within = await self._show(text[: found.end]), found.is_within
            before.set_class(is_within, "goes-on")
            self._last, self._shown = None, ""
            text = found.opening + text[found.end :]
            after = await self._show(text)
            after.set_class(is_within, "continued")
        await self._show(text)

    async def _show(self, text: str) -> Markdown:
        """Have the last piece say this."""
        if self._last is None:
            self._last = Markdown(open_links=False, parser_factory=spelled)
            await self.mount(self._last)
        if text.startswith(self._shown):
            await self._last.append(text[len(self._shown) :])
        else:
            await self._last.update(text)
        self._shown = text
        return self._last
