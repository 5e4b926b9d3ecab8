"""What a layout is made from: a model's sizes, what machines have and reach, and what is wished.

Plain data. Knows no checkpoint on disk, no shard that runs and no clock: whoever asks for a layout
puts down what was measured. Sizes are bytes, times milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mesh.capacity import Device
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.types import HALVED_FORMAT, LayerRange, ModelId, NodeId

Quant = Literal["none", "int8", "int4"]
QUANTS: tuple[Quant, ...] = ("none", "int8", "int4")

ITEMSIZE = {
    "fp32": 4.0, "fp16": 2.0, "bf16": 2.0, HALVED_FORMAT: 2.0, "int8": 1.125, "int4": 0.640625,
}  # fmt: skip
"""Bytes that a weight takes in each format, scales and zero points counted in: those of
`mesh.shard.compiled.formats.bytes_per_weight`, and a test holds the two together."""

MIXED_SIZE = {"int8": 1.22, "int4": 1.36}
"""By how much more that is in mixtures of experts: `mesh.shard.compiled.formats.MIXED_SIZE`."""

MAX_SHARDS = 16
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one checkpoint, from its manifest.

    `layer_weights` are how many numbers each layer has, `ends_weights` those of embedding, norm and
    head, of which `head_weights` are read for each token. They are stored as `dtype`: fp32, fp16 or
    bf16, or else a type of blocks that are decoded; there, layers and ends take `layer_bytes` and
    `ends_bytes`. `kv_numbers` are what one position adds to the caches of the layer that adds most,
    or of an average one where some add nothing; `state_bytes` what sessions take in an average one
    whatever their length.
    `scratch_bytes` is what computing takes beside weights and caches, however many layers there
    are. `quants` are the formats that its family can be served in; with `is_standard` layers it can
    be halved; with `is_int4` layers it loses nothing in int4. Of its layers a row reads
    `layer_read` numbers, where that is not all of them: those are mixtures of experts. A part of
    a model need not have its first and its last layer.
    `row_size` numbers go from hop to hop for one position. Tables have `inputs_weights` of which
    layers are given something for each token. `cuts` are where it may be parted.
    """

    model_id: ModelId
    weights_sha256: str
    layer_weights: tuple[int, ...]
    ends_weights: int
    head_weights: int
    dtype: str
    layer_bytes: tuple[int, ...]
    ends_bytes: int
    row_size: int
    kv_numbers: int
    scratch_bytes: int = 0
    quants: tuple[Quant, ...] = QUANTS
    is_standard: bool = False
    layer_read: tuple[int, ...] = ()
    state_bytes: int = 0
    is_int4: bool = False
    has_first: bool = True
    has_last: bool = True
    inputs_weights: int = 0
    cuts: Cuts = ANYWHERE

    def weight_size(self, name: str) -> float:
        """Bytes that a weight takes in this format."""
        is_widened = self.layer_read and "int8" in self.quants  # else torch computes in 4 bit
        return ITEMSIZE[name] * (MIXED_SIZE.get(name, 1.0) if is_widened else 1.0)

    @property
    def total_layers(self) -> int:
        """How many decoder layers it has."""
        return len(self.layer_weights)

    @property
    def edges(self) -> tuple[int, ...]:
        """The layers beside which embedding and head are, where shards run those."""
        ends = ((0, self.has_first), (self.total_layers - 1, self.has_last))
        return tuple(layer for layer, is_there in ends if is_there)

    def part(self, layers: LayerRange) -> ModelShape:
        """A model of these layers only."""
        own = slice(layers.start, layers.stop)
        return replace(
            self,
            layer_weights=self.layer_weights[own],
            layer_bytes=self.layer_bytes[own],
            layer_read=self.layer_read[own],
            has_first=self.has_first and layers.start == 0,
            has_last=self.has_last and layers.stop == self.total_layers,
            cuts=self.cuts.part(layers),
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """What layers of the model itself took on a device: counts before what its `Speed` says.

    `decode_ms` is each layer's share of a decode step.
    """

    device: str
    format: str
    decode_ms: float


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """Layers of the model that a machine has already.

    On its disk; or, with a `device`, loaded there, where they take `loaded_bytes` that become free
    when others come in their place.
    """

    layers: LayerRange
    device: str = ""
    loaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that may take layers. `rtt_ms` and `mb_s` are those of the way from the asker to it.

    `refusal` is why it may not take any, for people; empty where it may. `has_ends` where the
    model is asked for already, its ends loaded. As the asker it takes `asker_ms` for a token
    besides head and hops; `asked_ms`, head included, is what tokens of this very model took there,
    and counts first, as `way_ms` does, which is what steps lately took besides computing. Layers
    that it has to fetch may take `disk_bytes`; None where nobody knows. A shard there sets aside
    caches for `kv_tokens` positions in any case.
    """

    node_id: NodeId
    name: str
    devices: tuple[Device, ...]
    rtt_ms: float = 0.0
    mb_s: float = 100.0
    refusal: str = ""
    timed: tuple[Timed, ...] = ()
    held: tuple[HeldLayers, ...] = ()
    has_ends: bool = False
    asker_ms: float = 0.0
    asked_ms: float | None = None
    way_ms: float | None = None
    disk_bytes: int | None = None
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for.

    `asker` drives; None for nobody in particular. Whoever takes layers asks as well, and who asks
    holds the ends; `thin` where they are left to the shards with the first and the last layers.
    `only` are the nodes that may be used, all of them when it is empty; those in `without` may not.
    A node in `pins` serves exactly these layers. `quant` ``auto`` is the fastest that fits of 16 or
    32 bit, int8, and int4 for a model that is stored so; else int4 where neither fits. Caches are
    for `streams` sessions of `context` positions each. `dedicated` copies are never evicted; where
    they lie does not depend on it.
    """

    asker: NodeId | None = None
    replicas: int = 1
    dedicated: bool = False
    only: frozenset[NodeId] = frozenset()
    without: frozenset[NodeId] = frozenset()
    pins: tuple[tuple[NodeId, LayerRange], ...] = ()
    quant: str = "auto"
    context: int = DEFAULT_CONTEXT
    streams: int = 1
    max_shards: int = MAX_SHARDS
    thin: bool = False

    @property
    def positions(self) -> int:
        """What the caches of a shard are for at least."""
        return self.context * max(1, self.streams)
