"""Sums with small numbers, asked in many ways. Knows nothing of how they are put into a chat.

Every answer begins with the sum itself in one form, '3 plus 4 is 7.', whatever the wording was: so
a model first reads the numbers and then needs one table for all wordings. Which wordings of which
numbers are held out depends on their text alone.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from tools.builtin_model.corpus.cast import BOYS, GIRLS

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip
ADDING = (
    "What is {a} plus {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?", "{a} + {b}",
    "{a}+{b}", "{a} + {b} =", "{a}+{b}=", "{a}+{b}?", "{a} + {b} = ?", "What is {a} + {b}?",
    "What is {a}+{b}?", "Can you compute {a} + {b}?", "Please calculate {a} plus {b}.",
    "{a} and {b} together", "How much are {a} and {b} together?", "What are {a} and {b} together?",
    "What is {a} and {b}?", "How much is {a} and {b}?", "Add {b} to {a}.", "Add {a} and {b}.",
    "What do you get when you add {a} and {b}?", "What is the sum of {a} and {b}?",
    "Sum of {a} and {b}", "Sum {a} and {b}.", "What's {a} plus {b}?", "{a} plus {b}",
    "{a} plus {b} is?", "{a} plus {b} equals what?", "What does {a} plus {b} make?",
    "What is {b} added to {a}?", "Calculate {a}+{b}", "Do you know what {a} plus {b} is?",
    "What is {b} more than {a}?", "Put {a} and {b} together. How much is it?", "Tell me {a} + {b}.",
    "Solve {a} + {b}.", "What is the total of {a} and {b}?", "{a} add {b}",
    "Can you add {a} and {b}?", "I have {a} and add {b}. What is it?", "{a} plus {b}, please",
    "What is it when I add {a} and {b}?", "The sum of {a} and {b}, please.",
)  # fmt: skip
TAKING = (
    "What is {a} minus {b}?", "What is {a} minus {b}?", "How much is {a} minus {b}?", "{a} - {b}",
    "{a}-{b}", "{a} - {b} =", "{a}-{b}=", "What is {a} - {b}?", "What is {a}-{b}?", "{a} minus {b}",
    "Can you compute {a} - {b}?", "Please calculate {a} minus {b}.", "Take {b} from {a}.",
    "What is {a} take away {b}?", "Subtract {b} from {a}.", "What is {b} less than {a}?",
    "What is left of {a} without {b}?", "What's {a} minus {b}?", "{a} take away {b}",
    "What is the difference between {a} and {b}?", "Solve {a} - {b}.",
)  # fmt: skip
_MULTIPLYING = (
    "What is {a} times {b}?", "What is {a} times {b}?", "How much is {a} times {b}?", "{a} * {b}",
    "{a}*{b}", "{a} x {b}", "What is {a} * {b}?", "Multiply {a} by {b}.", "{a} times {b}",
)  # fmt: skip
_THINGS = (
    "apples", "pears", "coins", "books", "marbles", "eggs", "cookies", "flowers", "stones", "nuts",
    "cards", "balls", "stamps", "shells", "carrots", "pencils",
)  # fmt: skip
_GETTING = (
    "I have {a} {things} and get {b} more. How many {things} do I have?",
    "I have {a} {things} and I get {b} more. How many do I have now?",
    "I had {a} {things} and found {b} more. How many {things} do I have now?",
    "I have {a} {things}. You give me {b}. How many {things} do I have?",
    "I buy {a} {things} and then {b} more. How many {things} do I have?",
)
_LOSING = (
    "I have {a} {things} and give away {b}. How many {things} do I have?",
    "I had {a} {things} and lost {b}. How many do I have now?",
    "I have {a} {things} and eat {b} of them. How many {things} are left?",
)
_HELD_OUT_OF_256 = 24


def is_held_out_sum(asked: str) -> bool:
    """True for about one in ten questions; `question` never asks these."""
    digest = blake2b(asked.lower().strip(" ?.!=").encode(), digest_size=1).digest()
    return digest[0] < _HELD_OUT_OF_256


def question(rng: Random) -> tuple[str, str]:
    """One question and its true answer."""
    while True:
        roll = rng.random()
        if roll < 0.82:
            asked, result = _sum(rng)
        elif roll < 0.94:
            asked, result = _word_problem(rng)
        else:
            asked, result = _comparison(rng)
        if not is_held_out_sum(asked):
            return asked, result


def _draw(rng: Random) -> tuple[tuple[str, ...], int, str, int, int]:
    roll = rng.random()
    if roll < 0.62:
        total = rng.randint(0, 19)
        # Larger totals have more pairs: the larger of two draws is nearly uniform over pairs.
        total = max(total, rng.randint(0, 19))
        a = rng.randint(0, total)
        return ADDING, a, "plus", total - a, total
    if roll < 0.68:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        return ADDING, a, "plus", b, a + b
    if roll < 0.9:
        a = max(rng.randint(0, 20), rng.randint(0, 20))
        b = rng.randint(0, a)
        return TAKING, a, "minus", b, a - b
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return _MULTIPLYING, a, "times", b, a * b


def _sum(rng: Random) -> tuple[str, str]:
    wordings, a, word, b, result = _draw(rng)
    wording = rng.choice(wordings)
    in_words = rng.random() < 0.15 and not {"+", "-", "*"} & set(wording)
    shown = (NUMBER_WORDS[a], NUMBER_WORDS[b]) if in_words else (str(a), str(b))
    asked = wording.format(a=shown[0], b=shown[1])
    return asked[0].upper() + asked[1:], f"{a} {word} {b} is {result}."


def _word_problem(rng: Random) -> tuple[str, str]:
    things = rng.choice(_THINGS)
    adds = rng.random() < 0.6
    if adds:
        total = rng.randint(3, 19)
        a = rng.randint(1, total - 1)
        b, word, result = total - a, "plus", total
    else:
        a = rng.randint(3, 19)
        b = rng.randint(1, a - 1)
        word, result = "minus", a - b
    noun = things if result != 1 else things.removesuffix("s")
    if rng.random() < 0.5:
        asked = rng.choice(_GETTING if adds else _LOSING).format(a=a, b=b, things=things)
        return asked, f"{a} {word} {b} is {result}. You have {result} {noun} now."
    girl = rng.random() < 0.5
    name, he = (rng.choice(GIRLS), "she") if girl else (rng.choice(BOYS), "he")
    story = f"gets {b} more" if adds else f"gives away {b} of them"
    asked = f"{name} has {a} {things} and {story}. How many {things} does {he} have now?"
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
