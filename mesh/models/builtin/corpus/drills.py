"""Exercises in looking back: repeat this, who has what, what is my name.

Their answers can only be copied from the text before them, which stories alone teach slowly.
Knows nothing of the rest of a conversation.
"""

from __future__ import annotations

from random import Random

from mesh.models.builtin.corpus.cast import ANIMALS, BOYS, GIRLS, TRAITS
from mesh.models.builtin.corpus.document import Message, exchange

_THINGS = (
    "ball", "scarf", "bell", "key", "book", "hat", "boat", "lantern", "kite", "button", "map",
    "lamp", "basket", "apple", "flute", "clock", "candle", "rope", "ladder", "stone",
)  # fmt: skip
_COLORS = ("red", "blue", "green", "yellow", "white", "black", "brown", "silver", "gray", "orange")
_SYLLABLES = (
    "ba", "bo", "da", "di", "fa", "fe", "ga", "go", "ka", "ki", "la", "lo", "ma", "mi", "na", "ni",
    "pa", "po", "ra", "ri", "sa", "su", "ta", "to", "va", "vi", "za", "zo",
)  # fmt: skip
_REPEAT = ("Repeat after me: {x}", "Say: {x}", "Please repeat: {x}", "Say this again: {x}")


def drill(rng: Random) -> list[Message]:
    """One exercise, one to three exchanges."""
    return rng.choice((_repeat, _who_has, _made_up_name))(rng)


def _word(rng: Random) -> str:
    pool = rng.choice((ANIMALS, TRAITS, _THINGS, _COLORS, GIRLS, BOYS))
    return rng.choice(pool) if rng.random() < 0.8 else _made_up(rng)


def _made_up(rng: Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))


def _repeat(rng: Random) -> list[Message]:
    words = " ".join(_word(rng) for _ in range(rng.randint(2, 9)))
    return [*exchange(rng.choice(_REPEAT).format(x=words), words)]


def _who_has(rng: Random) -> list[Message]:
    count = rng.randint(2, 3)
    names = rng.sample(GIRLS + BOYS, count)
    things = [
        f"{c} {t}"
        for c, t in zip(rng.sample(_COLORS, count), rng.sample(_THINGS, count), strict=True)
    ]
    facts = [f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)]
    order = rng.sample(range(count), rng.randint(1, count))
    messages: list[Message] = []
    told = " ".join(facts) + " "
    for at in order:
        if rng.random() < 0.5:
            asked = f"Who has the {things[at]}?"
        else:
            asked = f"What does {names[at]} have?"
        messages += exchange(told + asked, facts[at])
        told = ""
    return messages


def _made_up_name(rng: Random) -> list[Message]:
    name = _made_up(rng).title()
    said = rng.choice(("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "You can call me {n}."))
    return [
        *exchange(said.format(n=name), f"Nice to meet you, {name}!"),
        *exchange(rng.choice(("What is my name?", "Who am I?")), f"Your name is {name}."),
    ]
