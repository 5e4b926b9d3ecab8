"""The stream of training texts, and which of them are held out.

Whether a text is held out depends on its own bytes only, so the two sides never share a text,
whatever the seed and however long the stream. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import cycle, islice
from random import Random

from tools.builtin_model.corpus.dialogs import (
    continue_story,
    converse,
    drill_memory,
    drill_sums,
)
from tools.builtin_model.corpus.document import Document, render
from tools.builtin_model.corpus.stories import tell, tell_long

HELD_OUT_SEED = 1_000_003
_HELD_OUT_OF_256 = 8

# What share of the texts each kind has. By tokens, stories are a third, sums and things to be
# remembered a third, and talk about hearthnet and the world the rest.
_WEIGHTS = {
    "story": 11,
    "long_story": 1.2,
    "question": 26,
    "chat": 22,
    "long_chat": 1.2,
    "continuation": 5,
    "sums": 16,
    "memory": 18,
}


def training_documents(seed: int, more: Mapping[str, float] | None = None) -> Iterator[Document]:
    """An endless stream of texts, the same for the same seed, without those held out.

    `more` multiplies the shares of some kinds. Raises ValueError for a kind that there is not.
    """
    weights = dict(_WEIGHTS)
    for kind, factor in (more or {}).items():
        if kind not in weights:
            raise ValueError(f"There is no kind {kind!r} of text, only {', '.join(weights)}.")
        weights[kind] *= factor
    rng = Random(seed)
    while True:
        document = generate(rng, rng.choices(list(weights), list(weights.values()))[0])
        if not is_held_out(document):
            yield document


def held_out_documents(count: int) -> list[Document]:
    """The first `count` held-out texts, kinds by turns, so that any prefix is a fair sample."""
    return list(islice(_held_out(), count))


def is_held_out(document: Document) -> bool:
    """True for about one text in thirty-two."""
    return blake2b(document.text.encode(), digest_size=1).digest()[0] < _HELD_OUT_OF_256


def generate(rng: Random, kind: str) -> Document:
    """One text of that kind."""
    if kind == "story":
        text = tell(rng).text
    elif kind == "long_story":
        text = tell_long(rng, rng.randint(2, 6))
    elif kind == "question":
        text = render(converse(rng, 1))
    elif kind == "chat":
        text = render(converse(rng, rng.randint(2, 5)))
    elif kind == "long_chat":
        text = render(converse(rng, rng.randint(8, 24)))
    elif kind == "sums":
        text = render(drill_sums(rng))
    elif kind == "memory":
        text = render(drill_memory(rng))
    else:
        text = render(continue_story(rng))
    return Document(kind, text)


def _held_out() -> Iterator[Document]:
    rng = Random(HELD_OUT_SEED)
    for kind in cycle(_WEIGHTS):
        document = generate(rng, kind)
        while not is_held_out(document):
            document = generate(rng, kind)
        yield document
