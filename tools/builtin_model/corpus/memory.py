"""What a user tells about themselves and asks for later, and words to be said again.

Most names are made up anew (`people.invent`), so the only way to be right is to copy from the
chat. Where nothing was told, the answer says so. Knows nothing of what is said in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.builtin_model.corpus.cast import ANIMALS
from tools.builtin_model.corpus.people import anybody, invent

TELLING_A_NAME = (
    "My name is {x}.", "My name is {x}.", "I am {x}.", "I'm {x}.", "Hi, I'm {x}.", "Hi, I am {x}.",
    "You can call me {x}.", "Call me {x}.", "Hello, my name is {x}.", "Hello! I am {x}.",
    "Hi! My name is {x}.", "{x} is my name.", "Hey, {x} here.", "I am called {x}.",
    "People call me {x}.", "My friends call me {x}.", "my name is {x}", "i am {x}", "It's me, {x}.",
    "Good morning, I am {x}.", "My name's {x}.", "Please remember that my name is {x}.",
    "Hello there, I'm {x}!", "This is {x}.", "The name is {x}.",
)  # fmt: skip
ASKING_THE_NAME = (
    "What is my name?", "What is my name?", "What's my name?", "Do you remember my name?",
    "Who am I?", "Do you know my name?", "Tell me my name.", "What was my name?", "what is my name",
    "Can you tell me my name?", "What am I called?", "Do you still know who I am?", "Say my name.",
    "Which name did I tell you?", "My name?", "Do you know who I am?", "what's my name?",
    "Have I told you my name?", "How am I called?", "Remind me: what is my name?",
)  # fmt: skip
_MET = ("Nice to meet you, {x}!", "Nice to meet you, {x}!", "Hello, {x}! How can I help you?")
_LEADS = ("", "", "", "", "", "Now, ", "Well, ", "OK, ", "Tell me: ", "One question: ", "Then ")
_TOLD_LEADS = ("", "", "", "", "", "Good day! ", "OK. ", "Well, ", "You know, ", "Hi there! ")
_TOLD_TAILS = ("", "", "", "", "", " Nice to meet you.", " I am new here.", " Remember that!")
NAME_UNKNOWN = "I do not know your name. You have not told me."


@dataclass(frozen=True, slots=True)
class Detail:
    """Something one may tell: how it is told, greeted, asked for and answered."""

    told: tuple[str, ...]
    replied: tuple[str, ...]
    asked: tuple[str, ...]
    answered: str
    draw: Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Told:
    """One drawn detail: two exchanges, and the answer where it was never told."""

    telling: tuple[str, str]
    asking: tuple[str, str]
    unknown: tuple[str, str]


_COLORS = ("red", "blue", "green", "yellow", "orange", "pink", "purple", "brown", "black", "white")
_FOODS = (
    "soup", "bread", "cheese", "pizza", "cake", "rice", "fish", "salad", "pancakes", "noodles",
    "potatoes", "berries", "honey", "plums", "tomatoes",
)  # fmt: skip


def _pet(pet: str) -> Detail:
    return Detail(
        (f"My {pet} is called {{x}}.", f"I have a {pet} named {{x}}.", f"My {pet}'s name is {{x}}.",
         f"I have a {pet}. It is called {{x}}."),
        (f"{{x}} is a nice name for a {pet}.",),
        (f"What is my {pet} called?", f"What is the name of my {pet}?",
         f"What is my {pet}'s name?"),
        f"Your {pet} is called {{x}}.",
        anybody,
    )  # fmt: skip


def _kin(kin: str) -> Detail:
    return Detail(
        (f"My {kin} is called {{x}}.", f"I have a {kin} named {{x}}.",
         f"My {kin}'s name is {{x}}."),
        ("Say hello to {x} from me!",),
        (f"What is my {kin} called?", f"What is the name of my {kin}?",
         f"What is my {kin}'s name?"),
        f"Your {kin} is called {{x}}.",
        anybody,
    )  # fmt: skip


_DETAILS = (
    _pet("dog"), _pet("cat"), _pet("horse"), _pet("rabbit"),
    _kin("sister"), _kin("brother"), _kin("friend"), _kin("teacher"),
    Detail(
        ("I live in {x}.", "I come from {x}.", "My home is in {x}.",
         "I live in a town called {x}."),
        ("{x} sounds like a nice place.",),
        ("Where do I live?", "Which town do I live in?", "Where is my home?"),
        "You live in {x}.",
        invent,
    ),
    Detail(
        ("My favorite color is {x}.", "I like {x} best of all colors."),
        ("That is a beautiful color.",),
        ("What is my favorite color?", "Which color do I like best?"),
        "Your favorite color is {x}.",
        lambda rng: rng.choice(_COLORS),
    ),
    Detail(
        ("My favorite food is {x}.", "I like {x} best of all food."),
        ("That sounds tasty.",),
        ("What is my favorite food?", "Which food do I like best?"),
        "Your favorite food is {x}.",
        lambda rng: rng.choice(_FOODS),
    ),
    Detail(
        ("I am {x} years old.", "I'm {x}.", "My age is {x}."),
        ("That is a good age.",),
        ("How old am I?", "What is my age?"),
        "You are {x} years old.",
        lambda rng: str(rng.randint(5, 99)),
    ),
)  # fmt: skip
_ECHO = (
    "Repeat after me: {x}", "Say: {x}", "Repeat: {x}", "Please repeat: {x}", "Say this again: {x}",
    "Write this: {x}", "Copy this: {x}", "Echo: {x}",
)  # fmt: skip


def name(rng: Random) -> Told:
    """The user's name. Sometimes typed without a capital, and then said back as it was typed."""
    told = anybody(rng)
    if rng.random() < 0.08:
        told = told.lower()
    return Told(
        (_said(rng, rng.choice(TELLING_A_NAME), told), rng.choice(_MET).format(x=told)),
        (_asked(rng, rng.choice(ASKING_THE_NAME)), f"Your name is {told}."),
        (_asked(rng, rng.choice(ASKING_THE_NAME)), NAME_UNKNOWN),
    )


