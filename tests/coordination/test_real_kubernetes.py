"""Records in a real Kubernetes: what is shipped for it is taken, and is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from mesh.coordination.custom_resource import new_resource, resource_name
from mesh.coordination.records import ModelRef
from mesh.errors import BadRecord, StoreRefused
from mesh.types import ModelId
from tests.coordination.cluster import Cluster
from tests.coordination.holders import MODEL, OTHER, tensors, worker
from tests.coordination.kubernetes_client import READY, connected


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.running(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


async def named(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """The resources that the server has."""
    answer = await asyncio.to_thread(cluster.admin.get, cluster.resources(namespace))
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def test_what_a_node_does_from_its_first_shard_to_its_last(cluster: Cluster) -> None:
    namespace = "life"
    file = await asyncio.to_thread(cluster.new_namespace, namespace)
    async with connected(namespace, file) as store, connected(namespace, file) as other:
        await other.models()
        told = asyncio.create_task(other.changed(30.0))
        many = replace(worker(1), tensors=tensors(7000, padding=300))  # beyond one ConfigMap
        await store.publish(MODEL, [many, worker(2, count=3)])
        async with asyncio.timeout(10):
            await told
        record = await other.get(MODEL)
        assert record is not None
        assert record.workers == (many, worker(2, count=3))
        assert await other.models() == [MODEL]
        (resource,) = await named(cluster, namespace)
        assert resource["status"]["phase"] == "Initializing"
        await store.mirror_ready(MODEL, {1: READY, 2: READY})
        (resource,) = await named(cluster, namespace)
        assert resource["status"]["phase"] == "Ready"
        fewer = replace(many, tensors=many.tensors[:2], published_at=many.published_at + 1)
        await store.publish(MODEL, [fewer])
        record = await other.get(MODEL)
        assert record is not None
        assert record.workers == (fewer, worker(2, count=3))
        await store.withdraw(MODEL, [1, 2])
        assert await other.get(MODEL) is None
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    left = (await asyncio.to_thread(cluster.admin.get, path)).json()["items"]
    ours = [each["metadata"]["name"] for each in left if resource_name(MODEL) in str(each)]
    assert (await named(cluster, namespace), ours) == ([], [])


async def test_many_at_once_lose_nothing(cluster: Cluster) -> None:
    file = await asyncio.to_thread(cluster.new_namespace, "crowd")
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(connected("crowd", file)) for _ in range(5)]
        published = [
            store.publish(MODEL, [worker(rank, count=1)]) for rank, store in enumerate(stores)
        ]
        await asyncio.gather(*published)
        record = await stores[0].get(MODEL)
        assert record is not None
        assert [each.worker_rank for each in record.workers] == [0, 1, 2, 3, 4]
        leaving = (store.withdraw(MODEL, [rank]) for rank, store in enumerate(stores))
        await asyncio.gather(*leaving, stores[0].publish(MODEL, [worker(9)]))
        record = await stores[0].get(MODEL)
        assert record is not None
        assert [each.worker_rank for each in record.workers] == [9]


async def test_a_list_is_read_in_pages(cluster: Cluster) -> None:
    file = await asyncio.to_thread(cluster.new_namespace, "pages")
    models = [ModelRef(ModelId(f"Model {n:03}/Ä"), "ab" * 32) for n in range(101)]
    for model in models:
        path = cluster.resources("pages")
        await asyncio.to_thread(cluster.post, path, new_resource(model))
    async with connected("pages", file) as store:
        assert sorted(await store.models(), key=lambda model: model.name) == models


async def test_what_is_not_allowed_or_not_set_up_is_said(cluster: Cluster) -> None:
    file = await asyncio.to_thread(cluster.new_namespace, "bare", roles=False)
    with pytest.raises(StoreRefused, match="403") as refused:
        async with connected("bare", file):
            pass
    assert "role" in refused.value.fix
    text = await asyncio.to_thread(file.read_text, "utf-8")
    await asyncio.to_thread(file.write_text, text.replace("token: ", "token: not"), "utf-8")
    with pytest.raises(StoreRefused, match="401"):
        async with connected("bare", file):
            pass


async def test_what_another_has_put_there_is_named_and_left_alone(cluster: Cluster) -> None:
    file = await asyncio.to_thread(cluster.new_namespace, "others")
    async with connected("others", file) as store:
        await store.publish(OTHER, [worker(1)])
        resource = {**new_resource(MODEL), "status": {}}
        created = await asyncio.to_thread(cluster.post, cluster.resources("others"), resource)
        created["status"] = {"workers": [{"workerRank": 1, "nixlMetadata": "bm9uc2Vuc2U="}]}
        path = f"{cluster.resources('others')}/{resource_name(MODEL)}/status"
        answer = await asyncio.to_thread(lambda: cluster.admin.put(path, json=created))
        assert answer.is_success
        with pytest.raises(BadRecord, match="is no record"):
            await store.get(MODEL)
        record = await store.get(OTHER)
        assert record is not None
