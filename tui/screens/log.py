"""What happened, filtered as one types; or what the hearth's nodes have signed."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import var
from textual.widgets import Input, Log

from tui.journal import KEPT, Journal
from tui.screens.screen import TopScreen
from tui.words import clean, time_of


class LogScreen(TopScreen):
    """A field for the filter, and lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("s", "signed", "Signed"),
        Binding("escape", "leave", "Leave the field", priority=True, show=False),
    ]
    AUTO_FOCUS = "#lines"
    signed: var[bool] = var(False)

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._written = 0
        self._entries: list[str] = []

    def body(self) -> ComposeResult:
        yield Input(placeholder="filter: any text; / to come here, Esc to leave", id="filter")
        yield Log(max_lines=KEPT, id="lines")

    def on_mount(self) -> None:
        """Show what was heard before."""
        self._begin()

    def on_screen_resume(self) -> None:
        """Show what was heard while nobody looked."""
        self.heard()

    def heard(self) -> None:
        """The journal has more: write what is new."""
        if not self.is_mounted or self.signed:
            return
        new = self._journal.newest(self._journal.count - self._written)
        self._written = self._journal.count
        if new:
            self.query_one("#lines", Log).write_lines(new)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Another filter."""
        self._journal.set_filter(event.value)
        self._begin()

    def on_input_submitted(self) -> None:
        """Enter leaves the field."""
        self.action_leave()

    def action_filter(self) -> None:
        """Type a filter."""
        self.query_one("#filter").focus()

    def action_leave(self) -> None:
        """To the lines."""
        self.query_one("#lines").focus()

    def action_signed(self) -> None:
        """Change between what happened and what was signed."""
        self.signed = not self.signed
        self._begin()
        if self.signed:
            self._fetch()

    def _begin(self) -> None:
        lines = self.query_one("#lines", Log).clear()
        lines.border_title = "signed by the hearth's nodes" if self.signed else "what happened"
        self._written = 0
        if self.signed:
            lines.write_lines(
                [line for line in self._entries if self._journal.filter in line.lower()]
            )
        self.heard()

    @work(exclusive=True, group="signed", exit_on_error=False)
    async def _fetch(self) -> None:
        page = await self.ask(lambda client: client.log(limit=200))
        if page is None:
            return
        rows = sorted([*page["decisions"], *page["facts"]], key=lambda row: str(row["at"]))
        self._entries = [_line(clean(row)) for row in rows]
        self._begin()


def _line(row: dict[str, Any]) -> str:
    said = " ".join(f"{key}={str(value)[:32]}" for key, value in row["says"].items())
    return f"{row['at'][:10]} {time_of(row['at'])} {row['author_name']} {row['type']} {said}"
