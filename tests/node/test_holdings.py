"""What a node says of the layers that it loads to serve."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mesh.accounts.allowances import DAEMON
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.deployments.phases import Phase, PhaseProgress, Phases
from mesh.deployments.wishes import Deployment
from mesh.discovery.directory import ShardStore
from mesh.errors import BadCheckpoint, Busy, NodeStopped, NoRoute
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.identity.tls import TlsMaterial
from mesh.models.builtin import checkpoint_dir
from mesh.models.cuts import Cuts
from mesh.models.local import LocalModel
from mesh.node.deploying import House
from mesh.node.holdings import Holdings, by_hand
from mesh.node.wiring import start_asker
from mesh.paths import StatePaths
from mesh.pipeline.askers import Askers
from mesh.pipeline.entrance import Entrance
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.shard.commands import ShardRequest
from mesh.shard.local_shard import LocalShard
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import (
    THIS_NODE,
    GenerationRequest,
    LayerRange,
    ModelId,
    NodeId,
    Queued,
    RouteHop,
    ShardId,
)
from tests import secure
from tests.deployments.test_waking import WISH
from tests.pipeline.test_entrance import as_it_is, no_steps
from tests.pipeline.test_supervisor import REQUEST, Owner
from tests.simulation.virtual_loop import run_virtually
from tests.waiting import until

MODEL = LocalModel(ModelId("toy"), "/nowhere", "ab" * 32, 4, None, None, 40)
SHARD = ShardId("toy:2-3")
FAR = ((0, 0), (10, 40), (30, 40))
"""Bytes done, of how many; before anything is read it is not known of how many."""


def test_what_is_held_by_hand_is_cut_over_the_devices_of_the_first_one_s_kind() -> None:
    models = [replace(MODEL, layers=LayerRange(0, 4)), replace(MODEL, layers=LayerRange(3, 4))]
    devices = ("cuda:1", "cpu", "cuda:0", "cuda:2")
    served = by_hand(Config(), models, devices)
    assert [[str(request.layers) for request in some] for some in served] == [
        ["0-0", "3-3"], [], ["1-1"], ["2-3"],
    ]  # fmt: skip
    (alone,) = by_hand(Config(), models, ("auto",))
    assert [str(request.layers) for request in alone] == ["0-3", "3-3"]
    tied = replace(MODEL, layers=LayerRange(0, 4), cuts=Cuts(frozenset({1, 2})))
    served = by_hand(Config(), [tied], devices)
    assert [[str(request.layers) for request in some] for some in served] == [
        ["0-2"], [], ["3-3"], [],
    ]  # fmt: skip


class SlowHost(ShardSupervisor):
    """A shard process that is in the middle of one load after the other, and serves nothing."""

    def __init__(self) -> None:
        super().__init__(None, (), lambda: None)
        self._now = ("", 0, 0)

    def load(self) -> dict[str, Any]:
        name, done, total = self._now
        return {"name": name, "done_bytes": done, "total_bytes": total}

    async def serve(self, request: ShardRequest) -> LocalShard:
        another = ("toy:0-1", 5, 9)
        for now in (another, *((request.shard_id, *far) for far in FAR)):
            self._now = now
            await asyncio.sleep(0.5)
        raise Busy("It is full.", fix="Wait.")


async def tls() -> TlsMaterial:
    return TlsMaterial.of(secure.KEY, [])


async def test_a_model_that_is_asked_twice_at_once_has_one_asker() -> None:
    config = await asyncio.to_thread(Config)
    material = await tls()
    waiting: list[asyncio.Future[TlsMaterial]] = []

    async def waits() -> TlsMaterial:
        waiting.append(asyncio.get_running_loop().create_future())
        return await waiting[-1]

    held = Holdings(config, secure.KEY, [], Owner(), waits)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(held.start("127.0.0.1"))
        await asyncio.sleep(0)
        waiting.pop().set_result(material)
    try:
        first, second = (asyncio.create_task(held.ask(MODEL)) for _ in range(2))
        await asyncio.sleep(0)
        waiting[0].set_result(material)
        await first
        asker = held.askers[MODEL.model_id]
        waiting[1].set_result(material)
        await second
        assert held.askers == {MODEL.model_id: asker}
    finally:
        await held.stop_asking()
        await held.home.stop()


class Slow(Owner):
    """A daemon that takes its time to say that it has no room for a model."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = asyncio.Event(), asyncio.Event()

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        self.asked.set()
        await self.told.wait()
        raise Busy("It is full.", fix="Wait.")


async def test_ends_whose_files_were_repaired_are_loaded_again_for_who_asks_from_now_on(
    tmp_path: Path,
) -> None:
    """Who has asked goes on with the process that it asked."""
    config = await asyncio.to_thread(Config, state_dir=tmp_path, threads=1)
    builtin = LocalModel(ModelId("builtin"), str(checkpoint_dir()), "ab" * 32, 8, None, None)
    held = Holdings(config, secure.KEY, [builtin], owner := Slow(), tls)
    await held.start("127.0.0.1")
    try:
        before = held.askers[builtin.model_id]
        running = asyncio.create_task(anext(before.generate(REQUEST)))
        async with asyncio.timeout(60):
            await owner.asked.wait()
            held.distrust("cd" * 32)
            held.distrust(builtin.weights_sha256)
            await until(lambda: held.askers[builtin.model_id] is not before)
            await held.askers[builtin.model_id].wait_ready()
            assert before.is_ready
            owner.told.set()
            with pytest.raises(NoRoute):
                await running
            await until(lambda: before.pid is None)
        assert held.askers[builtin.model_id].is_ready
    finally:
        await held.stop_asking()
        await held.home.stop()


