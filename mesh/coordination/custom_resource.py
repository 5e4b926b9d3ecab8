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
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mesh.codec import Fault, Int63, Sha256, Text, UInt32
from mesh.coordination.forms import PlaceText, place_of, place_text, tensor_maps, tensors_from
from mesh.coordination.records import (
    MAX_TENSORS,
    MAX_WORKERS,
    ModelRef,
    ModelWorker,
    TensorDescriptor,
    WorkerPlace,
)
from mesh.types import ModelId

GROUP = "modelexpress.nvidia.com"
VERSION = "v1alpha1"
PLURAL = "modelmetadatas"
KIND = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "ModelMetadata"}
MODEL_LABEL = f"{GROUP}/model"
WORKER_LABEL = f"{GROUP}/worker"
PARTS = f"{GROUP}/parts"
TENSORS_FILE = "tensors.json"
PART_BYTES = 900_000
"""What one ConfigMap carries of a worker's tensors; the API server takes 1 MiB with the rest."""
MAX_PARTS = 256
_SLUG = 40

Moment = Annotated[datetime, Meta(tz=True)]


class WorkerStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One element of ``status.workers``."""

    worker_rank: UInt32
    nixl_metadata: PlaceText
    tensor_count: Annotated[int, Meta(ge=0, le=MAX_TENSORS)] = 0
    published_at: Moment = datetime(1970, 1, 1, tzinfo=UTC)
    ready: bool = False
    stability_verified: bool = False

    @classmethod
    def of(cls, worker: ModelWorker) -> WorkerStatus:
        """Of a worker that is newly published, and so not ready."""
        return cls(
            worker.worker_rank,
            place_text(worker.place),
            len(worker.tensors),
            datetime.fromtimestamp(worker.published_at, UTC),
        )

    def worker(self, tensors: tuple[TensorDescriptor, ...]) -> ModelWorker:
        """The worker that this and its ConfigMaps say. Raises Fault."""
        return ModelWorker(
            self.worker_rank, self.place, tensors, int(self.published_at.timestamp())
        )

    @property
    def place(self) -> WorkerPlace:
        """Where it is. Raises Fault."""
        return place_of(self.nixl_metadata)

    @property
    def run(self) -> object:
        """By what it is known again, its tensors included."""
        return self.worker_rank, self.published_at, self.tensor_count, self.nixl_metadata

    @property
    def counts(self) -> bool:
        """Whether others may connect."""
        return self.ready and self.stability_verified

    @property
    def serves(self) -> bool:
        """So does one whose place is not written as here: it is of another maker, who has no
        others."""
        try:
            return self.place.kind.serves
        except Fault:
            return True


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One element of ``status.conditions``."""

    type: Text
    status: Text
    last_transition_time: Moment


class ModelMetadataStatus(msgspec.Struct, frozen=True, rename="camel"):
    """``status`` of a ModelMetadata."""

    phase: Text = ""
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MAX_WORKERS)] = ()
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=32)] = ()
    observed_generation: Int63 = 0
    published_at: Moment | None = None

    @property
    def by_rank(self) -> dict[int, WorkerStatus]:
        """The workers by their ranks."""
        return {each.worker_rank: each for each in self.workers}

    @property
    def ready_ranks(self) -> set[int]:
        """The workers that serve, and to which others may connect."""
        return {each.worker_rank for each in self.workers if each.counts and each.serves}


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of a ModelMetadata. Without `expected_workers` any number is all."""

    model_name: Text
    weights_sha256: Sha256
    expected_workers: UInt32 | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of an object or of a page, as far as it is used."""

    name: Text = ""
    uid: Text = ""
    resource_version: Text = ""
    generation: Int63 = 0
    annotations: dict[str, str] = {}
    continue_token: str = msgspec.field(name="continue", default="")
    """For the next page, if there is one."""


class ModelMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """A ModelMetadata."""

    metadata: Metadata
    spec: Spec
    status: ModelMetadataStatus = ModelMetadataStatus()

    @property
    def model(self) -> ModelRef:
        """The model that it is of. Raises ValueError."""
        return ModelRef(ModelId(self.spec.model_name), self.spec.weights_sha256)


class ConfigMap(msgspec.Struct, frozen=True):
    """A part of a worker's tensors."""

    metadata: Metadata
    data: dict[str, str] = {}

    @property
    def parts(self) -> int:
        """How many the worker has, as the first of them says. Raises Fault."""
        text = self.metadata.annotations.get(PARTS, "1")
        if not text.isdecimal() or not 0 < int(text) <= MAX_PARTS:
            raise Fault(f"must be 1 to {MAX_PARTS}, got {text[:60]!r}", PARTS)
        return int(text)

    def tensors(self) -> tuple[TensorDescriptor, ...]:
        """Those in this part. Raises Fault."""
        if TENSORS_FILE not in self.data:
            raise Fault("is missing", TENSORS_FILE)
        return tensors_from(self.data[TENSORS_FILE])


class ResourceList(msgspec.Struct, frozen=True):
    """A page of resources, of which those of other makers may be no `ModelMetadata`."""

    metadata: Metadata
    items: list[Any]


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, of something not read."""

    type: Text


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
        **KIND,
        "metadata": {"name": name, "labels": {MODEL_LABEL: name}},
        "spec": {"modelName": model.name, "weightsSha256": model.weights_sha256},
    }


def changed_resource(
    resource: ModelMetadata, by_rank: Mapping[int, WorkerStatus], now: datetime
) -> dict[str, Any]:
    """What is sent to give it these workers, with the phase and the conditions that follow."""
    now = now.replace(microsecond=0)
    expected = resource.spec.expected_workers
    after = ModelMetadataStatus(workers=tuple(by_rank[rank] for rank in sorted(by_rank)))
    phase = phase_of(resource.status, after, expected)
    serving = [each for each in after.workers if each.serves]
    holds = {
        "AllWorkersPublished": len(serving) >= (expected or 1),
        "StabilityVerified": phase == "Ready",
    }
    since = {
        (each.type, each.status): each.last_transition_time for each in resource.status.conditions
    }
    conditions = [
        Condition(name, str(so), since.get((name, str(so)), now)) for name, so in holds.items()
    ]
    status = msgspec.structs.replace(
        after,
        phase=phase,
        conditions=tuple(conditions),
        observed_generation=resource.metadata.generation,
        published_at=max((each.published_at for each in after.workers), default=now),
    )
    name, version = resource.metadata.name, resource.metadata.resource_version
    return {
        **new_resource(resource.model),
        "metadata": {"name": name, "resourceVersion": version},
        "status": msgspec.to_builtins(status),
    }


def phase_of(
    before: ModelMetadataStatus, after: ModelMetadataStatus, expected_workers: int | None
) -> str:
    """Of the workers that serve: ``Ready`` when all that are expected are, ``Stale`` from when one
    that was is no more until all are again, else ``Initializing``; ``Pending`` without any."""
    serving = [each for each in after.workers if each.serves]
    ready = after.ready_ranks
    if len(ready) == len(serving) >= (expected_workers or 1):
        return "Ready"
    if before.phase == "Stale" or not before.ready_ranks <= ready:
        return "Stale"
    return "Initializing" if serving else "Pending"


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
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": part_name(name, rank, index),
                "labels": {MODEL_LABEL: name, WORKER_LABEL: str(rank)},
                "annotations": {PARTS: str(len(parts))},
                "ownerReferences": [{**KIND, "name": name, "uid": resource.metadata.uid}],
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
