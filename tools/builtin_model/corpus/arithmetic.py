"""Sums with small numbers, asked in several ways. Knows nothing of how they are put into a chat."""

from __future__ import annotations

from random import Random

from tools.builtin_model.corpus.cast import BOYS, GIRLS

_THINGS = (
    "apples", "pears", "coins", "books", "marbles", "eggs", "cookies", "flowers", "stones", "nuts",
)  # fmt: skip
_ASKING = (
    "What is {a} {word} {b}?", "What is {a} {word} {b}?", "How much is {a} {word} {b}?",
    "{a} {sign} {b}", "{a} {sign} {b} =", "What is {a} {sign} {b}?", "Can you compute {a} {sign} "
    "{b}?", "Please calculate {a} {word} {b}.",
)  # fmt: skip


def question(rng: Random) -> tuple[str, str]:
    """One question and its true answer."""
    roll = rng.random()
    if roll < 0.75:
        return _sum(rng)
    if roll < 0.9:
        return _word_problem(rng)
    return _comparison(rng)


def _draw(rng: Random) -> tuple[int, str, str, int, int]:
    operation = rng.choice("+++---*")
    if operation == "+":
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        return a, "+", "plus", b, a + b
    if operation == "-":
        a = rng.randint(0, 20)
        b = rng.randint(0, a)
        return a, "-", "minus", b, a - b
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return a, "*", "times", b, a * b


def _sum(rng: Random) -> tuple[str, str]:
    a, sign, word, b, result = _draw(rng)
    asked = rng.choice(_ASKING).format(a=a, b=b, sign=sign, word=word)
    return asked, f"{a} {word} {b} is {result}."


def _word_problem(rng: Random) -> tuple[str, str]:
    girl = rng.random() < 0.5
    name, he = (rng.choice(GIRLS), "she") if girl else (rng.choice(BOYS), "he")
    thing = rng.choice(_THINGS)
    if rng.random() < 0.5:
        a, b = rng.randint(2, 10), rng.randint(2, 10)
        story, word, result = f"gets {b} more", "plus", a + b
    else:
        a = rng.randint(4, 15)
        b = rng.randint(2, a - 1)
        story, word, result = f"gives away {b} of them", "minus", a - b
    asked = f"{name} has {a} {thing} and {story}. How many {thing} does {he} have now?"
    noun = thing if result != 1 else thing.removesuffix("s")
    return asked, f"{a} {word} {b} is {result}. {name} has {result} {noun} now."


def _comparison(rng: Random) -> tuple[str, str]:
    a, b = rng.sample(range(21), 2)
    if rng.random() < 0.4:
        return f"What comes after {a}?", f"After {a} comes {a + 1}."
    if rng.random() < 0.5:
        return f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}."
    start = rng.randint(0, 6)
    stop = start + rng.randint(3, 9)
    listing = ", ".join(str(n) for n in range(start, stop + 1))
    return f"Count from {start} to {stop}.", f"{listing}."