async def test_a_model_whose_ends_did_not_load_is_asked_which_says_why() -> None:
    config = await asyncio.to_thread(Config)
    held = Holdings(config, secure.KEY, [MODEL], Owner(), tls)
    alone, store = cast("Network", None), ShardStore(SystemClock(), expiry_s=9.0)
    house = House(config, NodeId("me"), held, alone, store, lambda model: False)
    start = start_asker(config, secure.KEY, MODEL, TlsMaterial.of(secure.KEY, []))
    asker = held.askers[MODEL.model_id] = AskerSupervisor(start, Owner())
    assert not house.is_askable(MODEL.model_id)
    asker.on_failed(BadCheckpoint("It has no head.", fix="Fetch it anew."))
    assert house.is_askable(MODEL.model_id)
    with pytest.raises(BadCheckpoint):
        await asker.wait_ready()


async def test_a_model_is_in_use_while_somebody_waits_at_the_entrance_to_ask_it() -> None:
    config = await asyncio.to_thread(Config)
    held = Holdings(config, secure.KEY, [MODEL], Owner(), tls)
    alone, store = cast("Network", None), ShardStore(SystemClock(), expiry_s=9.0)
    start = start_asker(config, secure.KEY, MODEL, TlsMaterial.of(secure.KEY, []))
    held.askers[MODEL.model_id] = AskerSupervisor(start, Owner())
    counts, entrance = LiveCounts(SystemClock(), lambda: None), Entrance(1, 5, 8)
    house = House(config, NodeId("me"), held, alone, store, counts.awaits)
    askers = Askers(
        held.askers, entrance=entrance, why_disabled=lambda model: None, prepared=as_it_is,
        on_frame=lambda frame: None, counts=counts, bring_up=no_steps,
    )  # fmt: skip
    async for _ in entrance.enter("who asks another model", THIS_NODE):
        pass
    wish = replace(WISH, model_id=MODEL.model_id, weights_sha256=MODEL.weights_sha256)
    deployment = Deployment(wish, None, "", NodeId("me"), 0)
    asked = askers.generate(GenerationRequest("r", MODEL.model_id))
    async with contextlib.aclosing(asked) as frames:
        assert not house.use(deployment).is_busy
        assert await anext(frames) == Queued(1)
        assert house.use(deployment).is_busy
    assert not house.use(deployment).is_busy


def test_how_far_a_load_is_is_told_while_it_lasts() -> None:
    config = Config()

    async def main() -> None:
        held = Holdings(config, secure.KEY, [MODEL], Owner(), tls)
        held.host = SlowHost()
        phases, told = Phases(lambda *_: None), list[PhaseProgress | None]()
        phases.put(SHARD, Phase.DEPLOYING)

        def on_progress(done: int, total: int, bytes_per_s: float, note: str) -> None:
            phases.bytes(SHARD, done, total, bytes_per_s)
            told.append(phases.get(SHARD))

        with pytest.raises(Busy):
            await held.serve(
                MODEL.model_id,
                LayerRange(2, 4),
                quant="",
                context=0,
                device="",
                on_progress=on_progress,
            )
        assert list(dict.fromkeys(told)) == [PhaseProgress(Phase.DEPLOYING, *d) for d in FAR[1:]]
        count = len(told)
        await asyncio.sleep(0.5)
        assert len(told) == count

    run_virtually(main)


async def test_who_wishes_while_the_node_is_stopped_hears_that(tmp_path: Path) -> None:
    switched_on = {"distributed_inference": {"enabled": True}}
    config = await asyncio.to_thread(
        Config, state_dir=tmp_path, interface=("127.0.0.1",), port=0, research=switched_on,
        policy={"research": {"enable": True}},
    )  # fmt: skip
    own, store = secure.KEY.node_id, ShardStore(SystemClock(), expiry_s=9.0)
    settings = NetworkSettings.of(config, own, "test", "127.0.0.1")
    hooks = NetworkHooks(Serving, *[lambda *told: None] * 3)
    paths = await asyncio.to_thread(StatePaths(tmp_path).create)
    accounts = ResourceLedger(SystemClock(), DAEMON)
    network = Network(secure.KEY, paths, settings, store, SystemClock(), hooks, accounts)
    await network.start()
    held = Holdings(config, secure.KEY, [MODEL], Owner(), tls)
    house = House(config, own, held, network, store, lambda model: False)
    wishing = asyncio.create_task(house.publish_wish(WISH))
    await asyncio.sleep(0)
    await network.stop()
    for late in (wishing, house.publish_wish(WISH)):
        with pytest.raises(NodeStopped):
            await late
