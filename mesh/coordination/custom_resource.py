"""A model's record as Kubernetes has it: a ModelMetadata resource, and ConfigMaps beside it.

The resource names the workers, the phase and the conditions; each worker's tensors are in
ConfigMaps of their own, as many as it needs: etcd takes about 1.5 MB per object, a ConfigMap 1 MiB.
Pure data; `mesh.coordination.kubernetes` sends it. Names and fields are those of ModelExpress'
definition, `manifests/modelmetadata-crd.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, Sha256, Text, UInt32
from mesh.coordination.forms import PlaceText, place_of, place_text, tensor_maps, tensors_of
from mesh.coordination.ready import ReadySignal
from mesh.coordination.records import (
    MAX_TENSORS,
    MAX_WORKERS,
    ModelRef,
    ModelWorker,
    TensorDescriptor,
)
from mesh.types import ModelId

GROUP = "modelexpress.nvidia.com"
VERSION = "v1alpha1"
PLURAL = "modelmetadatas"
KIND = "ModelMetadata"
MODEL_LABEL = f"{GROUP}/model"
WORKER_LABEL = f"{GROUP}/worker"
PARTS = f"{GROUP}/parts"
TENSORS_FILE = "tensors.json"
PART_BYTES = 900_000
"""What one ConfigMap carries of a worker's tensors; the API server takes 1 MiB with the rest."""
MAX_PARTS = 256
_SLUG = 40


class WorkerStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One element of ``status.workers``."""

    worker_rank: UInt32
    nixl_metadata: PlaceText
    tensor_count: Annotated[int, Meta(ge=0, le=MAX_TENSORS)] = 0
    published_at: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    ready: bool = False
    stability_verified: bool = False


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One element of ``status.conditions``."""

    type: Text
    status: Text
    last_transition_time: Text


class ModelMetadataStatus(msgspec.Struct, frozen=True, rename="camel"):
    """``status`` of a ModelMetadata."""

    phase: Text = ""
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MAX_WORKERS)] = ()
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=32)] = ()


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of a ModelMetadata. Without `expected_workers` any number is all."""

    model_name: Text
    weights_sha256: Sha256
    expected_workers: UInt32 | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of a ModelMetadata, as far as it is used."""

    name: Text
    uid: Text = ""
    resource_version: Text = ""
    generation: Int63 = 0


class ModelMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """A ModelMetadata."""

    metadata: Metadata
    spec: Spec
    status: ModelMetadataStatus = ModelMetadataStatus()

    @property
    def model(self) -> ModelRef:
        """The model that it is of. Raises ValueError."""
        return ModelRef(ModelId(self.spec.model_name), self.spec.weights_sha256)


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, of something not read."""

    type: Text


def resource_from(fields: object) -> ModelMetadata:
    """Read what the API server sent. Raises Fault."""
    return codec.convert(fields, ModelMetadata)


def resource_name(model: ModelRef) -> str:
    """The name of its resource: as ModelExpress sanitises it, and a hash, since that loses letters.

    At most 51 characters, so that it is a label's value as well; the model's own name, which may
    have slashes, is none.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", model.name.lower())[:_SLUG].strip("-") or "model"
    return f"{slug}-{hashlib.sha256(model.key.encode()).hexdigest()[:10]}"


def new_resource(model: ModelRef) -> dict[str, Any]:
    """What is sent to create the model's resource."""
    name = resource_name(model)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "labels": {MODEL_LABEL: name}},
        "spec": {"modelName": model.name, "weightsSha256": model.weights_sha256},
    }


# The status.


def with_workers(
    status: ModelMetadataStatus, workers: Iterable[ModelWorker]
) -> ModelMetadataStatus:
    """The status with these workers, newly published and so not ready, by rank."""
    by_rank = {each.worker_rank: each for each in status.workers}
    for worker in workers:
        by_rank[worker.worker_rank] = WorkerStatus(
            worker.worker_rank,
            place_text(worker.place),
            len(worker.tensors),
            datetime.fromtimestamp(worker.published_at, UTC),
        )
    return msgspec.structs.replace(status, workers=tuple(by_rank[rank] for rank in sorted(by_rank)))


def with_signals(
    status: ModelMetadataStatus, signals: Mapping[int, ReadySignal]
) -> ModelMetadataStatus:
    """The status with these workers' readiness."""

    def changed(worker: WorkerStatus) -> WorkerStatus:
        signal = signals.get(worker.worker_rank)
        if signal is None:
            return worker
        return msgspec.structs.replace(
            worker, ready=signal.ready, stability_verified=signal.stability_verified
        )

    return msgspec.structs.replace(status, workers=tuple(map(changed, status.workers)))


