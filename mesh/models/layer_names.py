"""Where the decoder layers are among a checkpoint's tensors: by their names, and what config says.

Both come from strangers: whatever they say, it is refused or understood in little time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import BadCheckpoint
from mesh.models.header import TensorEntry
from mesh.types import MAX_LAYERS

INDEXED = re.compile(r"(.*?)(?<![0-9])([0-9]{1,6})\.")
"""A name with a number between dots, which is that of a layer for most."""

# Where decoder layers live in the checkpoints in circulation; the first complete one is taken.
_PREFIXES = (
    "model.language_model.layers.", "language_model.model.layers.", "model.layers.",
    "transformer.h.", "h.", "layers.", "model.decoder.layers.", "gpt_neox.layers.",
)  # fmt: skip


def language_part(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the language model. Raises BadCheckpoint."""
    text, architectures = config.get("text_config"), config.get("architectures") or []
    text = config if text is None else text
    kind = text.get("model_type") if isinstance(text, Mapping) and text else 0
    if not isinstance(kind, str | None) or not isinstance(architectures, list):
        raise BadCheckpoint(
            f"{directory / 'config.json'} has text_config, model_type or architectures of another"
            " form.",
            fix="Download it again, or use another checkpoint.",
        )
    return text


def find_layers(directory: Path, names: list[str], text: Mapping[str, Any]) -> tuple[str, int]:
    """The prefix of the decoder layers' tensor names, and how many layers there are. `text` is the
    language model's part of the config. Raises BadCheckpoint."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := INDEXED.match(name):
            found[match[1]].add(int(match[2]))
    known = [prefix for prefix in _PREFIXES if prefix in found]
    ordered = known + sorted(set(found) - set(known), key=lambda prefix: -len(found[prefix]))
    total = number_in(text, "num_hidden_layers", "n_layer", "num_layers")
    if total is None and ordered:
        total = max(found[ordered[0]]) + 1
    if total is not None and total > MAX_LAYERS:
        raise BadCheckpoint(
            f"{directory} says that it has {total} layers; {MAX_LAYERS} are the most.",
            fix="Download config.json again, or use another checkpoint.",
        )
    if not ordered or not total:
        raise BadCheckpoint(
            f"No decoder layers were found among the {len(names)} tensors of {directory}.",
            fix="Only decoder language models can be spread over machines.",
        )
    for prefix in ordered:
        if found[prefix].issuperset(range(total)):
            return prefix, total
    missing = sorted(set(range(total)) - found[ordered[0]])
    raise BadCheckpoint(
        f"{directory} lacks layers {', '.join(map(str, missing[:8]))}: {len(missing)} of {total}.",
        fix="Download the missing weights files.",
    )


def layer_bytes(
    tensors: Mapping[str, TensorEntry], prefix: str, total_layers: int
) -> tuple[int, ...]:
    """Those of each layer, as stored."""
    sizes = [0] * total_layers
    for name, entry in tensors.items():
        index = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        if index.isascii() and index.isdigit() and len(index) < 7 and int(index) < total_layers:
            sizes[int(index)] += entry.nbytes
    return tuple(sizes)


def number_in(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a number from 1; None where none is."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:  # JSON's true is an int to Python
            return value
    return None
