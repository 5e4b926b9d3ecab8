"""What a node publishes of itself, as a stand-in API server shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest

from mesh.accounts.ledger import ResourceLedger
from mesh.api.services import ReadyQuestion
from mesh.config import Config
from mesh.coordination.custom_resource import resource_name
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.records import ModelRef, WorkerKind, WorkerPlace, worker_rank
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import ShardStore
from mesh.discovery.interfaces import Interface, Reach
from mesh.health.eventstream import EventFeed
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.models.local import LocalModel, find_local_models
from mesh.node.coordination import CoordinationHere
from mesh.paths import StatePaths
from mesh.types import LayerRange, ModelId
from tests import secure
from tests.coordination.api_server import ApiServer, api_server
from tests.coordination.holders import until, worker
from tests.discovery.network import advertised
from tests.health.clock import ManualClock


@dataclass
class Here:
    """A node's coordination, the server that it writes to, and what the node serves."""

    server: ApiServer
    model: LocalModel
    kubeconfig: Path
    models: dict[ModelId, LocalModel]
    served: list[Advertisement] = field(default_factory=list)
    own: CoordinationHere | None = None
    looks: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    events: EventFeed = field(init=False)
    addresses: list[str] = field(default_factory=lambda: ["127.0.0.1"])
    """Those of the node's machine now."""

    def __post_init__(self) -> None:
        self.events = EventFeed(self.clock)

    def serve(self, *layers: str) -> None:
        name, digest = self.model.model_id, self.model.weights_sha256
        self.served[:] = [advertised(secure.KEY.node_id, each, name, digest) for each in layers]

    def interfaces(self) -> list[Interface]:
        found = tuple(IPv4Interface(f"{each}/8") for each in self.addresses)
        return [Interface("home0", True, found)]

    def look(self) -> list[Advertisement]:
        self.looks += 1
        return self.served

    async def looked_twice(self) -> None:
        after = self.looks + 2

        async def is_so() -> bool:
            return self.looks > after

        await until(is_so)

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.model.model_id, self.model.weights_sha256)

    @property
    def status(self) -> dict[str, Any]:
        resource = self.server.resources.get(resource_name(self.ref), {})
        status: dict[str, Any] = resource.get("status", {})
        return status

    async def shows(self, phase: str, workers: int) -> None:
        """Until the resource is in this phase, with so many workers."""

        async def is_so() -> bool:
            seen = self.status.get("phase"), len(self.status.get("workers", ()))
            return seen == (phase, workers)

        await until(is_so)


@asynccontextmanager
async def publishing(tmp_path: Path, store: str) -> AsyncIterator[Here]:
    """A node that holds the checkpoint of the built-in model, and keeps its records in `store`."""
    server = ApiServer()
    async with api_server(tmp_path, server) as kubeconfig:
        section = {
            "store": store,
            "namespace": server.namespace,
            "kubeconfig": kubeconfig,
            "refresh_seconds": 1,
        }
        config = await asyncio.to_thread(
            lambda: Config(
                state_dir=tmp_path / "node",
                model=("builtin",),
                interface=("127.0.0.1",),
                port=0,
                coordination=section,  # type: ignore[arg-type]
            )
        )
        (model,) = await asyncio.to_thread(find_local_models, config, tmp_path)
        paths = StatePaths(config.state_dir)
        await asyncio.to_thread(paths.create)
        here = Here(server, model, kubeconfig, {model.model_id: model})
        neighbours = ShardStore(here.clock, expiry_s=600)
        settings = NetworkSettings.of(config, secure.KEY.node_id, "test", "127.0.0.1")
        reach = Reach(["home0"], "127.0.0.1", here.interfaces)
        network = Network(
            secure.KEY,
            paths,
            replace(settings, peering=replace(settings.peering, answers_at=reach)),
            neighbours,
            here.clock,
            NetworkHooks(Serving, print, lambda: None, lambda kind, fields: None),
            ResourceLedger(here.clock),
        )
        await network.start()
        own = here.own = CoordinationHere(
            config, secure.KEY.node_id, here.models, network, neighbours,
            here.look, here.events,
        )  # fmt: skip
        own.start()
        try:
            yield here
        finally:
            await own.stop()
            await network.stop()


