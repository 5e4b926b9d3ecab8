"""What a chat is made of: its turns, its settings, and the form in which it is kept."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.cli.answers import Display, ReceivedAnswer, receive
from mesh.cli.output import one_line

if TYPE_CHECKING:
    from mesh.client import Client

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

    def messages(self) -> list[dict[str, str]]:
        """What the model is shown."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    async def turn(self, client: Client, text: str, shown: Display) -> ReceivedAnswer:
        """Ask and show. A stopped answer stays in the conversation as far as it came."""
        self.turns.append({"role": "user", "content": text})
        answer, asked = ReceivedAnswer(), self.messages()
        options = {**self.options, "logprobs": True, "top_logprobs": ALTERNATIVES}
        try:
            await receive(client.chat(self.model, asked, **options), answer, shown)
        finally:
            if answer.text:
                self.turns.append({"role": "assistant", "content": answer.text})
            else:
                self.turns.pop()
            if answer.text or answer.tokens:
                self.last, self.asked = answer, asked
        return answer

    def undo(self) -> str | None:
        """Take the last question and its answer back; the question, or None without one."""
        for number in reversed(range(len(self.turns))):
            if self.turns[number]["role"] == "user":
                question = self.turns[number]["content"]
                del self.turns[number:]
                self.last = None
                return question
        return None

    def set(self, name: str, value: str) -> str:
        """Change a setting; what to say of it. Without a name: all settings."""
        if not name:
            shown = {"system": self.system or "(none)", **self.options}
            return "\n".join(f"{key} = {shown[key]}" for key in sorted(shown))
        if name == "system":
            self.system = value
        elif name in SETTINGS:
            try:
                self.options[name] = SETTINGS[name](value)
            except ValueError:
                return f"{one_line(value)!r} is no value for {name}."
        else:
            near = difflib.get_close_matches(name, ["system", *SETTINGS], n=1)
            hint = f"did you mean {near[0]}?" if near else ", ".join(["system", *SETTINGS])
            return f"There is no setting {one_line(name)}; {hint}"
        return f"{name} = {one_line(value)}"


def _flag(text: str) -> bool:
    if text not in {"true", "on", "false", "off"}:
        raise ValueError(text)
    return text in {"true", "on"}


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
    "seed": int,
    "max_tokens": int,
    "stop": str,
    "wire_dtype": str,
    "ignore_eos": _flag,
}
