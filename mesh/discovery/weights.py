"""What a node says about the checkpoints on its disk, and the dict that carries it in a notice.

It stands beside the shards in the same notice, as strictly read (`advertisement`). Older nodes
ignore it. Whoever wants tensors asks for them at the endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.types import MAX_LAYERS, Address, LayerRange, ModelName

MAX_WEIGHTS_PER_NODE = 64
MAX_SPANS = 64
MAX_BYTES = 1 << 53
_Hash = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]


_Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


@dataclass(frozen=True, slots=True)
class Arriving:
    """What a node fetches of a checkpoint now: so much of it is there, the rest comes at that rate
    of its last seconds."""

    done_bytes: _Bytes
    total_bytes: _Bytes
    bytes_per_s: _Bytes

    @property
    def eta_s(self) -> float | None:
        """Seconds that the rest takes at that rate; None while nothing comes."""
        left = max(0, self.total_bytes - self.done_bytes)
        return left / self.bytes_per_s if self.bytes_per_s else None

    def row(self) -> dict[str, Any]:
        """For the status, JSON-able."""
        return {
            "done_bytes": min(self.done_bytes, self.total_bytes),
            "total_bytes": self.total_bytes,
            "bytes_per_s": self.bytes_per_s,
            "eta_s": self.eta_s,
        }


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A checkpoint of which a node has all tensors of these layers, and of the ends if `ends`.

    `weights_sha256` is '' while the node fetches it from the hub, as the hash is known at the end
    of that only; `origin` is then what it fetches, ``org/name@commit``.
    `files_sha256` is that of its config and tokenizer, '' where an older node does not say it.
    `arriving` is None while it fetches nothing of it, or does not say how far it is.
    """

    model_id: ModelName
    weights_sha256: _Hash
    total_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    layers: Annotated[tuple[LayerRange, ...], Meta(max_length=MAX_SPANS)]
    ends: bool
    endpoint: Address
    origin: Annotated[str, Meta(max_length=256), codec.printable] = ""
    files_sha256: _Hash = ""
    arriving: Arriving | None = None

    def without_bytes(self) -> HeldWeights:
        """The same without what changes all the time."""
        return replace(self, arriving=None)


def fitting(held: Sequence[HeldWeights]) -> tuple[HeldWeights, ...]:
    """What fits in a notice; the last ones are left out."""
    first = held[:MAX_WEIGHTS_PER_NODE]
    return tuple(replace(each, layers=each.layers[:MAX_SPANS]) for each in first)
