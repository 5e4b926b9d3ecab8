"""The first screen: does it work, who is here, what is held, runs, comes, happened."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll

from tui.screens.screen import TopScreen
from tui.widgets.answers import Answers
from tui.widgets.bars import Bars
from tui.widgets.coming import Coming
from tui.widgets.latest import Latest
from tui.widgets.people import People


class OverviewScreen(TopScreen):
    """Answers at a glance."""

    def body(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield People()
            yield Bars()
            yield Answers()
            yield Coming()
            yield Latest()
