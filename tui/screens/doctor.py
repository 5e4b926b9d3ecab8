"""What is wrong and what to do, who can see what: in plain words."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui.picture import Picture
from tui.screens.screen import TopScreen
from tui.widgets.drawn import Drawn
from tui.words import clean, out_of_order


class DoctorScreen(TopScreen):
    """Findings of the status, then the privacy report."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "look", "Look again")]

    def body(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield Findings()
            yield Static(id="missing", markup=False)
            yield Static(id="privacy", markup=False)

    def on_mount(self) -> None:
        """Ask at once."""
        self.query_one("#missing").border_title = "ready?"
        self.query_one("#privacy").border_title = "who can see what"

    def on_screen_resume(self) -> None:
        """Ask again."""
        self._look()

    def action_look(self) -> None:
        """Ask again."""
        self._look()

    @work(exclusive=True, exit_on_error=False)
    async def _look(self) -> None:
        missing = await self.ask(lambda client: client.readiness())
        if missing is None:
            return
        said = [f"✖ {clean(line)}" for _, line in missing] or ["● ready for requests"]
        self.query_one("#missing", Static).update(Text("\n".join(said)))
        report: dict[str, Any] | None = await self.ask(lambda client: client.privacy())
        if report is not None:
            words = "\n".join(clean(line) for line in report["words"])
            more = "\n\nIn a terminal: hearthnet doctor weights, hearthnet doctor jail"
            self.query_one("#privacy", Static).update(Text(words + more))


class Findings(Drawn):
    """Processes that are out of order, warnings, and why values were chosen."""

    BORDER_TITLE = "this node"

    def text(self, picture: Picture, width: int) -> Text:
        lines = []
        for process in picture.rows("processes"):
            trouble = out_of_order(process)
            words = trouble or f"{process['name']} is {process['state']}"
            mark, style = ("✖", "red") if trouble else ("●", "green")
            starts = f" · started {process['starts']} times" if process["starts"] > 1 else ""
            lines.append(Text(f"{mark} {words}{starts}", style))
        lines += [
            Text(f"⚠ {warning['message']} {warning['fix']}", "yellow")
            for warning in picture.rows("warnings")
        ]
        lines += [Text(f"  {reason}", "dim") for reason in picture.rows("reasons")]
        return Text("\n").join(lines) if lines else Text("nothing to say", "dim")
