"""What a node says about the checkpoints on its disk, and the dict that carries it in a notice.

It stands beside the shards in the same notice, as strictly read (`advertisement`). Older nodes
ignore it. Whoever wants tensors asks for them at the endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Text
from mesh.discovery.advertisement import MAX_LAYERS, endpoint_text
from mesh.errors import BadAdvertisement
from mesh.types import Endpoint, LayerRange, ModelId

MAX_WEIGHTS_PER_NODE = 64
MAX_SPANS = 64
KEY = "weights"
_Hash = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A checkpoint of which a node has all tensors of these layers, and of the ends if `ends`.

    `weights_sha256` is '' while the node fetches it from the hub, as the hash is known at the end
    of that only; `origin` is then what it fetches, ``org/name@commit``.
    `files_sha256` is that of its config and tokenizer, '' where an older node does not say it.
    """

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    layers: tuple[LayerRange, ...]
    ends: bool
    endpoint: Endpoint
    origin: str = ""
    files_sha256: str = ""


def _span(text: str) -> None:
    LayerRange.parse(text)


@dataclass(frozen=True, slots=True)
class _Entry:
    model_id: Text
    weights_sha256: _Hash
    total_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    layers: Annotated[tuple[Annotated[Text, _span], ...], Meta(max_length=MAX_SPANS)]
    ends: bool
    endpoint: Annotated[Text, endpoint_text]
    origin: Annotated[str, Meta(max_length=256), codec.printable] = ""
    files_sha256: _Hash = ""


@dataclass(frozen=True, slots=True)
class _Entries:
    weights: Annotated[tuple[_Entry, ...], Meta(max_length=MAX_WEIGHTS_PER_NODE)]


def encode_all(held: Sequence[HeldWeights]) -> list[dict[str, Any]]:
    """Plain JSON-able types; what does not fit in a notice is left out, the last first."""
    return [
        codec.plain(
            _Entry(
                each.model_id, each.weights_sha256, each.total_layers,
                tuple(str(span) for span in each.layers[:MAX_SPANS]), each.ends, each.endpoint,
                each.origin, each.files_sha256,
            )
        )
        for each in held[:MAX_WEIGHTS_PER_NODE]
    ]  # fmt: skip


def decode_all(entries: object) -> tuple[HeldWeights, ...]:
    """What a node said. Raises BadAdvertisement naming the field."""
    try:
        read = codec.convert({KEY: entries}, _Entries).weights
    except Fault as fault:
        field = fault.field or KEY
        raise BadAdvertisement(
            f"Field {field!r} of what a node says of its weights cannot be used: {fault.why}.",
            fix="Update hearthnet on the node that sent it.",
            param=KEY,
        ) from fault
    return tuple(
        HeldWeights(
            ModelId(entry.model_id), entry.weights_sha256, entry.total_layers,
            tuple(map(LayerRange.parse, entry.layers)), entry.ends, Endpoint(entry.endpoint),
            entry.origin, entry.files_sha256,
        )
        for entry in read
    )  # fmt: skip
