"""What a training text is, and how a conversation is written down as one string.

Knows the special tokens and their order. Knows nothing of tokenizers, models or what the texts
say. The chat template that ships with the checkpoint must render exactly what `render` renders;
a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, SYSTEM, END, PAD)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """One training text with its special tokens written out; `kind` names its generator."""

    kind: str
    text: str


def render(messages: Sequence[Message]) -> str:
    """Write a conversation the way the chat template does."""
    return "".join(f"<|{m.role}|>\n{m.content}{END}\n" for m in messages)


def exchange(question: str, answer: str) -> tuple[Message, Message]:
    """One question and its answer as two messages."""
    return Message("user", question), Message("assistant", answer)
