"""Who the stories are about: names, animals, homes, habits, and the pronouns that fit.

Pure data and one function that draws a cast. Knows nothing of plots.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.builtin_model.corpus.people import MEN, WOMEN

GIRLS = (
    "Lily", "Anna", "Mia", "Clara", "Nora", "Ella", "Ruby", "Ivy", "Rosa", "Daisy", "Hazel",
    "Luna", "Tilda", "Greta", "Wilma", "Olive", "Poppy", "Sophie", "Emma", "June", "Maya", "Zoe",
)  # fmt: skip
BOYS = (
    "Tom", "Max", "Ben", "Leo", "Pip", "Oskar", "Finn", "Hugo", "Jack", "Sam", "Emil", "Otto",
    "Theo", "Milo", "Felix", "Noah", "Bruno", "Anton", "Paul", "Rory", "Toby", "Jonas",
)  # fmt: skip
ANIMALS = (
    "fox", "rabbit", "hedgehog", "mouse", "squirrel", "bear", "owl", "duck", "frog", "cat", "dog",
    "badger", "otter", "beaver", "goose", "turtle", "sparrow", "deer", "mole", "lamb",
)  # fmt: skip
TRAITS = (
    "little", "small", "brave", "shy", "clever", "curious", "cheerful", "quiet", "kind", "young",
    "gentle", "busy", "friendly", "lively", "patient",
)  # fmt: skip
ANIMAL_HOMES = (
    "in a warm burrow under an old oak tree", "at the edge of a green forest",
    "near a quiet lake", "in a hollow tree by the river", "under the roots of a tall pine",
    "in a small house at the end of the wood", "behind a stone wall in a big garden",
    "on a hill above the meadow", "beside a mossy bridge", "in a nest of leaves and moss",
)  # fmt: skip
CHILD_HOMES = (
    "in a small village between two hills", "in a yellow house near the sea",
    "with a big family in the middle of the town", "on a farm at the foot of a mountain",
    "in a tall house beside the railway", "in a cottage at the edge of the forest",
    "above a bakery in a narrow street", "in an old mill by the river",
)  # fmt: skip
HABITS = (
    "watching the clouds", "singing funny songs", "collecting smooth stones",
    "listening to old stories", "climbing on things", "counting the stars", "making new friends",
    "baking little cakes", "drawing pictures in the sand", "asking questions", "jumping in puddles",
    "feeding the birds", "telling jokes", "looking at maps", "picking berries",
)  # fmt: skip
PRONOUNS = {
    "f": ("she", "her", "her", "herself"),
    "m": ("he", "him", "his", "himself"),
}


def with_article(noun: str) -> str:
    """'an owl', 'a shy fox'."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


@dataclass(frozen=True, slots=True)
class Character:
    """Somebody in a story. `kind` is 'fox', 'girl' and so on."""

    name: str
    kind: str
    trait: str
    gender: str

    @property
    def article(self) -> str:
        """'a shy fox', with the right article."""
        return with_article(f"{self.trait} {self.kind}")


@dataclass(frozen=True, slots=True)
class Cast:
    """The two people of a story and where the first one lives."""

    hero: Character
    friend: Character
    home: str
    habit: str


def draw_character(rng: Random, gender: str, *, animal: bool, not_kind: str = "") -> Character:
    """A character of that gender; `not_kind` keeps two animals of a story apart."""
    few, many = (GIRLS, WOMEN) if gender == "f" else (BOYS, MEN)
    # Half of the names come from a long list: each is met too seldom to be guessed.
    name = rng.choice(few if rng.random() < 0.5 else many)
    if animal:
        kind = rng.choice([a for a in ANIMALS if a != not_kind])
    else:
        kind = "girl" if gender == "f" else "boy"
    return Character(name, kind, rng.choice(TRAITS), gender)


def draw_cast(rng: Random, hero: Character | None = None) -> Cast:
    """A hero and a friend.

    They never share a pronoun, so that 'she' and 'he' in a plot always have one meaning.
    """
    if hero is None:
        hero = draw_character(rng, rng.choice("fm"), animal=rng.random() < 0.7)
    animal = hero.kind in ANIMALS
    other = "m" if hero.gender == "f" else "f"
    friend = draw_character(rng, other, animal=animal, not_kind=hero.kind)
    home = rng.choice(ANIMAL_HOMES if animal else CHILD_HOMES)
    return Cast(hero, friend, home, rng.choice(HABITS))
