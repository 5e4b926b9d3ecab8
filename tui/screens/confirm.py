"""Asks before something is destroyed."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Label


class ConfirmScreen(ModalScreen[bool]):
    """A question; True when it was answered with yes. What is asked first has the focus: no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str, verb: str) -> None:
        super().__init__()
        self._question, self._verb = question, verb

    def compose(self) -> ComposeResult:
        """The question and two buttons."""
        with Vertical():
            yield Label(self._question, markup=False)
            with Horizontal():
                yield Button("No, leave it (n)", id="no")
                yield Button(f"Yes, {self._verb} (y)", id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse and Enter."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """The keys."""
        self.dismiss(yes)
