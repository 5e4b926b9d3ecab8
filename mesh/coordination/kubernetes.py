"""The records in Kubernetes: one ModelMetadata resource per model, changed by optimistic locking.

A change reads the resource, changes its status and sends it with the resource's version; where
somebody was quicker (409), it is read again. What is sent is `mesh.coordination.custom_resource`'s.
How it is sent is `mesh.coordination.kubernetes_api`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from mesh import codec
from mesh.clock import Clock, backoff_s
from mesh.codec import Fault
from mesh.coordination import custom_resource as forms
from mesh.coordination.custom_resource import (
    GROUP,
    PLURAL,
    VERSION,
    ConfigMap,
    ModelMetadata,
    WorkerStatus,
)
from mesh.coordination.kubernetes_api import Conflict, KubernetesApi, NoSuchObject
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

_ByRank = dict[int, WorkerStatus]


class KubernetesStore(RecordStore):
    """See `RecordStore`.

    `kubeconfig` is the file that says where the API server is; without one, the pod's service
    account does, or the user's own file.
    """

    name = "kubernetes"

    def __init__(self, namespace: str, kubeconfig: Path | None, clock: Clock) -> None:
        self._resources = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        self._config_maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._api = KubernetesApi(kubeconfig, f"A resource {PLURAL}.{GROUP} in {namespace}")
        self._clock = clock
        self._listed = ""
        """The version of the list of resources that was read last."""
        self._tensors: dict[str, dict[object, tuple[TensorDescriptor, ...]]] = {}
        """What was read of runs of workers that are there, by the names of resources."""

    async def connect(self) -> None:
        """Find the API server and ask it for our resources."""
        await self._api.connect()
        async with self._api.translated():
            await self._api.ask("GET", self._resources, query={"limit": 1})

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Create the resource where there is none, write the ConfigMaps, then the status."""

        def change(by_rank: _ByRank) -> None:
            for each in workers:
                before = by_rank.get(each.worker_rank)
                holder = each.place.holder if before is None else before.place.holder
                if holder != each.place.holder:
                    raise rank_taken(model, each.worker_rank, holder)
                by_rank[each.worker_rank] = WorkerStatus.of(each)

        async with self._api.translated():
            await self._change(model, change, workers)

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take workers out of the status, and their ConfigMaps away."""

        def change(by_rank: _ByRank) -> None:
            for rank in ranks:
                by_rank.pop(rank, None)

        async with self._api.translated():
            with suppress(NoSuchObject):
                left = await self._change(model, change)
                for rank in ranks:
                    await self._delete_tensors(left.metadata.name, rank, 0)
                if not left.status.workers:
                    await self._delete(left)

    async def mirror_ready(self, model: ModelRef, signals: Mapping[int, ReadySignal]) -> None:
        """Show readiness in the status."""

        def change(by_rank: _ByRank) -> None:
            for rank, signal in signals.items():
                if rank in by_rank:
                    by_rank[rank] = msgspec.structs.replace(
                        by_rank[rank],
                        ready=signal.ready,
                        stability_verified=signal.stability_verified,
                    )

        async with self._api.translated():
            with suppress(NoSuchObject):
                await self._change(model, change)

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """Read the resource, and the ConfigMaps of those workers that are new."""
        workers = []
        async with self._api.translated():
            try:
                resource = await self._read(model)
            except NoSuchObject:
                return None
            name = resource.metadata.name
            kept, read = self._tensors.get(name, {}), {}
            for each in resource.status.workers:
                tensors = kept.get(each.run)
                if tensors is None:
                    tensors = await self._read_tensors(name, each)
                if len(tensors) == each.tensor_count:
                    read[each.run] = tensors
                workers.append(each.worker(tensors))
            self._tensors[name] = read
        return ModelRecord(model, tuple(workers)) if workers else None

    async def models(self) -> list[ModelRef]:
        """List the resources, in pages; those of other makers are left out."""
        found: list[ModelRef] = []
        query: dict[str, str | int] = {"limit": _PAGE}
        async with self._api.translated():
            while True:
                answer = await self._api.ask("GET", self._resources, query=query)
                page = codec.convert(answer, forms.ResourceList)
                for item in page.items:
                    with suppress(Fault, ValueError):
                        found.append(codec.convert(item, ModelMetadata).model)
                query["continue"] = page.metadata.continue_token
                if not page.metadata.continue_token or len(found) > MAX_MODELS:
                    break
        names = set(map(forms.resource_name, found))
        self._tensors = {name: kept for name, kept in self._tensors.items() if name in names}
        self._listed = page.metadata.resource_version
        return found

    async def changed(self, timeout_s: float) -> None:
        """Watch the resources from where they were listed last."""
        began = self._clock.monotonic()
        async with (
            self._api.translated(),
            aclosing(self._api.watch(self._resources, self._listed, timeout_s)) as lines,
        ):
            async for line in lines:
                # An error, as 410, is news as well: from where the watch began is too long ago; all
                # is listed again.
                event = codec.convert(codec.parse_json(line), forms.WatchEvent)
                if event.type != "BOOKMARK":
                    return
        if self._clock.monotonic() - began < _SHORTEST_WATCH_S:  # it would be asked without pause
            await asyncio.sleep(_SHORTEST_WATCH_S)

    # Resources

    async def _read(self, model: ModelRef) -> ModelMetadata:
        name = forms.resource_name(model)
        answer = await self._api.ask("GET", self._resources, name)
        resource = codec.convert(answer, ModelMetadata)
        spec = resource.spec
        if (spec.model_name, spec.weights_sha256) != (model.name, model.weights_sha256):
            raise Fault(f"{name} is of another model", "modelName")
        return resource

    async def _created(self, model: ModelRef) -> ModelMetadata:
        with suppress(NoSuchObject):
            return await self._read(model)
        with suppress(Conflict):  # another node was quicker
            await self._api.ask("POST", self._resources, body=forms.new_resource(model))
        return await self._read(model)

    async def _change(
        self,
        model: ModelRef,
        change: Callable[[_ByRank], None],
        new: Sequence[ModelWorker] = (),
    ) -> ModelMetadata:
        """Read, change, write; again where the resource has changed meanwhile. The one written.

        With `new` workers it is made where it is missing, and their ConfigMaps are written.
        """
        # Its last worker was withdrawn meanwhile, and it with him; or an earlier try, which was
        # given up here, is still being done there.
        again = (Conflict, NoSuchObject) if new else (Conflict,)
        owner = ""
        for attempt in range(MAX_CONFLICTS):
            with suppress(*again):
                resource = await (self._created(model) if new else self._read(model))
                by_rank = resource.status.by_rank
                change(by_rank)
                if resource.metadata.uid != owner:
                    for worker in new:
                        await self._write_tensors(resource, worker)
                    owner = resource.metadata.uid
                body = forms.changed_resource(resource, by_rank, self._clock.now())
                name = f"{resource.metadata.name}/status"
                written = await self._api.ask("PUT", self._resources, name, body)
                return codec.convert(written, ModelMetadata)
            longest_s = backoff_s(attempt + 1, _FIRST_BACK_OFF_S, _LAST_BACK_OFF_S)
            await asyncio.sleep(random.uniform(0, longest_s))  # noqa: S311 - not a secret
        raise StoreUnavailable(
            f"{forms.resource_name(model)} was changed by others {MAX_CONFLICTS} times in a row.",
            fix="Wait: it is tried again.",
        )

    async def _delete(self, resource: ModelMetadata) -> None:
        """Only as it is: where somebody has put a worker into it meanwhile, it stays."""
        name, version = resource.metadata.name, resource.metadata.resource_version
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"resourceVersion": version},
        }
        with suppress(Conflict):
            await self._api.ask("DELETE", self._resources, name, options)

    # ConfigMaps

    async def _write_tensors(self, resource: ModelMetadata, worker: ModelWorker) -> None:
        bodies = await asyncio.to_thread(forms.config_maps, resource, worker)
        for body in bodies:
            try:
                await self._api.ask("PUT", self._config_maps, body["metadata"]["name"], body)
            except NoSuchObject:
                await self._api.ask("POST", self._config_maps, body=body)
        await self._delete_tensors(resource.metadata.name, worker.worker_rank, len(bodies))

    async def _delete_tensors(self, name: str, rank: int, from_part: int) -> None:
        self._tensors.pop(name, None)
        parts = []
        with suppress(NoSuchObject):
            for part in range(from_part, forms.MAX_PARTS):
                each = forms.part_name(name, rank, part)
                await self._api.ask("GET", self._config_maps, each)
                parts.append(each)
        for each in reversed(parts):  # so that what a try leaves behind is found by the next
            with suppress(NoSuchObject):
                await self._api.ask("DELETE", self._config_maps, each)

    async def _read_tensors(self, name: str, worker: WorkerStatus) -> tuple[TensorDescriptor, ...]:
        """Empty where they are just being written; they are said, or not, when the status is."""
        found: tuple[TensorDescriptor, ...] = ()
        part, parts = 0, min(1, worker.tensor_count)
        with suppress(NoSuchObject):
            while part < parts:
                answer = await self._api.ask(
                    "GET", self._config_maps, forms.part_name(name, worker.worker_rank, part)
                )
                config_map = codec.convert(answer, ConfigMap)
                if part == 0:
                    parts = config_map.parts
                found += await asyncio.to_thread(config_map.tensors)
                part += 1
        return found if len(found) == worker.tensor_count else ()
