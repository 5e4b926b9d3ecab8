"""A conversation: answers as Markdown that streams, their route beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.reactive import var
from textual.widgets import Input, Static
from textual.worker import Worker

from mesh.errors import MeshError
from tui.picture import Picture
from tui.screens.screen import TopScreen
from tui.widgets.beside import Beside
from tui.widgets.streamed import Streamed
from tui.words import clean, cut_off, happened, left_out, printable


class ChatScreen(TopScreen):
    """Ask and read. A stopped answer stays in the conversation as far as it came; what a model
    thinks before it answers is shown, and is no part of the conversation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", priority=True),
        Binding("ctrl+t", "next_model", "Model", priority=True),
        Binding("ctrl+n", "forget", "New conversation", priority=True, show=False),
    ]
    AUTO_FOCUS = "Input"
    model: var[str] = var("")

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[dict[str, str]] = []
        self._answering: Worker[None] | None = None

    def body(self) -> ComposeResult:
        with Horizontal(id="conversation"):
            with Vertical():
                yield VerticalScroll(id="said", can_focus=True)
                yield QuestionField(placeholder="Ask …", id="ask")
            yield Beside()

    def took(self, picture: Picture) -> None:
        known = [model["id"] for model in picture.rows("models")]
        if picture.status and self.model not in (*known, *_at_rest(picture)):
            self.model = next(iter(_askable(picture)), "")
        self.watch_model()

    def watch_model(self) -> None:
        """The field says who is asked."""
        for field in self.query("#ask").results(Input):
            woken = ", which loads first" * self._is_at_rest
            field.placeholder = self._why_not() or f"Ask {self.model}{woken} …"

    def action_next_model(self) -> None:
        """Ask the next of the models from now on."""
        models = _askable(self.picture)
        if models:
            at = models.index(self.model) if self.model in models else -1
            self.model = models[(at + 1) % len(models)]
            self.notify(f"{self.model} is asked from now on.", markup=False)

    def action_stop(self) -> None:
        """Stop the answer; without one, leave the field, so that keys change screens."""
        if self._answering is not None and self._answering.is_running:
            self._answering.cancel()
        else:
            self.query_one("#said").focus()

    async def action_forget(self) -> None:
        """Begin a new conversation."""
        if self._answering is not None:
            self._answering.cancel()
        self.turns = []
        await self.query_one("#said").remove_children()
        self.query_one("#ask").focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Ask, unless an answer is still coming."""
        running = self._answering is not None and self._answering.is_running
        if not event.value.strip() or running:
            return
        if why_not := self._why_not():
            self.notify(why_not, severity="warning", markup=False)
            return
        event.input.value = ""
        self._answering = self._answer(event.value)

    def _why_not(self) -> str | None:
        """Why nobody can be asked now: who was chosen stays chosen while it is away."""
        if self.picture.lost is not None:
            return "no daemon can be asked now"
        if self._is_at_rest:
            return None
        for row in self.picture.rows("models"):
            if row["id"] == self.model:
                why = f"{row['id']} cannot be asked now: {row['reason']}"
                return None if row["runnable"] else clean(why)
        return "no model can be asked now"

    @property
    def _is_at_rest(self) -> bool:
        return self.model in _at_rest(self.picture) and self.model not in _ready(self.picture)

    @work(exclusive=True, group="answer", exit_on_error=False)
    async def _answer(self, text: str) -> None:
        said = self.query_one("#said", VerticalScroll)
        thought = Static("", classes="thought", markup=False)
        answer = Streamed()
        await said.mount(Static(f"▸ {text}", classes="question", markup=False), thought, answer)
        said.anchor()
        turns = self.turns  # a new conversation has others, whatever still comes of this answer
        turns.append({"role": "user", "content": text})
        beside = self.query_one(Beside)
        beside.happened, beside.shown, beside.ended = (), "", {}
        told = _Told()
        try:
            chunks = self.daemon().chat(self.model, list(turns), truncation="auto")
            async with aclosing(chunks):
                async for chunk in chunks:
                    _show_route(chunk, beside)
                    piece = told.take(chunk)
                    if told.thinking:
                        thought.update(told.thinking.strip())
                        thought.display = True
                    answer.write(printable(piece))
            for line in (left_out(beside.ended), cut_off(told.finish_reason, beside.ended)):
                if line is not None:
                    await said.mount(Static(f"⚠ {line}", classes="cut", markup=False))
        except MeshError as error:
            words = clean(f"✖ {error.message} {error.fix or ''}")
            await said.mount(Static(words, classes="failed", markup=False))
            if not told.text:
                self._give_back(text)
        finally:
            beside.shown = ""
            await answer.stop()
            if told.text:
                turns.append({"role": "assistant", "content": told.text})
            else:
                turns.pop()

    def _give_back(self, text: str) -> None:
        """What got no answer can be asked again."""
        field = self.query_one("#ask", Input)
        if not field.value:
            field.value = text
            field.action_end()


@dataclass
class _Told:
    """What has come of an answer."""

    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None

    def take(self, chunk: Mapping[str, Any]) -> str:
        """What a chunk adds to the text."""
        piece = ""
        for choice in chunk["choices"]:
            piece += choice["delta"].get("content") or ""
            self.thinking += printable(choice["delta"].get("reasoning_content") or "")
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.text += piece
        return piece


def _show_route(chunk: Mapping[str, Any], beside: Beside) -> None:
    """What a chunk says of the route goes beside the answer."""
    if not beside.shown:
        # How the status names it: see `mesh.types.shown_id`.
        beside.shown = hashlib.sha256(chunk["id"].encode()).hexdigest()[:16]
    extension = clean(chunk.get("hearthnet", {}))
    if "event" in extension:
        beside.happened = (*beside.happened[-4:], happened(extension["event"]))
    elif extension:
        beside.ended = extension


class QuestionField(Input):
    """The field for a question. Of what is pasted all is taken, in one line: textual's own field
    takes the first line and drops the others."""

    def on_paste(self, event: events.Paste) -> None:
        """Instead of what the field would do."""
        event.prevent_default()
        event.stop()
        self.replace(" ".join(event.text.splitlines()), *self.selection)


def _askable(picture: Picture) -> list[str]:
    """Models that answer at once, then those that a question wakes."""
    return list(dict.fromkeys([*_ready(picture), *_at_rest(picture)]))


def _at_rest(picture: Picture) -> list[str]:
    return [row["model_id"] for row in picture.rows("deployments") if row["resting"]]


def _ready(picture: Picture) -> list[str]:
    return [model["id"] for model in picture.rows("models") if model["runnable"]]
