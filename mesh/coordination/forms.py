"""Records as JSON, in ModelExpress' form: what Redis, SQLite and Kubernetes keep.

Sizes and addresses are text, since JSON numbers are exact below 2^53 only; a `WorkerPlace` is the
base64 of a JSON map in the field of the NIXL agent's metadata. Reading is strict. Knows no store.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, Sha256, Text, UInt32, printable
from mesh.coordination.records import (
    MAX_TENSORS,
    MAX_WORKERS,
    ModelRecord,
    ModelRef,
    ModelWorker,
    TensorDescriptor,
    WorkerKind,
    WorkerPlace,
)
from mesh.types import LayerRange, ModelId, NodeId

MAX_RECORD_BYTES = 256 << 20
_MAX_PLACE = 4096


def _uint64(text: str) -> None:
    if int(text) >= 1 << 64:
        raise ValueError("is not below 2^64")


def _layers(text: str) -> None:
    LayerRange.parse(text)


UInt64Text = Annotated[str, Meta(pattern=r"\A(0|[1-9][0-9]{0,19})\Z"), _uint64]
TensorName = Annotated[str, Meta(min_length=1, max_length=512), printable]
PlaceText = Annotated[str, Meta(min_length=1, max_length=_MAX_PLACE)]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """One element of ``tensors``."""

    name: TensorName
    size: UInt64Text
    dtype: Text
    addr: UInt64Text = "0"
    device_id: UInt32 = 0


Tensors = Annotated[tuple[TensorForm, ...], Meta(max_length=MAX_TENSORS)]


@dataclass(frozen=True, slots=True)
class PlaceForm:
    """What the base64 of ``nixl_metadata`` holds."""

    holder: Text
    kind: WorkerKind
    layers: Annotated[str, Meta(max_length=16), _layers]
    endpoint: Text


@dataclass(frozen=True, slots=True)
class WorkerForm:
    """One element of ``workers``. `holder` is what a script in the store compares; no other than
    in the place."""

    worker_rank: UInt32
    holder: Text
    nixl_metadata: PlaceText
    published_at: Int63
    tensors: Tensors = ()


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The value of ``mx:model:{model_name}``."""

    model_name: Text
    weights_sha256: Sha256
    published_at: Int63
    workers: Annotated[tuple[WorkerForm, ...], Meta(max_length=MAX_WORKERS)] = ()


def tensor_maps(tensors: Iterable[TensorDescriptor]) -> list[dict[str, Any]]:
    """Tensors as JSON has them."""
    return [
        codec.plain(TensorForm(t.name, str(t.size), t.dtype, str(t.addr), t.device_id))
        for t in tensors
    ]


def tensors_from(text: str) -> tuple[TensorDescriptor, ...]:
    """The inverse of `tensor_maps`, of its JSON. Raises Fault."""
    return _tensors(codec.convert(codec.parse_json(text), Tensors))


def place_text(place: WorkerPlace) -> str:
    """A place as base64."""
    form = PlaceForm(place.holder, place.kind, str(place.layers), place.endpoint)
    return base64.b64encode(json.dumps(codec.plain(form)).encode()).decode("ascii")


def place_of(text: str) -> WorkerPlace:
    """The inverse of `place_text`. Raises Fault."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Fault(f"is not base64: {error}", "nixl_metadata") from error
    form = codec.convert(codec.parse_json(raw), PlaceForm)
    return WorkerPlace(NodeId(form.holder), form.kind, LayerRange.parse(form.layers), form.endpoint)


def worker_map(worker: ModelWorker) -> dict[str, Any]:
    """A worker as JSON has it; without ``tensors`` where there are none.

    A script in Redis could not tell an empty list from an empty map, and would write the latter.
    """
    place = worker.place
    form = WorkerForm(worker.worker_rank, place.holder, place_text(place), worker.published_at)
    fields = codec.plain(form) | {"tensors": tensor_maps(worker.tensors)}
    if not worker.tensors:
        del fields["tensors"]
    return fields


def worker_json(worker: ModelWorker) -> str:
    """A worker as text."""
    return json.dumps(worker_map(worker), separators=(",", ":"))


def worker_from(text: bytes | str) -> ModelWorker:
    """The inverse of `worker_json`. Raises Fault."""
    return _worker(codec.convert(_bounded(text), WorkerForm))


def record_from(text: bytes | str, model: ModelRef) -> ModelRecord:
    """The record of `model` that this JSON is. Raises Fault, also for another model's."""
    form = codec.convert(_bounded(text), RecordForm)
    found = ModelRef(ModelId(form.model_name), form.weights_sha256)
    if found != model:
        raise Fault(f"is the record of {found.key[:300]}", "model_name")
    by_rank = {each.worker_rank: _worker(each) for each in form.workers}
    if len(by_rank) != len(form.workers):
        raise Fault("has two workers of one rank", "worker_rank")
    return ModelRecord.of(model, by_rank)


def _bounded(text: bytes | str) -> Any:
    if len(text) > MAX_RECORD_BYTES:
        raise Fault(f"has more than {MAX_RECORD_BYTES} bytes")
    return codec.parse_json(text)


def _tensors(forms: Iterable[TensorForm]) -> tuple[TensorDescriptor, ...]:
    return tuple(
        TensorDescriptor(each.name, int(each.size), each.dtype, int(each.addr), each.device_id)
        for each in forms
    )


def _worker(form: WorkerForm) -> ModelWorker:
    place = place_of(form.nixl_metadata)
    if place.holder != form.holder:
        raise Fault("is not the one of nixl_metadata", "holder")
    return ModelWorker(form.worker_rank, place, _tensors(form.tensors), form.published_at)
