"""The records in Kubernetes: one ModelMetadata resource per model, changed by optimistic locking.

A change reads the resource, changes its status and sends it with the resource's version; where
somebody was quicker (409), it is read again. What is sent is `mesh.coordination.custom_resource`'s.
How it is sent is `mesh.coordination.kubernetes_api`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mesh import codec
from mesh.clock import Clock, backoff_s
from mesh.codec import Fault
from mesh.coordination import custom_resource as forms
from mesh.coordination.custom_resource import (
    GROUP,
    PLURAL,
    VERSION,
    ModelMetadata,
    ModelMetadataStatus,
)
from mesh.coordination.forms import place_of
from mesh.coordination.kubernetes_api import (
    REQUEST_TIMEOUT_S,
    Conflict,
    KubernetesApi,
    NoSuchObject,
)
from mesh.coordination.ready import ReadySignal
from mesh.coordination.records import (
    MAX_MODELS,
    ModelRecord,
    ModelRef,
    ModelWorker,
    TensorDescriptor,
    rank_taken,
)
from mesh.coordination.store import RecordStore
from mesh.errors import StoreUnavailable

MAX_CONFLICTS = 12
_FIRST_BACK_OFF_S, _LAST_BACK_OFF_S = 0.02, 1.0
_SHORTEST_WATCH_S = 1.0
_PAGE = 100

_Kept = tuple[object, tuple[TensorDescriptor, ...]]
"""By what a worker is known again, and its tensors."""

Change = Callable[[ModelMetadata], ModelMetadataStatus]


class KubernetesStore(RecordStore):
    """See `mesh.coordination.store.RecordStore` and `ReadyMirror`.

    `kubeconfig` is the file that says where the API server is; without one, the pod's service
    account does, or the user's own file.
    """

    name = "kubernetes"

    def __init__(self, namespace: str, kubeconfig: Path | None, clock: Clock) -> None:
        self._namespace = namespace
        self._where = GROUP, VERSION, namespace, PLURAL
        self._api = KubernetesApi(kubeconfig, f"A resource {PLURAL}.{GROUP} in {namespace}")
        self._clock = clock
        self._seen = ""
        """The version of the list of resources that was read last."""
        self._tensors: dict[str, dict[int, _Kept]] = {}
        """By the names of resources and ranks: what was read of workers that are there."""

    async def connect(self) -> None:
        """Find the API server and ask it for our resources."""
        await self._api.connect()
        async with self._api.translated():
            await self._page(limit=1)

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Create the resource where there is none, write the ConfigMaps, then the status."""
        async with self._api.translated():
            for _ in range(MAX_CONFLICTS):
                # Its last worker was withdrawn meanwhile, and it with him; or an earlier try, which
                # was given up here, is still being done there.
                with suppress(NoSuchObject, Conflict):
                    await self._publish(model, workers)
                    return
            raise _too_often(model)

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take workers out of the status, and their ConfigMaps away."""

        def change(current: ModelMetadata) -> ModelMetadataStatus:
            left = [each for each in current.status.workers if each.worker_rank not in ranks]
            return msgspec.structs.replace(current.status, workers=tuple(left))

        async with self._api.translated():
            with suppress(NoSuchObject):
                left = await self._change(model, change)
                for rank in ranks:
                    await self._delete_tensors(model, rank, from_part=0)
                if not left.status.workers:
                    await self._delete(left)

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """Read the resource, and the ConfigMaps of those workers that are new."""
        async with self._api.translated():
            try:
                resource = await self._read(model)
            except NoSuchObject:
                self._tensors.pop(forms.resource_name(model), None)
                return None
            self._forget_gone(resource)
            workers = [
                forms.worker_from(each, await self._read_tensors(resource, each))
                for each in resource.status.workers
            ]
        return ModelRecord(model, tuple(workers)) if workers else None

    async def models(self) -> list[ModelRef]:
        """List the resources, in pages; those of other makers are left out."""
        found: list[ModelRef] = []
        token = ""
        async with self._api.translated():
            while True:
                page = await self._page(limit=_PAGE, _continue=token)
                for item in page["items"]:
                    with suppress(Fault, ValueError):
                        found.append(forms.resource_from(item).model)
                metadata = page.get("metadata") or {}
                token = metadata.get("continue") or ""
                if not token or len(found) > MAX_MODELS:
                    names = set(map(forms.resource_name, found))
                    for name in self._tensors.keys() - names:
                        del self._tensors[name]
                    self._seen = str(metadata.get("resourceVersion") or "")
                    return found

    async def changed(self, timeout_s: float) -> None:
        """Watch the resources from where they were listed last."""
        began = self._clock.monotonic()
        async with self._api.translated():
            events = await self._api.ask(
                self._api.custom.list_namespaced_custom_object,
                *self._where,
                watch=True,
                resource_version=self._seen,
                timeout_seconds=max(1, int(timeout_s)),
                _preload_content=False,
                _request_timeout=timeout_s + REQUEST_TIMEOUT_S,
            )
            try:
                async for line in events.content:
                    if _is_news(line):
                        return
            finally:
                events.close()
        if self._clock.monotonic() - began < _SHORTEST_WATCH_S:  # it would be asked without pause
            await asyncio.sleep(_SHORTEST_WATCH_S)

    async def mirror_ready(self, model: ModelRef, signals: Mapping[int, ReadySignal]) -> None:
        """Show readiness in the status."""
        async with self._api.translated():
            with suppress(NoSuchObject):
                await self._change(
                    model, lambda current: forms.with_signals(current.status, signals)
                )

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    # Resources

    async def _publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        resource = await self._create(model)
        _require_ranks(model, resource.status, workers)
        for worker in workers:
            await self._write_tensors(resource, worker)

        def change(current: ModelMetadata) -> ModelMetadataStatus:
            _require_ranks(model, current.status, workers)
            return forms.with_workers(current.status, workers)

        await self._change(model, change)

    async def _create(self, model: ModelRef) -> ModelMetadata:
        try:
            return await self._read(model)
        except NoSuchObject:
            pass
        with suppress(Conflict):  # another node was quicker
            await self._api.ask(
                self._api.custom.create_namespaced_custom_object,
                *self._where,
                forms.new_resource(model),
            )
        return await self._read(model)

    async def _read(self, model: ModelRef) -> ModelMetadata:
        name = forms.resource_name(model)
        fields = await self._api.ask(
            self._api.custom.get_namespaced_custom_object,
            GROUP,
            VERSION,
            self._namespace,
            PLURAL,
            name,
        )
        resource = forms.resource_from(fields)
        if (resource.spec.model_name, resource.spec.weights_sha256) != (
            model.name,
            model.weights_sha256,
        ):
            raise Fault(f"{name} is of another model", "modelName")
        return resource

    async def _change(self, model: ModelRef, change: Change) -> ModelMetadata:
        """Read, change, write; again where the resource has changed meanwhile. The one written."""
        for attempt in range(MAX_CONFLICTS):
            resource = await self._read(model)
            status = change(resource)
            body = {
                **forms.new_resource(model),
                "metadata": {
                    "name": resource.metadata.name,
                    "resourceVersion": resource.metadata.resource_version,
                },
                "status": forms.status_map(resource, status, self._clock.now()),
            }
            with suppress(Conflict):
                written = await self._api.ask(
                    self._api.custom.replace_namespaced_custom_object_status,
                    *self._where,
                    resource.metadata.name,
                    body,
                )
                return forms.resource_from(written)
            longest_s = backoff_s(attempt + 1, _FIRST_BACK_OFF_S, _LAST_BACK_OFF_S)
            await asyncio.sleep(random.uniform(0, longest_s))  # noqa: S311 - not a secret
        raise _too_often(model)

    async def _delete(self, resource: ModelMetadata) -> None:
        """Only as it is: where somebody has put a worker into it meanwhile, it stays."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"resourceVersion": resource.metadata.resource_version},
        }
        with suppress(Conflict, NoSuchObject):
            await self._api.ask(
                self._api.custom.delete_namespaced_custom_object,
                *self._where,
                resource.metadata.name,
                body=options,
            )

    async def _page(self, **wanted: Any) -> Mapping[str, Any]:
        page = await self._api.ask(
            self._api.custom.list_namespaced_custom_object,
            *self._where,
            **{key: value for key, value in wanted.items() if value},
        )
        if not isinstance(page, dict) or not isinstance(page.get("items"), list):
            raise Fault("has no list of items", "items")
        return page

    # ConfigMaps

    async def _write_tensors(self, resource: ModelMetadata, worker: ModelWorker) -> None:
        bodies = await asyncio.to_thread(forms.config_maps, resource, worker)
        for body in bodies:
            name = body["metadata"]["name"]
            try:
                await self._api.ask(
                    self._api.core.replace_namespaced_config_map, name, self._namespace, body
                )
            except NoSuchObject:
                await self._api.ask(
                    self._api.core.create_namespaced_config_map, self._namespace, body
                )
        await self._delete_tensors(resource.model, worker.worker_rank, from_part=len(bodies))

    async def _delete_tensors(self, model: ModelRef, rank: int, *, from_part: int) -> None:
        name = forms.resource_name(model)
        self._tensors.get(name, {}).pop(rank, None)
        parts = []
        for part in range(from_part, forms.MAX_PARTS):
            try:
                await self._read_part(name, rank, part)
            except NoSuchObject:
                break
            parts.append(forms.part_name(name, rank, part))
        for each in reversed(parts):  # so that what a try leaves behind is found by the next
            with suppress(NoSuchObject):
                await self._api.ask(
                    self._api.core.delete_namespaced_config_map, each, self._namespace
                )

    async def _read_tensors(
        self, resource: ModelMetadata, worker: forms.WorkerStatus
    ) -> tuple[TensorDescriptor, ...]:
        place = resource.metadata.name, worker.worker_rank
        known_as = worker.published_at, worker.tensor_count, worker.nixl_metadata
        kept = self._tensors.get(place[0], {}).get(place[1])
        if kept is not None and kept[0] == known_as:
            return kept[1]
        found: tuple[TensorDescriptor, ...] = ()
        parts = 1 if worker.tensor_count else 0
        part = 0
        while part < parts:
            try:
                read = await self._read_part(*place, part)
            except NoSuchObject:
                return ()
            if part == 0:
                parts = forms.parts_of(read.metadata.annotations)
            found += await asyncio.to_thread(forms.part_tensors, read.data)
            part += 1
        if len(found) != worker.tensor_count:
            return ()  # just being written; they are said, or not, when the status is
        self._tensors.setdefault(place[0], {})[place[1]] = known_as, found
        return found

    async def _read_part(self, name: str, rank: int, part: int) -> Any:
        return await self._api.ask(
            self._api.core.read_namespaced_config_map,
            forms.part_name(name, rank, part),
            self._namespace,
        )

    def _forget_gone(self, resource: ModelMetadata) -> None:
        kept = self._tensors.get(resource.metadata.name, {})
        for rank in kept.keys() - {each.worker_rank for each in resource.status.workers}:
            del kept[rank]


def _is_news(line: bytes) -> bool:
    """Whether an event of a watch says that something has changed, or may have. Raises Fault."""
    event = codec.convert(codec.parse_json(line), forms.WatchEvent)
    # An error, as 410: from where the watch began is too long ago; all is listed again.
    return event.type != "BOOKMARK"


def _require_ranks(
    model: ModelRef, status: ModelMetadataStatus, workers: Sequence[ModelWorker]
) -> None:
    holders = {each.worker_rank: place_of(each.nixl_metadata).holder for each in status.workers}
    for worker in workers:
        holder = holders.get(worker.worker_rank, worker.place.holder)
        if holder != worker.place.holder:
            raise rank_taken(model, worker.worker_rank, holder)


def _too_often(model: ModelRef) -> StoreUnavailable:
    return StoreUnavailable(
        f"{forms.resource_name(model)} was changed by others {MAX_CONFLICTS} times in a row.",
        fix="Wait: it is tried again.",
    )
