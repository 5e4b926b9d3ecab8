"""Records in Kubernetes: the real client against a stand-in API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mesh.clock import SystemClock
from mesh.coordination.custom_resource import PARTS, resource_name
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.ready import ReadySignal
from mesh.coordination.records import ModelRef, WorkerKind
from mesh.errors import BadRecord, StoreRefused, StoreUnavailable
from mesh.types import ModelId
from tests.coordination import kubernetes_client
from tests.coordination.api_server import CRD, PLURAL, ROLE, ApiServer, api_server
from tests.coordination.holders import MODEL, OTHER, tensors, worker
from tests.coordination.kubernetes_client import READY

connected = partial(kubernetes_client.connected, "kavin")
GONE = ReadySignal(ready=False, stability_verified=False)


@pytest.fixture
async def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def kubeconfig(server: ApiServer, tmp_path: Path) -> AsyncIterator[Path]:
    async with api_server(tmp_path, server) as file:
        yield file


@pytest.fixture
async def store(kubeconfig: Path) -> AsyncIterator[KubernetesStore]:
    async with connected(kubeconfig) as found:
        yield found


def status_of(server: ApiServer) -> dict[str, Any]:
    status: dict[str, Any] = server.resources[resource_name(MODEL)]["status"]
    return status


def conditions(server: ApiServer) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status_of(server)["conditions"]}


async def test_a_model_is_a_resource_and_its_tensors_are_config_maps(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [worker(1, count=3)])
    resource = server.resources[resource_name(MODEL)]
    assert resource["metadata"]["name"].startswith("deepseek-ai-deepseek-v3-")
    assert resource["spec"] == {"modelName": MODEL.name, "weightsSha256": MODEL.weights_sha256}
    (shown,) = resource["status"]["workers"]
    assert (shown["workerRank"], shown["tensorCount"], shown["ready"]) == (1, 3, False)
    assert shown["publishedAt"] == "2026-01-28T02:40:00Z"
    (config_map,) = server.config_maps.values()
    name = f"{resource['metadata']['name']}-tensors-worker-1"
    assert config_map["metadata"]["name"] == name
    assert config_map["metadata"]["ownerReferences"][0]["uid"] == resource["metadata"]["uid"]
    assert json.loads(config_map["data"]["tensors.json"])[2]["size"] == str(2**63 + 2)
    await store.publish(MODEL, [replace(worker(1), tensors=())])
    assert server.config_maps == {}


async def test_tensors_beyond_a_config_map_are_in_several(
    server: ApiServer, store: KubernetesStore, kubeconfig: Path
) -> None:
    many = replace(worker(1), tensors=tensors(7000, padding=300))
    await store.publish(MODEL, [many])
    sizes = [len(each["data"]["tensors.json"]) for each in server.config_maps.values()]
    assert len(sizes) == 4
    assert sum(sizes) > 2 << 20
    async with connected(kubeconfig) as other:
        record = await other.get(MODEL)
        assert record is not None
        assert record.workers == (many,)
        fewer = replace(many, tensors=many.tensors[:2], published_at=many.published_at + 1)
        await store.publish(MODEL, [fewer])
        assert len(server.config_maps) == 1
        record = await other.get(MODEL)
        assert record is not None
        assert record.workers == (fewer,)
    await store.withdraw(MODEL, [1])
    assert (server.config_maps, server.resources) == ({}, {})


async def test_config_maps_whose_removal_was_broken_off_go_with_the_next_try(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [replace(worker(1), tensors=tensors(7000, padding=300)), worker(2)])
    assert len(server.config_maps) == 5
    withdrawing = asyncio.create_task(store.withdraw(MODEL, [1]))
    while len(server.config_maps) == 5:  # noqa: ASYNC110 - the next step is late already
        await asyncio.sleep(0)
    withdrawing.cancel()
    await asyncio.wait([withdrawing])
    assert len(server.config_maps) == 4
    await store.withdraw(MODEL, [1])
    assert list(server.config_maps) == [f"{resource_name(MODEL)}-tensors-worker-2"]


class QuickClock(SystemClock):
    """An hour later whenever it is asked."""

    hours = 0

    def now(self) -> datetime:
        self.hours += 1
        return datetime(2026, 1, 27, tzinfo=UTC) + timedelta(hours=self.hours)


async def test_phases_and_conditions_follow_the_workers(
    server: ApiServer, kubeconfig: Path
) -> None:
    async with connected(kubeconfig, QuickClock()) as store:
        await _phases(server, store)


async def _phases(server: ApiServer, store: KubernetesStore) -> None:
    await store.publish(MODEL, [worker(1), worker(2)])
    server.resources[resource_name(MODEL)]["spec"]["expectedWorkers"] = 3
    await store.mirror_ready(MODEL, {1: READY, 2: READY})
    assert status_of(server)["phase"] == "Initializing"
    assert conditions(server) == {"AllWorkersPublished": "False", "StabilityVerified": "False"}
    await store.publish(MODEL, [worker(3)])
    assert conditions(server)["AllWorkersPublished"] == "True"
    since = {each["type"]: each["lastTransitionTime"] for each in status_of(server)["conditions"]}
    await store.mirror_ready(MODEL, {3: READY})
    assert status_of(server)["phase"] == "Ready"
    assert conditions(server) == {"AllWorkersPublished": "True", "StabilityVerified": "True"}
    kept = {each["type"]: each["lastTransitionTime"] for each in status_of(server)["conditions"]}
    assert kept["AllWorkersPublished"] == since["AllWorkersPublished"]
    assert kept["StabilityVerified"] > since["StabilityVerified"]
    assert status_of(server)["observedGeneration"] == 1
    await store.mirror_ready(MODEL, {2: GONE})
    assert status_of(server)["phase"] == "Stale"
    await store.publish(MODEL, [worker(2)])  # another run of it
    assert status_of(server)["phase"] == "Stale"
    await store.mirror_ready(MODEL, {2: READY})
    assert status_of(server)["phase"] == "Ready"
    await store.withdraw(MODEL, [2])
    assert status_of(server)["phase"] == "Stale"
    await store.mirror_ready(OTHER, {2: READY})  # nobody has published it
    assert len(server.resources) == 1


async def test_files_on_a_disk_count_neither_as_published_nor_as_not_ready(
    server: ApiServer, store: KubernetesStore
) -> None:
    files = replace(worker(5), place=replace(worker(5).place, kind=WorkerKind.CHECKPOINT))
    await store.publish(MODEL, [files])
    assert status_of(server)["phase"] == "Pending"
    assert conditions(server) == {"AllWorkersPublished": "False", "StabilityVerified": "False"}
    await store.publish(MODEL, [worker(1)])
    assert status_of(server)["phase"] == "Initializing"
    await store.mirror_ready(MODEL, {1: READY})
    assert status_of(server)["phase"] == "Ready"
    assert conditions(server) == {"AllWorkersPublished": "True", "StabilityVerified": "True"}
    # A worker of another maker, whose place says nothing here.
    status_of(server)["workers"][1] |= {"nixlMetadata": "bm9uc2Vuc2U=", "ready": False}
    await store.mirror_ready(MODEL, {1: READY})
    assert status_of(server)["phase"] == "Initializing"
    await store.withdraw(MODEL, [1])
    assert status_of(server)["phase"] == "Stale"


async def test_who_was_slower_reads_again_and_loses_nothing(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [worker(1)])
    server.conflicts = 3
    await store.publish(MODEL, [worker(2)])
    assert [each["workerRank"] for each in status_of(server)["workers"]] == [1, 2]
    server.conflicts = 1000
    with pytest.raises(StoreUnavailable, match="12 times in a row"):
        await store.publish(MODEL, [worker(3)])


async def test_what_is_withdrawn_last_does_not_take_a_new_worker_along(
    server: ApiServer, kubeconfig: Path
) -> None:
    async with connected(kubeconfig) as one, connected(kubeconfig) as two:
        for _ in range(5):
            await one.publish(MODEL, [worker(1)])
            await asyncio.gather(one.withdraw(MODEL, [1]), two.publish(MODEL, [worker(2)]))
            record = await one.get(MODEL)
            assert record is not None
            assert worker(2) in record.workers


async def test_a_resource_that_goes_while_a_worker_is_published_is_made_again(
    server: ApiServer, store: KubernetesStore
) -> None:
    publishing = asyncio.create_task(store.publish(MODEL, [worker(1)]))
    while not server.config_maps:  # noqa: ASYNC110 - the next step is late already
        await asyncio.sleep(0)
    server.resources.clear()
    server.config_maps.clear()
    await publishing
    record = await store.get(MODEL)
    assert record is not None
    assert record.workers == (worker(1),)


async def test_a_list_is_read_in_pages(server: ApiServer, store: KubernetesStore) -> None:
    models = [ModelRef(ModelId(f"Model {n}/Ä"), "ab" * 32) for n in range(5)]
    for model in models:
        await store.publish(model, [replace(worker(1), tensors=())])
    server.requests.clear()
    assert sorted(await store.models(), key=lambda model: model.name) == models
    assert server.requests == [f"list {PLURAL}"] * 3


async def test_a_watch_ends_with_the_first_change(
    server: ApiServer, store: KubernetesStore, kubeconfig: Path
) -> None:
    await store.models()
    watching = asyncio.create_task(store.changed(30.0))
    async with asyncio.timeout(10):
        await server.watched.wait()
        await asyncio.sleep(0.1)
        assert not watching.done()
        async with connected(kubeconfig) as other:
            await other.publish(MODEL, [worker(1)])
        await watching
        # From before that change: it is told of at once.
        await store.changed(30.0)
        await store.models()
        server.oldest = server.version + 1
        await store.changed(30.0)


@pytest.mark.slow
async def test_a_watch_without_news_ends_in_time(store: KubernetesStore) -> None:
    await store.models()
    async with asyncio.timeout(5):
        await store.changed(1.0)


async def test_the_role_allows_exactly_what_is_asked(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [worker(1)])
    await store.publish(MODEL, [worker(1)])
    await store.models()
    await store.get(MODEL)
    async with asyncio.timeout(10):
        await asyncio.gather(store.changed(9.0), store.mirror_ready(MODEL, {1: READY}))
    await store.withdraw(MODEL, [1])
    allowed = {
        f"{verb} {resource}"
        for rule in ROLE["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(server.requests) == allowed


async def test_what_is_not_allowed_or_not_set_up_is_said(
    server: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    server.role["rules"][0]["verbs"].remove("create")
    async with connected(kubeconfig) as store:
        with pytest.raises(StoreRefused, match="403") as refused:
            await store.publish(MODEL, [worker(1)])
        assert "role" in refused.value.fix
    server.role["rules"][0]["verbs"].append("create")
    async with connected(kubeconfig) as store:
        server.has_definition = False
        with pytest.raises(StoreRefused, match="no such resource"):
            await store.publish(MODEL, [worker(1)])
    with pytest.raises(StoreRefused, match="no such resource"):
        async with connected(kubeconfig):
            pass
    server.unavailable = True
    with pytest.raises(StoreUnavailable, match="503"):
        async with connected(kubeconfig):
            pass
    damaged = tmp_path / "damaged"
    for text in (None, "", "clusters: [", "current-context: here\ncontexts: 3\n"):
        if text is not None:
            await asyncio.to_thread(damaged.write_text, text)
        with pytest.raises(StoreUnavailable, match="kubeconfig"):
            async with connected(damaged):
                pass
    text = await asyncio.to_thread(kubeconfig.read_text)
    await asyncio.to_thread(kubeconfig.write_text, text.replace("a-service", "no-service"))
    server.unavailable = False
    with pytest.raises(StoreRefused, match="401"):
        async with connected(kubeconfig):
            pass


async def test_what_is_no_record_is_named_and_left_out_of_the_list(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [worker(1)])
    await store.publish(OTHER, [worker(1)])
    config_map = server.config_maps[f"{resource_name(MODEL)}-tensors-worker-1"]
    for parts in ("x", "0", "257"):
        config_map["metadata"]["annotations"] = {PARTS: parts}
        with pytest.raises(BadRecord, match="must be 1 to 256"):
            await store.get(MODEL)
    status_of(server)["workers"][0]["nixlMetadata"] = "bm9uc2Vuc2U="
    with pytest.raises(BadRecord, match="is no record"):
        await store.get(MODEL)
    # The definition of another ModelExpress, which prunes what it does not know.
    del server.resources[resource_name(MODEL)]["spec"]["weightsSha256"]
    assert await store.models() == [OTHER]
    with pytest.raises(BadRecord, match="is missing"):
        await store.get(MODEL)


async def test_a_worker_whose_config_maps_are_just_written_has_no_tensors_yet(
    server: ApiServer, store: KubernetesStore
) -> None:
    await store.publish(MODEL, [worker(1, count=2)])
    (name,) = server.config_maps
    data = server.config_maps[name]["data"]
    written = data["tensors.json"]
    data["tensors.json"] = json.dumps(json.loads(written)[:1])
    record = await store.get(MODEL)
    assert record is not None
    assert record.workers == (replace(worker(1), tensors=()),)
    data["tensors.json"] = written
    record = await store.get(MODEL)
    assert record is not None
    assert record.workers == (worker(1),)


async def test_nothing_is_kept_of_another_s_worker_that_went(
    server: ApiServer, store: KubernetesStore, kubeconfig: Path
) -> None:
    """What says that it is the same is read again, so it was not."""
    async with connected(kubeconfig) as other:

        async def read_as_it_was() -> int:
            server.requests.clear()
            record = await other.get(MODEL)
            assert record is not None
            assert record.workers == (worker(1), worker(2))
            return server.requests.count("get configmaps")

        await store.publish(MODEL, [worker(1), worker(2)])
        assert await read_as_it_was() == 2
        assert await read_as_it_was() == 0
        await store.withdraw(MODEL, [2])
        assert await other.get(MODEL) is not None
        await store.publish(MODEL, [worker(2)])
        assert await read_as_it_was() == 1
        await store.withdraw(MODEL, [1, 2])
        assert await other.models() == []
        await store.publish(MODEL, [worker(1), worker(2)])
        assert await read_as_it_was() == 2


def test_the_definition_is_modelexpress_s() -> None:
    assert CRD["metadata"]["name"] == f"{PLURAL}.{CRD['spec']['group']}"
    version = CRD["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert status["phase"]["enum"] == ["Pending", "Initializing", "Ready", "Stale"]
    assert CRD["spec"]["names"]["shortNames"] == ["mxmeta"]
