"""The commands inside `chat`: each begins with a slash; what it says goes to stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from mesh.cli import lens, why
from mesh.cli.bringing_up import deployed_and_up, is_deployed, loading
from mesh.cli.conversation import SETTINGS, Conversation
from mesh.cli.output import one_line, route_line
from mesh.errors import ModelNotFound

if TYPE_CHECKING:
    from mesh.cli.kept import SavedChats
    from mesh.cli.options import AskedDaemon

_COMMAND = re.compile(r"/[a-z?]*")


@dataclass(frozen=True)
class CommandResult:
    """What a command leads to: something to say, a text to ask the model, the end of the chat."""

    said: str = ""
    ask: str | None = None
    leaves: bool = False


@dataclass(frozen=True)
class _Command:
    argument: str
    help: str
    run: Callable[[str], Awaitable[CommandResult]]


class SlashCommands:
    """The commands of one chat."""

    def __init__(self, daemon: AskedDaemon, chat: Conversation, saved: SavedChats) -> None:
        self._daemon = daemon
        self._chat = chat
        self._saved = saved
        self._models: list[str] = []
        self._table = {
            "/system": _Command("TEXT", "what the model is told first", self._system),
            "/model": _Command("NAME", "go on with another model; alone: list them", self._model),
            "/set": _Command("NAME VALUE", "change a setting; alone: show them", self._set),
            "/route": _Command("", "where the last answer came from, how fast", self._route),
            "/why": _Command(
                "all", "what else could have stood there; --lens: by layer", self._why
            ),
            "/retry": _Command("", "ask the last question again", self._retry),
            "/undo": _Command("", "forget the last question and its answer", self._undo),
            "/clear": _Command("", "forget the conversation", self._clear),
            "/save": _Command("NAME", "keep the conversation", self._save),
            "/load": _Command("NAME", "go on with a kept one; alone: list them", self._load),
            "/help": _Command("", "this (also /?)", self._help),
            "/bye": _Command("", "leave (also Ctrl-D)", self._bye),
        }

    def is_command(self, text: str) -> bool:
        """Whether a text is for us and not for the model, as a path would be."""
        return _COMMAND.fullmatch(text.split(maxsplit=1)[0] if text.strip() else "") is not None

    async def run(self, text: str) -> CommandResult:
        """Do it. Raises MeshError."""
        name, _, argument = text.strip().partition(" ")
        command = self._table.get("/help" if name == "/?" else name)
        if command is None:
            return CommandResult(f"There is no {one_line(name)}; /? lists what there is.")
        return await command.run(argument.strip())

    def words(self, text: str) -> Sequence[tuple[str, str]]:
        """What may stand at the end of this text, with what it means."""
        name, space, argument = text.partition(" ")
        if not space:
            return [(name, command.help) for name, command in self._table.items()]
        choices: Callable[[], Sequence[str]] = {
            "/model": lambda: self._models,
            "/set": lambda: ["system", *SETTINGS],
            "/load": self._saved.names,
            "/save": self._saved.names,
            "/why": lambda: ["all", lens.FLAG],
        }.get(name, list)
        return [] if " " in argument else [(word, "") for word in choices()]

    async def choose(self, wanted: str | None) -> str:
        """Take this model, else the first that can answer here, that is up on others, or that is
        loading; what to say of it.

        Raises ModelNotFound.
        """
        models = await self._known()
        self._models = [str(model["id"]) for model in models]
        chosen = wanted
        if chosen is None:
            can_answer = [model["id"] for model in models if model["runnable"]]
            async with self._daemon.client() as client:
                coming = [] if can_answer else await deployed_and_up(client) + loading(models)
                chosen = next(iter(can_answer + coming), None)
        for model in models:
            if model["id"] == chosen:
                self._chat.model = str(chosen)
                if model["runnable"]:
                    return ""
                async with self._daemon.client() as client:
                    is_coming = chosen in loading(models) or await is_deployed(client, model["id"])
                if is_coming:
                    return f"{chosen} is not all up here yet: an answer waits while it comes up"
                return f"warning: {chosen} cannot answer now: {model['reason']}"
        names = ", ".join(map(one_line, self._models)) or "none"
        what = f"There is no model {wanted!r}" if wanted else "No model can answer now"
        raise ModelNotFound(
            f"{what}; known: {names}.", fix="See `hearthnet models` for what keeps each."
        )

    async def _known(self) -> list[dict[str, Any]]:
        async with self._daemon.client() as client:
            return await client.models()

    async def _system(self, text: str) -> CommandResult:
        if text:
            self._chat.system = "" if text == "-" else text
        shown = one_line(self._chat.system) or "(none)"
        return CommandResult(f"system = {shown}" + ("" if text else '; "/system -" takes it away'))

    async def _model(self, name: str) -> CommandResult:
        if name:
            warning = await self.choose(name)
            return CommandResult("\n".join(filter(None, [warning, f"model = {one_line(name)}"])))
        lines = []
        for model in await self._known():
            mark = "*" if model["id"] == self._chat.model else " "
            lines.append(f"{mark} {one_line(model['id'])}  {one_line(model['reason'] or '')}")
        return CommandResult("\n".join(line.rstrip() for line in lines) or "There are no models.")

    async def _set(self, text: str) -> CommandResult:
        name, _, value = text.partition(" ")
        return CommandResult(self._chat.set(name, value))

    async def _route(self, _: str) -> CommandResult:
        last = self._chat.last
        if last is None or not last.extension:
            return CommandResult(
                "No answer yet." if last is None else "The last answer was stopped."
            )
        if last.extension["timings"]["hops"]:
            return CommandResult(last.timings())
        return CommandResult(route_line(last.extension["route"]) or "here")

    async def _why(self, text: str) -> CommandResult:
        tokens: list[dict[str, Any]] = self._chat.last.tokens if self._chat.last else []
        flag, _, number = text.partition(" ")
        if flag == lens.FLAG and tokens:
            if number and not number.isdecimal():
                return CommandResult(
                    f"{one_line(number)} is no token's number; /why {lens.FLAG} NUMBER"
                )
            at = int(number) if number else None
            asked = self._chat.asked
            async with self._daemon.client() as client:
                seen = await lens.look(client, self._chat.model, asked, tokens, at)
            return CommandResult(_on_screen(lens.table(seen)))
        table = why.table(tokens, everything=text == "all")
        return CommandResult(_on_screen(table) or "No answer yet.")

    async def _retry(self, _: str) -> CommandResult:
        question = self._chat.undo()
        if question is None:
            return CommandResult("There is no question to ask again.")
        is_fixed = not self._chat.options.get("temperature")
        hint = "(at temperature 0 the answer is the same; /set temperature 0.8 varies it)"
        return CommandResult(hint if is_fixed else "", ask=question)

    async def _undo(self, _: str) -> CommandResult:
        question = self._chat.undo()
        return CommandResult(
            f"forgot: {one_line(question)}" if question else "There is nothing to undo."
        )

    async def _clear(self, _: str) -> CommandResult:
        self._chat.forget()
        return CommandResult("forgotten")

    async def _save(self, name: str) -> CommandResult:
        if not name:
            return CommandResult("Say under which name: /save NAME")
        return CommandResult(f"kept in {self._saved.save(name, self._chat)}")

    async def _load(self, name: str) -> CommandResult:
        if not name:
            return CommandResult("\n".join(self._saved.names()) or "No chat is saved.")
        self._saved.load(name, self._chat)
        turns = len(self._chat.turns)
        return CommandResult(f"{one_line(name)}: {turns} turns with {one_line(self._chat.model)}")

    async def _help(self, _: str) -> CommandResult:
        lines = [
            f"{f'{name} {command.argument}':17} {command.help}"
            for name, command in self._table.items()
        ]
        lines.append(
            '"""               begins and ends several lines; Alt-Enter begins another one'
        )
        return CommandResult("\n".join([*lines, "Ctrl-C            stops a running answer"]))

    async def _bye(self, _: str) -> CommandResult:
        return CommandResult(leaves=True)


def _on_screen(table: str) -> str:
    """Without what its lines have no room for, where they are shown on a terminal."""
    return why.fitted(table, get_terminal_size().columns) if sys.stderr.isatty() else table
