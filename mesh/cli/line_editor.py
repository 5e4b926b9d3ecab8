"""The line that is typed into `chat` on a terminal: editing, history, several lines, completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from mesh.cli.kept import TypedLines
from mesh.cli.output import one_line, report
from mesh.cli.quotes import unquoted
from mesh.errors import MeshError

if TYPE_CHECKING:
    from prompt_toolkit.document import Document

Words = Callable[[str], Sequence[tuple[str, str]]]
"""The words, with what each means, that may stand where this text ends."""


class Editor:
    """Reads one text after the other. Enter sends; Alt-Enter, and Enter in quotes, begins a line.

    A history that cannot be read, or written, is told of once and done without.
    """

    def __init__(self, typed: TypedLines | None, words: Words) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=">>> ",
            multiline=True,
            prompt_continuation="... ",
            history=_history(typed),
            completer=_Commands(words),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text[:1] == "/"),
            key_bindings=_keys(),
        )

    def read(self) -> str | None:
        """The next text, without quotes around it; None at the end (Ctrl-D).

        Raises KeyboardInterrupt (Ctrl-C).
        """
        try:
            return unquoted(self._session.prompt())[0]
        except EOFError:
            return None


class _Commands(Completer):
    def __init__(self, words: Words) -> None:
        self._words = words

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        del complete_event
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        begun = text.rpartition(" ")[2]
        for word, meaning in self._words(text):
            if word.startswith(begun):
                yield Completion(
                    word, -len(begun), display=one_line(word), display_meta=one_line(meaning)
                )


class _Kept(History):
    """prompt_toolkit's view of `TypedLines`."""

    def __init__(self, typed: TypedLines) -> None:
        super().__init__()
        self._typed: TypedLines | None = typed
        self._before = typed.read()

    def load_history_strings(self) -> Iterable[str]:
        """What was typed before, the newest first."""
        return reversed(self._before)

    def store_string(self, string: str) -> None:
        """Keep one more."""
        if self._typed is None:
            return
        try:
            self._typed.add(string)
        except MeshError as error:
            self._typed = None
            report(error)


def _history(typed: TypedLines | None) -> History:
    if typed is None:
        return InMemoryHistory()
    try:
        return _Kept(typed)
    except MeshError as error:
        report(error)
        return InMemoryHistory()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not unquoted(buffer.text)[1]:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
