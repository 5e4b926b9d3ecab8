"""`hearthnet chat [MODEL]`: a conversation in the terminal, or one turn for each piped line."""

from __future__ import annotations

import difflib
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.answers import ReceivedAnswer, receive
from mesh.cli.options import ApiPort, Host, StateDir, locate_daemon
from mesh.cli.output import note, one_line, report, route_line
from mesh.errors import MeshError, ModelNotFound

if TYPE_CHECKING:
    import asyncio

    from mesh.client import Client

_QUOTES = '"""'
_HELP = """\
/set NAME VALUE  change a setting (temperature, max_tokens, seed, system, ...); /set shows them
/clear           forget the conversation
/route           where the last answer came from and how fast
/bye             leave (also Ctrl-D)
\"\"\"              starts and ends a text of several lines; Ctrl-C stops a running answer"""


def chat(
    model: Annotated[str | None, typer.Argument(help="See `hearthnet models`.")] = None,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
) -> None:
    """Talk to a model. Without MODEL the first that can answer is taken."""
    import asyncio

    client = locate_daemon(state_dir, host, api_port)
    with asyncio.Runner() as runner:
        try:
            chosen = runner.run(_choose(client, model))
            conversation = Conversation(chosen)
            _loop(runner, client, conversation, interactive=sys.stdin.isatty())
        finally:
            runner.run(client.close())


@dataclass
class Conversation:
    """The turns so far and the settings of the next one."""

    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    turns: list[dict[str, str]] = field(default_factory=list)
    last: ReceivedAnswer | None = None

    def messages(self) -> list[dict[str, str]]:
        """What the model is shown."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    async def turn(self, client: Client, text: str) -> None:
        """Ask and print. A stopped answer stays in the conversation as far as it came."""
        self.turns.append({"role": "user", "content": text})
        answer = ReceivedAnswer()
        try:
            await receive(client.chat(self.model, self.messages(), **self.options), answer)
        finally:
            if answer.text:
                self.turns.append({"role": "assistant", "content": answer.text})
            else:
                self.turns.pop()
        self.last = answer

    def command(self, line: str) -> None:
        """Run one of the slash commands; its output goes to stderr."""
        name, _, rest = line.partition(" ")
        if name == "/set":
            note(self._set(rest.strip()))
        elif name == "/clear":
            self.turns.clear()
            note("forgotten")
        elif name == "/route":
            note(self._route())
        elif name in {"/?", "/help"}:
            note(_HELP)
        else:
            note(f"There is no {one_line(name)}; /? lists what there is.")

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        if not name:
            shown = {"system": self.system or "(none)", **self.options}
            return "\n".join(f"{key} = {shown[key]}" for key in sorted(shown))
        if name == "system":
            self.system = value
        elif name in _SETTINGS:
            try:
                self.options[name] = _SETTINGS[name](value)
            except ValueError:
                return f"{one_line(value)!r} is no value for {name}."
        else:
            near = difflib.get_close_matches(name, ["system", *_SETTINGS], n=1)
            hint = f"did you mean {near[0]}?" if near else ", ".join(["system", *_SETTINGS])
            return f"There is no setting {one_line(name)}; {hint}"
        return f"{name} = {one_line(value)}"

    def _route(self) -> str:
        if self.last is None or not self.last.extension:
            return "No answer yet."
        hops = [
            f"  {hop['node']} {hop['layers']}: {hop['p50_ms']:.1f} ms a token, "
            f"{hop['compute_p50_ms']:.1f} of them computing"
            for hop in self.last.extension["timings"]["hops"]
        ]
        route = route_line(self.last.extension["route"]) or "here"
        return "\n".join([self.last.summary if hops else route, *hops])


def _flag(text: str) -> bool:
    if text not in {"true", "on", "false", "off"}:
        raise ValueError(text)
    return text in {"true", "on"}


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


_SETTINGS: dict[str, Any] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": int,
    "min_p": _number,
    "repetition_penalty": _number,
    "seed": int,
    "max_tokens": int,
    "stop": str,
    "wire_dtype": str,
    "ignore_eos": _flag,
}


async def _choose(client: Client, wanted: str | None) -> str:
    models = await client.models()
    for model in models:
        if model["id"] == wanted or (wanted is None and model["runnable"]):
            if not model["runnable"]:
                note(f"warning: {wanted} cannot answer now: {model['reason']}")
            return str(model["id"])
    names = ", ".join(one_line(model["id"]) for model in models) or "none"
    what = f"There is no model {wanted!r}" if wanted else "No model can answer now"
    raise ModelNotFound(
        f"{what}; known: {names}.", fix="See `hearthnet models` for what keeps each."
    )


def _loop(
    runner: asyncio.Runner, client: Client, conversation: Conversation, *, interactive: bool
) -> None:
    if interactive:
        note(f"{one_line(conversation.model)}; /? for help, /bye to leave")
    while True:
        try:
            line = _read(interactive)
            if line is None or line.strip() == "/bye":
                return
            if line.startswith("/"):
                conversation.command(line.strip())
            elif line.strip():
                runner.run(conversation.turn(client, line))
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("(stopped; /bye to leave)")
        except MeshError as error:
            if not interactive:
                raise
            report(error)


def _read(interactive: bool) -> str | None:
    """The next line, or the text between triple quotes; None at the end of the input."""
    line = _read_line(">>> ", interactive)
    if line is None or not line.startswith(_QUOTES):
        return line
    line = line.removeprefix(_QUOTES)
    lines: list[str] = []
    while not line.rstrip().endswith(_QUOTES):
        lines.append(line)
        further = _read_line("... ", interactive)
        if further is None:
            return "\n".join(lines)
        line = further
    return "\n".join([*lines, line.rstrip().removesuffix(_QUOTES)]).strip("\n")


def _read_line(prompt: str, interactive: bool) -> str | None:
    if not interactive:
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