def details(rng: Random, count: int) -> list[Told]:
    """That many different details, with their values drawn."""
    return [_told(rng, detail) for detail in rng.sample(_DETAILS, count)]


def _told(rng: Random, detail: Detail) -> Told:
    value = detail.draw(rng)
    asked = _asked(rng, rng.choice(detail.asked))
    said = _said(rng, rng.choice(detail.told), value)
    replied = rng.choice(detail.replied).format(x=value)
    return Told(
        (said, replied),
        (asked, detail.answered.format(x=value)),
        (asked, "I do not know that. You have not told me."),
    )


def _said(rng: Random, wording: str, value: str) -> str:
    tail = rng.choice(_TOLD_TAILS) if wording[-1] in ".!" else ""
    return rng.choice(_TOLD_LEADS) + wording.format(x=value) + tail


def _asked(rng: Random, question: str) -> str:
    text = rng.choice(_LEADS)
    text += question[0].lower() + question[1:] if text.endswith((", ", "Then ")) else question
    if rng.random() < 0.1:
        text = text.lower()
    return text.rstrip("?.!") if rng.random() < 0.1 else text


def echo(rng: Random) -> tuple[str, str]:
    """Words to be said again, and the same words."""
    words = [_word(rng) for _ in range(rng.randint(1, 7))]
    text = " ".join(words)
    return rng.choice(_ECHO).format(x=text), text


def _word(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.4:
        return invent(rng).lower()
    if roll < 0.6:
        return anybody(rng)
    if roll < 0.7:
        return str(rng.randint(0, 999))
    return rng.choice(ANIMALS + _COLORS + _FOODS)
