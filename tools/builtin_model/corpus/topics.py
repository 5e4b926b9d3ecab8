"""The form of a question-and-answer topic, and how a question varies in the mouth of its asker.

Knows no particular topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that all have the same answers; `more` answers 'tell me more' and 'why?'."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()


_LEADS = (
    "", "", "", "", "", "", "", "", "Hi! ", "Hello. ", "Quick question: ", "OK. ",
    "I have a question. ", "Can you help me? ", "Thanks. ",
)  # fmt: skip
_TAILS = ("", "", "", "", "", "", "", " Thanks!", " Please keep it short.", " I am new here.")


def vary(rng: Random, question: str) -> str:
    """The question as somebody might type it: greeting, lower case, no question mark."""
    text = rng.choice(_LEADS) + question
    if question[-1] in "?.!":
        text += rng.choice(_TAILS)
    roll = rng.random()
    if roll < 0.15:
        text = text.lower()
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    return text


def answer(rng: Random, topic: Topic) -> str:
    """Mostly the first answer, so that a greedy reader of the model gets that one."""
    if len(topic.answers) == 1 or rng.random() < 0.75:
        return topic.answers[0]
    return rng.choice(topic.answers[1:])
