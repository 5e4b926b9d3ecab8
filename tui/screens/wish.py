"""Asks what is wished for, and shows what that would need and give before it is confirmed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Button, Input, Label, Static

from mesh.errors import MeshError
from tui.estimate import estimate
from tui.words import clean

MOST = 16
"""Replicas."""
_FIRST = "Enter shows what it would need and give; Enter again confirms it."


@dataclass(frozen=True, slots=True)
class ReplicaWish:
    """A model by its name, and how many replicas of it."""

    model: str
    replicas: int


class WishScreen(ModalScreen[ReplicaWish | None]):
    """What is wished for, None when nothing. It can be confirmed once the estimate for the very
    same wish is there, or could not be had."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave it")]

    def __init__(
        self,
        plan: Callable[[ReplicaWish], Awaitable[Mapping[str, Any]]],
        title: str,
        known: Sequence[str] = (),
        before: ReplicaWish | None = None,
    ) -> None:
        """`plan` answers as `POST /mesh/v1/plan` and raises MeshError; `known` names are suggested.

        `before` is the wish that is changed: its model stays, and it may have no replicas.
        """
        super().__init__()
        self._plan, self._title, self._known, self._before = plan, title, known, before

    def compose(self) -> ComposeResult:
        """The fields, the estimate, two buttons."""
        before = self._before
        with Vertical():
            yield Label(self._title, markup=False, classes="title")
            yield Label("model: a name, a directory, or a repository of the hub")
            suggester = SuggestFromList(self._known, case_sensitive=False)
            yield Input(before.model if before else "", id="model", suggester=suggester,
                        disabled=before is not None, max_length=512)  # fmt: skip
            yield Label(f"replicas: {self._least} to {MOST}")
            yield Input(str(before.replicas if before else 1), id="replicas", type="integer",
                        max_length=2)  # fmt: skip
            with VerticalScroll(can_focus=True):
                yield Static(_FIRST, id="estimate", markup=False)
            with Horizontal():
                yield Button("No, leave it (Esc)", id="no")
                yield Button("Yes, do it", id="yes", variant="primary", disabled=True)

    def on_mount(self) -> None:
        """Begin where something is to be typed."""
        self.query_one("#model" if self._before is None else "#replicas").focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Another wish: what was estimated is of none."""
        self.query_one("#yes", Button).disabled = True
        self._say(_FIRST)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Have it estimated."""
        wanted = self._wanted()
        if isinstance(wanted, str):
            self._say(wanted)
        elif wanted.replicas == 0:
            self._offer("No replica stays loaded; what is on disk stays.", is_good=True)
        else:
            self._say("◌ is being estimated …")
            self._estimate(wanted)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The mouse and Enter."""
        wanted = self._wanted()
        if event.button.id == "yes" and isinstance(wanted, ReplicaWish):
            self.dismiss(wanted)
        else:
            self.dismiss(None)

    def action_leave(self) -> None:
        """Wish for nothing."""
        self.dismiss(None)

    @work(exclusive=True, group="estimate", exit_on_error=False)
    async def _estimate(self, wanted: ReplicaWish) -> None:
        try:
            plan = await self._plan(wanted)
        except MeshError as error:
            words = clean(f"✖ no estimate: {error.message} {error.fix or ''}")
            is_good = False
        else:
            words, is_good = "\n".join(estimate(plan)), plan["refusal"] is None
        if wanted == self._wanted():
            self._offer(words, is_good=is_good)

    def _offer(self, words: str, *, is_good: bool) -> None:
        """Say it and let it be confirmed; what looks bad is not what Enter does next."""
        self._say(words)
        self.query_one("#yes", Button).disabled = False
        self.query_one("#yes" if is_good else "#no", Button).focus()

    def _say(self, words: str) -> None:
        self.query_one("#estimate", Static).update(words)

    @property
    def _least(self) -> int:
        return 1 if self._before is None else 0

    def _wanted(self) -> ReplicaWish | str:
        """What the fields say, or what is wrong with that."""
        model = self.query_one("#model", Input).value.strip()
        if not model:
            return "Name a model."
        text = self.query_one("#replicas", Input).value.strip()
        if not text.isdecimal() or not self._least <= int(text) <= MOST:
            return f"Replicas: a number from {self._least} to {MOST}."
        return ReplicaWish(model, int(text))
