"""`hearthnet chat [MODEL]`: a conversation in the terminal, or one turn for each piped line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from mesh.cli.answers import Hidden, display, is_screen
from mesh.cli.offering import StartDaemon, offer_daemon
from mesh.cli.options import ApiPort, AskedDaemon, Host, Plain, StateDir, Verbose, state_paths
from mesh.cli.output import note, one_line, print_json_line, report
from mesh.cli.quotes import unquoted
from mesh.errors import ContextTooLong, MeshError

if TYPE_CHECKING:
    import asyncio

    from mesh.cli.conversation import Conversation
    from mesh.cli.slash import SlashCommands
    from mesh.paths import StatePaths


_NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Neither keep nor offer what is typed.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print each answer as a line of JSON.")]


def chat(  # noqa: PLR0913 - flags
    model: Annotated[str | None, typer.Argument(help="See `hearthnet models`.")] = None,
    *,
    no_history: _NoHistory = False,
    plain: Plain = False,
    verbose: Verbose = False,
    as_json: _Json = False,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    yes: StartDaemon = False,
) -> None:
    """Talk to a model. Without MODEL the first that can answer is taken. /? lists its commands."""
    from mesh.cli.conversation import Conversation

    shown = ShownAnswers(markdown=not plain, verbose=verbose, as_json=as_json)
    daemon = AskedDaemon(state_dir, host, api_port)
    offer_daemon(daemon, yes=yes)
    converse(daemon, model, Conversation(""), shown, keeps=not no_history)


def converse(
    daemon: AskedDaemon,
    model: str | None,
    conversation: Conversation,
    shown: ShownAnswers,
    *,
    keeps: bool = True,
) -> None:
    """Talk to the model, with the conversation's settings; what is typed is kept if it `keeps`."""
    import asyncio

    from mesh.cli.kept import SavedChats
    from mesh.cli.slash import SlashCommands

    paths = state_paths(daemon.state_dir)
    commands = SlashCommands(daemon, conversation, SavedChats(paths.chats_dir))
    with asyncio.Runner() as runner:
        if warning := runner.run(commands.choose(model)):
            note(warning)
        loop = _Loop(runner, daemon, conversation, commands, shown)
        loop.run(_reader(paths, commands, shown, keeps=keeps))


@dataclass(frozen=True)
class ShownAnswers:
    """In which form answers are printed."""

    markdown: bool
    verbose: bool
    as_json: bool


class _Reader(Protocol):
    def read(self) -> str | None:
        """The next text; None at the end of the input."""


@dataclass
class _Loop:
    """Reads, and does what was said, until the end."""

    runner: asyncio.Runner
    daemon: AskedDaemon
    conversation: Conversation
    commands: SlashCommands
    shown: ShownAnswers
    _left_out: str | None = None

    def run(self, reader: _Reader) -> None:
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            note(f"{one_line(self.conversation.model)}; /? for help, /bye to leave")
        while True:
            try:
                text = reader.read()
                if text is None or not self._obey(text):
                    return
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                note("(stopped; /bye to leave)")
            except MeshError as error:
                if not is_interactive:
                    raise
                report(error)

    def _obey(self, text: str) -> bool:
        """Whether the chat goes on."""
        ask: str | None = text
        if self.commands.is_command(text):
            outcome = self.runner.run(self.commands.run(text))
            if outcome.said:
                note(outcome.said)
            if outcome.leaves:
                return False
            ask = outcome.ask
        if ask is not None and ask.strip():
            self.runner.run(self._turn(ask))
        return True

    async def _turn(self, text: str) -> None:
        from tui.words import left_out

        shown = Hidden() if self.shown.as_json else display(markdown=self.shown.markdown)
        try:
            answer = await self.conversation.turn(self.daemon, text, shown)
        except ContextTooLong as error:
            if not self.conversation.turns:
                raise
            fix = "`/clear` forgets the conversation, which goes with each question."
            raise ContextTooLong(error.message, fix=fix, param=error.param) from error
        said = left_out(answer.extension)
        if said != self._left_out and said is not None:
            note(f"[{said}]")
        self._left_out = said
        if self.shown.as_json:
            print_json_line(answer.to_dict())
        if self.shown.verbose:
            note(answer.timings())


def _reader(
    paths: StatePaths, commands: SlashCommands, shown: ShownAnswers, *, keeps: bool
) -> _Reader:
    if is_screen(sys.stdin) and is_screen(sys.stdout) and not shown.as_json:
        from mesh.cli.kept import TypedLines
        from mesh.cli.line_editor import Editor

        return Editor(TypedLines(paths.chat_history) if keeps else None, commands.words)
    return _Lines()


class _Lines:
    """Plain lines, or the texts between triple quotes: for pipes, and for simple terminals."""

    def read(self) -> str | None:
        """The next text; None at the end of the input."""
        text = _read_line(">>> ")
        while text is not None and not unquoted(text)[1]:
            further = _read_line("... ")
            if further is None:
                break
            text += f"\n{further}"
        return None if text is None else unquoted(text)[0]


def _read_line(prompt: str) -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        if sys.stdout.isatty():
            return input(prompt)
        note(prompt, end="")
        return input()
    except EOFError:
        note("")
        return None
