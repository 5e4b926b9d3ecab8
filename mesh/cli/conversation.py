"""What a chat is made of: its turns, its settings, and the form in which it is kept."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.cli.answers import Display, ReceivedAnswer, receive
from mesh.cli.output import one_line

if TYPE_CHECKING:
    from mesh.cli.options import AskedDaemon

ALTERNATIVES = 5
"""How many tokens are asked for beside each of an answer's, for `/why`."""


@dataclass
class Conversation:
    """The turns so far and the settings of the next one."""

    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    turns: list[dict[str, str]] = field(default_factory=list)
    last: ReceivedAnswer | None = None
    asked: list[dict[str, str]] = field(default_factory=list)
    """What `last` answers."""
    unanswered: str | None = None
    """The last question, where nothing came of it; it is not among the turns."""

    def messages(self) -> list[dict[str, str]]:
        """What the model is shown."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    async def turn(self, daemon: AskedDaemon, text: str, shown: Display) -> ReceivedAnswer:
        """Ask and show. A stopped answer stays in the conversation as far as it came."""
        self.turns.append({"role": "user", "content": text})
        answer, asked = ReceivedAnswer(), self.messages()
        told = {"logprobs": True, "top_logprobs": ALTERNATIVES}
        options = {**self.options, **told, "truncation": "auto"}
        try:
            await receive(_said(daemon, self.model, asked, options), answer, shown)
        finally:
            self.unanswered = None if answer.text else text
            if answer.text:
                self.turns.append({"role": "assistant", "content": answer.text})
            else:
                self.turns.pop()
            if answer.text or answer.tokens:
                self.last, self.asked = answer, self._known(asked, answer)
        return answer

    def _known(self, asked: list[dict[str, str]], answer: ReceivedAnswer) -> list[dict[str, str]]:
        """The messages that the context had room for."""
        opening = 1 if self.system else 0
        left_out = answer.extension.get("left_out_messages", 0)
        return asked[:opening] + asked[opening + left_out :]

    def undo(self) -> str | None:
        """Take the last question and its answer back; the question, or None without one."""
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return question
        for number in reversed(range(len(self.turns))):
            if self.turns[number]["role"] == "user":
                question = self.turns[number]["content"]
                del self.turns[number:]
                self.last = None
                return question
        return None

    def forget(self) -> None:
        """Begin anew; the settings stay."""
        self.turns, self.last, self.unanswered = [], None, None

    def set(self, name: str, value: str) -> str:
        """Change a setting; what to say of it. Without a name: all settings."""
        if not name:
            shown = {"system": self.system or "(none)", **self.options}
            return "\n".join(f"{key} = {shown[key]}" for key in sorted(shown))
        if name == "system":
            self.system = value
        elif name in SETTINGS:
            try:
                given = SETTINGS[name](value)
            except ValueError:
                return f"{one_line(value)!r} is no value for {name}."
            if why := _out_of_bounds(name, given):
                return f"{name}: {why}."
            self.options[name] = given
        else:
            near = difflib.get_close_matches(name, ["system", *SETTINGS], n=1)
            hint = f"did you mean {near[0]}?" if near else ", ".join(["system", *SETTINGS])
            return f"There is no setting {one_line(name)}; {hint}"
        return f"{name} = {one_line(value)}"


async def _said(
    daemon: AskedDaemon, model: str, asked: list[dict[str, str]], options: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The stream of an answer. The daemon is found anew for each: one that was started again has
    another key, and may have another port."""
    async with daemon.client() as client, aclosing(client.chat(model, asked, **options)) as chunks:
        async for chunk in chunks:
            yield chunk


def _stop(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _flag(text: str) -> bool:
    if text not in {"true", "on", "false", "off"}:
        raise ValueError(text)
    return text in {"true", "on"}


def _format(text: str) -> str:
    if text not in {"fp16", "bf16", "fp32"}:
        raise ValueError(text)
    return text


def _effort(text: str) -> str:
    if text not in {"none", "low", "medium", "high"}:
        raise ValueError(text)
    return text


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


SETTINGS: dict[str, Any] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": int,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": int,
    "max_tokens": int,
    "stop": _stop,
    "wire_dtype": _format,
    "ignore_eos": _flag,
    "reasoning_effort": _effort,
}

_IS = {
    "greater than or equal to": operator.ge,
    "less than or equal to": operator.le,
    "less than": operator.lt,
}
_BOUNDS: dict[str, dict[str, float]] = {
    "temperature": {"greater than or equal to": 0, "less than or equal to": 2},
    "top_p": {"greater than or equal to": 0, "less than or equal to": 1},
    "top_k": {"greater than or equal to": -1, "less than": 2**31},
    "min_p": {"greater than or equal to": 0, "less than or equal to": 1},
    "repetition_penalty": {"greater than or equal to": 0.01, "less than or equal to": 10},
    "presence_penalty": {"greater than or equal to": -2, "less than or equal to": 2},
    "frequency_penalty": {"greater than or equal to": -2, "less than or equal to": 2},
    "seed": {"greater than or equal to": -(2**63), "less than": 2**63},
    "max_tokens": {"greater than or equal to": 1, "less than": 2**31},
}
"""As the daemon has them, which refuses a question in the same words."""


def _out_of_bounds(name: str, given: Any) -> str | None:
    for bound, number in _BOUNDS.get(name, {}).items():
        if not _IS[bound](given, number):
            return f"Input should be {bound} {number}"
    return None