@pytest.mark.slow
async def test_a_shard_is_ready_beside_files_on_the_disk_until_it_goes(tmp_path: Path) -> None:
    async with publishing(tmp_path, "kubernetes") as here:
        await here.shows("Pending", 1)
        here.serve("0-7")
        await here.shows("Ready", 2)
        conditions = {each["type"]: each["status"] for each in here.status["conditions"]}
        assert conditions == {"AllWorkersPublished": "True", "StabilityVerified": "True"}
        here.serve()
        await here.shows("Stale", 1)
        conditions = {each["type"]: each["status"] for each in here.status["conditions"]}
        assert conditions == {"AllWorkersPublished": "False", "StabilityVerified": "False"}
        assert here.own is not None
        question = ReadyQuestion(here.model.model_id, wait_s=30.0)
        waiting = asyncio.create_task(here.own.when_ready(question))
        here.serve("0-3")  # half of it
        await here.shows("Ready", 2)
        assert not waiting.done()
        here.serve("0-3", "4-7")
        async with asyncio.timeout(10):
            found = await waiting
        assert [each["layers"] for each in found["workers"]] == ["0-3", "4-7"]
        await here.shows("Ready", 3)


@pytest.mark.slow
async def test_all_that_is_held_is_at_the_address_that_this_machine_has_now(tmp_path: Path) -> None:
    async with publishing(tmp_path, "kubernetes") as here:
        here.serve("0-7")
        await here.shows("Ready", 2)
        here.addresses[:] = ["127.0.0.3"]

        async def has_followed() -> bool:
            assert here.own is not None
            (model,) = (await here.own.view())["models"]
            ends = {each["kind"]: each["endpoint"] for each in model["workers"]}
            return ends["shard"] == "wss://127.0.0.3:7701" and "127.0.0.3:" in ends["checkpoint"]

        await until(has_followed)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["kubernetes", "kubernetes-only"])
async def test_what_was_lost_in_an_outage_is_there_again_and_ready(
    tmp_path: Path, store: str
) -> None:
    async with publishing(tmp_path, store) as here:
        here.serve("0-7")
        await here.shows("Ready", 2)
        here.server.unavailable = True
        here.server.resources.clear()
        here.server.config_maps.clear()
        here.clock.time += 60.0
        await until(lambda: _has_failed(here))
        here.server.unavailable = False
        here.clock.time += 60.0  # far from the hour after which a shard says again that it is ready
        await here.shows("Ready", 2)


async def _has_failed(here: Here) -> bool:
    """Whether the node has heard of it: from then on it counts how long it leaves the store alone,
    with a clock that moves only here."""
    assert here.own is not None
    return not here.own.coordinator.state()["reachable"]


@pytest.mark.slow
async def test_what_the_records_refuse_is_said_once_and_keeps_nothing_back(tmp_path: Path) -> None:
    async with publishing(tmp_path, "kubernetes-only") as here:
        await here.shows("Pending", 1)
        store = KubernetesStore(here.server.namespace, here.kubeconfig, here.clock)
        await store.connect()
        place = WorkerPlace(
            secure.KEY.node_id, WorkerKind.SHARD, LayerRange.parse("0-7"), "wss://127.0.0.1:7701"
        )
        taken = worker(worker_rank(place), "0-7", holder="study")
        await store.publish(here.ref, [taken])
        here.serve("0-7", "4-7", "0-3")
        await here.shows("Initializing", 4)
        await here.looked_twice()
        warnings = here.events.warnings(99)
        assert len(warnings) == 1
        assert "already published by node study" in warnings[0]["message"]
        await store.close()


@pytest.mark.slow
async def test_a_disk_that_is_away_keeps_nothing_else_from_being_published(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.symlink_to("n" * 256)  # a name that no disk takes: looking there fails, as on a lost one
    name = ModelId("of-the-network")
    async with publishing(tmp_path, "kubernetes") as here:
        here.models[name] = replace(here.model, model_id=name, directory=str(away))
        await here.looked_twice()
        here.serve("0-7")
        await here.shows("Ready", 2)