def phase(
    before: ModelMetadataStatus, after: ModelMetadataStatus, expected_workers: int | None
) -> str:
    """Of the workers that serve: ``Ready`` when all that are expected are, ``Stale`` from when one
    that was is no more until all are again, else ``Initializing``; ``Pending`` without any."""
    serving = _serving(after)
    ready = _ready_ranks(serving)
    if len(ready) == len(serving) >= (expected_workers or 1):
        return "Ready"
    if before.phase == "Stale" or not _ready_ranks(_serving(before)) <= ready:
        return "Stale"
    return "Initializing" if serving else "Pending"


def _serving(status: ModelMetadataStatus) -> list[WorkerStatus]:
    return [each for each in status.workers if _serves(each)]


def _serves(worker: WorkerStatus) -> bool:
    """So does one whose place is not written as here: it is of another maker, who has no others."""
    try:
        return place_of(worker.nixl_metadata).kind.serves
    except Fault:
        return True


def _ready_ranks(workers: Iterable[WorkerStatus]) -> set[int]:
    return {each.worker_rank for each in workers if each.ready and each.stability_verified}


def status_map(
    resource: ModelMetadata, status: ModelMetadataStatus, now: datetime
) -> dict[str, Any]:
    """What is sent as ``status``: workers, and what follows from them."""
    expected = resource.spec.expected_workers
    now_in = phase(resource.status, status, expected)
    now_is = {
        "AllWorkersPublished": len(_serving(status)) >= (expected or 1),
        "StabilityVerified": now_in == "Ready",
    }
    before = {each.type: each for each in resource.status.conditions}
    conditions = []
    for name, holds in now_is.items():
        text, old = str(holds), before.get(name)
        same = old is not None and old.status == text
        since = old.last_transition_time if old is not None and same else _moment(now)
        conditions.append({"type": name, "status": text, "lastTransitionTime": since})
    newest = max((each.published_at for each in status.workers), default=now)
    return {
        "phase": now_in,
        "workers": [_worker_map(each) for each in status.workers],
        "conditions": conditions,
        "observedGeneration": resource.metadata.generation,
        "publishedAt": _moment(newest),
    }


def _worker_map(worker: WorkerStatus) -> dict[str, Any]:
    return {
        "workerRank": worker.worker_rank,
        "nixlMetadata": worker.nixl_metadata,
        "tensorCount": worker.tensor_count,
        "publishedAt": _moment(worker.published_at),
        "ready": worker.ready,
        "stabilityVerified": worker.stability_verified,
    }


def worker_from(status: WorkerStatus, tensors: tuple[TensorDescriptor, ...]) -> ModelWorker:
    """The worker that a resource and its ConfigMaps say. Raises Fault."""
    published = int(status.published_at.timestamp())
    return ModelWorker(status.worker_rank, place_of(status.nixl_metadata), tensors, published)


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The ConfigMaps.


def part_name(resource: str, rank: int, part: int) -> str:
    """The name of a worker's ConfigMap: ModelExpress' for the first."""
    name = f"{resource}-tensors-worker-{rank}"
    return name if part == 0 else f"{name}-part-{part}"


def config_maps(resource: ModelMetadata, worker: ModelWorker) -> list[dict[str, Any]]:
    """What is sent to create a worker's ConfigMaps: none where it did not say its tensors.

    They belong to the resource, and go with it.
    """
    name, rank = resource.metadata.name, worker.worker_rank
    parts = list(_parts(worker.tensors))
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": name,
        "uid": resource.metadata.uid,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": part_name(name, rank, index),
                "labels": {MODEL_LABEL: name, WORKER_LABEL: str(rank)},
                "annotations": {PARTS: str(len(parts))},
                "ownerReferences": [owner],
            },
            "data": {TENSORS_FILE: text},
        }
        for index, text in enumerate(parts)
    ]


def _parts(tensors: Sequence[TensorDescriptor]) -> Iterator[str]:
    part: list[str] = []
    size = 0
    for fields in tensor_maps(tensors):
        text = json.dumps(fields, separators=(",", ":"))
        if part and size + len(text) > PART_BYTES:
            yield f"[{','.join(part)}]"
            part, size = [], 0
        part.append(text)
        size += len(text) + 1
    if part:
        yield f"[{','.join(part)}]"


def parts_of(annotations: Mapping[str, str] | None) -> int:
    """How many ConfigMaps a worker has, as the first of them says. Raises Fault."""
    text = (annotations or {}).get(PARTS, "1")
    if not text.isdecimal() or not 0 < int(text) <= MAX_PARTS:
        raise Fault(f"must be 1 to {MAX_PARTS}, got {text[:60]!r}", PARTS)
    return int(text)


def part_tensors(data: Mapping[str, str] | None) -> tuple[TensorDescriptor, ...]:
    """The tensors of one ConfigMap. Raises Fault."""
    text = (data or {}).get(TENSORS_FILE)
    if text is None:
        raise Fault("is missing", TENSORS_FILE)
    return tensors_of(codec.parse_json(text))
