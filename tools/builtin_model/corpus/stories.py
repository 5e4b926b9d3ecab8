"""Tell a story: draw a cast, fill a plot, and keep what is needed to answer questions about it.

Knows nothing of chat; `dialogs` wraps stories into conversations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from tools.builtin_model.corpus.cast import (
    ANIMALS,
    PRONOUNS,
    Cast,
    Character,
    draw_cast,
    with_article,
)
from tools.builtin_model.corpus.plot import Plot
from tools.builtin_model.corpus.plots_indoors import INDOOR_PLOTS
from tools.builtin_model.corpus.plots_outdoors import OUTDOOR_PLOTS
from tools.builtin_model.corpus.plots_village import VILLAGE_PLOTS

PLOTS = OUTDOOR_PLOTS + INDOOR_PLOTS + VILLAGE_PLOTS

_OPENINGS = (
    "Once upon a time, there was {article} named {name}. {He} lived {home}.",
    "Once upon a time, {article} named {name} lived {home}.",
    "Once there was {article}. {His} name was {name}, and {he} lived {home}.",
    "Long ago, {article} lived {home}. {His} name was {name}.",
    "{name} was {article} who lived {home}.",
    "There was once {article} called {name}, who lived {home}.",
)
_TRAITS = (
    "{He} loved {habit}.",
    "Every day, {he} spent hours {habit}.",
    "{name} liked {habit} more than anything else.",
    "",
)
_ENDINGS = (
    "And that was a good day.", "The end.", "", "", "And they lived happily ever after.",
    "From that day on, {name} and {fname} were the best of friends.",
    "{name} never forgot that day.",
)  # fmt: skip
_BRIDGES = (
    "The next year, something else happened.", "A few weeks later, there was a new adventure.",
    "But that is not the whole story.", "Some time later, {name} had another adventure.",
    "Winter passed, and spring came.", "Not long after that, there was more to tell.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """A finished story and what a listener may ask about it."""

    paragraphs: tuple[str, ...]
    cast: Cast
    plot: Plot
    summary: str
    questions: tuple[tuple[str, str], ...]
    wish: str

    @property
    def text(self) -> str:
        """The whole story, paragraphs on lines of their own."""
        return "\n".join(self.paragraphs)


def tell(rng: Random, hero: Character | None = None, *, opening: bool = True) -> Story:
    """One story. Without `opening` the hero is taken as already known to the reader."""
    cast = draw_cast(rng, hero)
    plot = rng.choice(PLOTS)
    slots = _draw_slots(rng, plot, cast)
    lead = [rng.choice(_OPENINGS), rng.choice(_TRAITS)] if opening else []
    body = [rng.choice(beat) for beat in plot.beats]
    cut = rng.choice((3, 4, 5))
    blocks = [lead + body[:cut], [*body[cut:], rng.choice(_ENDINGS)]]
    if rng.random() < 0.4:
        blocks = [blocks[0] + blocks[1]]
    paragraphs = tuple(" ".join(_fill(rng, s, slots) for s in b if s) for b in blocks)
    questions = tuple((_fill(rng, q, slots), _fill(rng, a, slots)) for q, a in plot.questions)
    general = (
        ("Who is the story about?", f"The story is about {cast.hero.name}, {cast.hero.article}."),
        (
            f"Who is {cast.friend.name}?",
            f"{cast.friend.name} is {with_article(cast.friend.kind)} and a friend of "
            f"{cast.hero.name}.",
        ),
    )
    summary = _fill(rng, rng.choice(plot.summary), slots)
    wish = _fill(rng, rng.choice(plot.wish), slots)
    return Story(paragraphs, cast, plot, summary, questions + general, wish)


def tell_long(rng: Random, episodes: int) -> str:
    """Several adventures of the same hero, one after the other."""
    first = tell(rng)
    parts = [_without_end(first.text)]
    for _ in range(episodes - 1):
        bridge = rng.choice(_BRIDGES).format(name=first.cast.hero.name)
        parts.append(bridge + " " + _without_end(tell(rng, first.cast.hero, opening=False).text))
    return "\n\n".join(parts) + "\nThe end."


def _without_end(text: str) -> str:
    for ending in (" The end.", " And they lived happily ever after."):
        text = text.removesuffix(ending)
    return text


class _Slots(dict[str, str]):
    """Slots where {h}, {H}, {f} and {F} are drawn anew at each use: the name, or 'the fox'."""

    def __init__(self, rng: Random, values: dict[str, str]) -> None:
        super().__init__(values)
        self._rng = rng

    def __missing__(self, key: str) -> str:
        name, kind = ("name", "kind") if key in "hH" else ("fname", "fkind")
        # A boy is "Tom", seldom "the boy": in a village there are several.
        by_name = 0.6 if self[kind] in ANIMALS else 0.9
        if self._rng.random() < by_name:
            return self[name]
        return ("The " if key.isupper() else "the ") + self[kind]


def _draw_slots(rng: Random, plot: Plot, cast: Cast) -> dict[str, str]:
    slots: dict[str, str] = {"home": cast.home, "habit": cast.habit}
    for person, prefix in ((cast.hero, ""), (cast.friend, "f")):
        slots |= _names(person, prefix)
    for key, values in plot.slots.items():
        for name, value in zip(key.split("|"), rng.choice(values).split("|"), strict=True):
            slots[name] = value.format_map(slots)
            slots[f"{name}_cap"] = slots[name][0].upper() + slots[name][1:]
    return slots


def _names(person: Character, prefix: str) -> dict[str, str]:
    he, him, his, himself = PRONOUNS[person.gender]
    return {
        f"{prefix}name": person.name,
        f"{prefix}kind": person.kind,
        f"{prefix}article": person.article,
        # In a story about animals one says "Tilda the badger"; nobody says "Tom the boy".
        f"{prefix}title": f"{person.name} the {person.kind}"
        if person.kind in ANIMALS
        else person.name,
        # The friend's pronouns are {fe} {fim} {fis}: short, and impossible to confuse.
        **(
            {"fe": he, "fim": him, "fis": his, "Fe": he.title(), "Fis": his.title()}
            if prefix
            else {
                "he": he,
                "him": him,
                "his": his,
                "himself": himself,
                "He": he.title(),
                "His": his.title(),
            }
        ),
    }


def _fill(rng: Random, wording: str, slots: dict[str, str]) -> str:
    text = wording.format_map(_Slots(rng, slots))
    # 'a apple cake' can only arise where a drawn word follows a written article.
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
