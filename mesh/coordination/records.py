"""Who holds which checkpoint: a record per model, a worker per node and span.

Pure data and the one rule by which records are put together. Knows nothing of stores, of their
formats or of who is ready. The fields are those of ModelExpress' ``ModelMetadataRecord``; what it
keeps as a NIXL agent's blob is a `WorkerPlace` here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mesh.codec import MAX_TEXT
from mesh.errors import RankTaken
from mesh.types import LayerRange, ModelId, NodeId

MAX_MODELS = 1024
"""Models of which a node keeps records."""
MAX_WORKERS = 1024
"""Workers of one model."""
MAX_TENSORS = 200_000
"""Tensors of one worker."""
_LAYER_BITS = 14
_NAME_BITS = 32 - _LAYER_BITS
_UINT64 = 1 << 64


class WorkerKind(StrEnum):
    """What a worker has of a model."""

    SHARD = "shard"
    """Layers in memory, that it computes with."""
    CHECKPOINT = "checkpoint"
    """Files on its disk, from which others may take them."""

    @property
    def serves(self) -> bool:
        """Whether it computes, and so can be ready; files on a disk never are."""
        return self is WorkerKind.SHARD


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One exact checkpoint: the name people use for it and the hash of its weights."""

    name: ModelId
    weights_sha256: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_TEXT or not self.name.isprintable():
            raise ValueError("a model's name is printable, of 1 to 256 characters")
        if len(self.weights_sha256) != 64 or set(self.weights_sha256) - set("0123456789abcdef"):
            raise ValueError("weights_sha256 is 64 hexadecimal digits")

    @property
    def key(self) -> str:
        """Its name in stores, ``NAME@SHA256``: other weights under one name are another record."""
        return f"{self.name}@{self.weights_sha256}"

    @classmethod
    def parse(cls, key: str) -> ModelRef:
        """The inverse of `key`. Raises ValueError."""
        name, _, digest = key.rpartition("@")
        return cls(ModelId(name), digest)


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """One tensor that a worker holds: `size` in bytes, `dtype` as torch spells it (``bfloat16``).

    `addr` is where it lies in the memory of device `device_id`, 0 where it is not for others to
    read there.
    """

    name: str
    size: int
    dtype: str
    addr: int = 0
    device_id: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.size < _UINT64 and 0 <= self.addr < _UINT64):
            raise ValueError("sizes and addresses are below 2^64")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is: its node, what it holds, and the endpoint (``wss://HOST:PORT``, or
    ``HOST:PORT`` of a node) where it is asked for it."""

    holder: NodeId
    kind: WorkerKind
    layers: LayerRange
    endpoint: str


@dataclass(frozen=True, slots=True)
class ModelWorker:
    """A holder of a part of a model. `published_at` is in seconds since 1970, by its clock.

    `tensors` is empty where the worker did not say them.
    """

    worker_rank: int
    place: WorkerPlace
    tensors: tuple[TensorDescriptor, ...]
    published_at: int

    def __post_init__(self) -> None:
        if not 0 <= self.worker_rank < 1 << 32:
            raise ValueError("a rank is below 2^32")
        if len(self.tensors) > MAX_TENSORS:
            raise ValueError(f"{len(self.tensors)} tensors, more than {MAX_TENSORS}")


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """All known workers of one model, sorted by rank."""

    model: ModelRef
    workers: tuple[ModelWorker, ...]

    @classmethod
    def of(cls, model: ModelRef, by_rank: Mapping[int, ModelWorker]) -> ModelRecord:
        """The inverse of `by_rank`."""
        return cls(model, tuple(by_rank[rank] for rank in sorted(by_rank)))

    @property
    def by_rank(self) -> dict[int, ModelWorker]:
        """The workers by their ranks."""
        return {worker.worker_rank: worker for worker in self.workers}

    @property
    def published_at(self) -> int:
        """When the latest worker was published, in seconds since 1970."""
        return max((worker.published_at for worker in self.workers), default=0)

    def without(self, ranks: Collection[int]) -> ModelRecord:
        """The same without these workers."""
        left = tuple(worker for worker in self.workers if worker.worker_rank not in ranks)
        return ModelRecord(self.model, left)


def worker_rank(place: WorkerPlace) -> int:
    """A rank below 2^32 for a worker that nobody gave one: by first layer, then by a hash.

    It stays the same over restarts, and ranks sort workers by their layers. Two workers that begin
    at the same layer get the same one with a probability of 2^-18; the later is then refused.
    """
    layer = min(place.layers.start, (1 << _LAYER_BITS) - 1)
    text = f"{place.holder}:{place.kind}:{place.layers}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return layer << _NAME_BITS | digest >> _LAYER_BITS


def merged(
    model: ModelRef, record: ModelRecord | None, workers: Iterable[ModelWorker]
) -> ModelRecord:
    """`record` with `workers` in the place of those of the same rank, sorted by rank.

    Raises RankTaken when a rank belongs to another node.
    """
    by_rank = {} if record is None else record.by_rank
    for worker in workers:
        before = by_rank.get(worker.worker_rank, worker)
        if before.place.holder != worker.place.holder:
            raise rank_taken(model, worker.worker_rank, before.place.holder)
        by_rank[worker.worker_rank] = worker
    return ModelRecord.of(model, by_rank)


def rank_taken(model: ModelRef, rank: int, holder: str) -> RankTaken:
    """The error of a worker whose rank another node has."""
    return RankTaken(
        f"Worker {rank} of {model.name} is already published by node {holder}.",
        fix="Publish under another rank, or withdraw the other worker first.",
        param="worker_rank",
    )
