"""Ids as people compare them: four words and six characters. For eyes and ears only.

62 bits of the id, enough to tell a household's machines apart and to compare over the phone; what
may be done is decided by the full id alone.

The 256 words stand for a byte each: short, concrete, spelled as they sound, and different in their
first four letters. The order is part of every fingerprint: never change it.
"""

from __future__ import annotations

import base64

from mesh.errors import BadKey
from mesh.identity.keys import is_node_id, short_id
from mesh.types import NodeId

_TEXT = """
acorn alder amber anvil apple arrow aspen atlas autumn badger bagel bamboo banjo barley basil
beacon beaver bell birch biscuit bison blanket blossom boat bonfire book bottle branch bread
breeze brick bridge broom bucket butter cabin cactus camel candle canoe canvas caramel cargo
carrot castle cedar cello cherry chestnut chimney cider cinema circle citrus clover cobalt cocoa
comet compass copper coral cotton cradle crane crayon cricket crystal cuckoo curtain cushion
cypress daisy dawn denim desert diamond dolphin domino donkey dragon drum dune eagle echo elbow
elm ember engine falcon feather fennel fern ferry fiddle field finch flame flute forest fountain
fox frost galaxy garden garlic geyser ginger glacier globe goose granite grape gravel guitar
hammer harbor harp hazel hedge helmet heron hill honey horizon igloo indigo iris island ivory
jacket jade jasmine jelly jigsaw jungle kayak kettle kitten kiwi ladder lagoon lantern lark
lavender lemon lentil lilac linen lion lizard lobster locket lotus lunar magnet mango maple
marble meadow melon meteor mint mirror mitten mocha moose mosaic moss muffin mustard napkin
nectar needle nickel noodle nougat nutmeg oak oasis ocean olive onion opal orange orbit orchid
otter owl oyster paddle palm panda paper parrot peach pebble pelican pepper piano pigeon pillow
pine planet plum pocket pony poppy prairie prism pumpkin quartz quilt rabbit radish rainbow
raven reef ribbon river robin rocket rose ruby saddle saffron salmon sandal satin scarf shell
silver sofa spoon spruce stone sunset swan tango teapot thimble tiger timber tulip turtle valley
velvet violet walnut whale willow window winter wizard yogurt zebra zinc
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())


_WORDS_AT = slice(4, 8)
"""The bytes behind the words: past those that the six characters show already."""


def fingerprint(node_id: NodeId) -> str:
    """``amber-river-piano-moss abc234``. Raises BadKey for text that is no node id."""
    words = "-".join(WORDS[byte] for byte in id_digest(node_id)[_WORDS_AT])
    return f"{words} {short_id(node_id)}"


def id_digest(node_id: NodeId) -> bytes:
    """The SHA-256 inside a node id. Raises BadKey for text that is no node id."""
    if not is_node_id(node_id):
        raise BadKey(f"{node_id!r} is not a node id.", fix="Copy the whole id, starting with hn1.")
    encoded = node_id.removeprefix("hn1").upper()
    return base64.b32decode(encoded + "=" * (-len(encoded) % 8))
