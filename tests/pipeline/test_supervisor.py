"""The daemon's side of an asker process; the process is real."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mesh.config import Config
from mesh.errors import (
    DeviceLost,
    InternalError,
    LinkLost,
    MeshError,
    ModelNotFound,
    NodeStopped,
    NotEnoughMemory,
)
from mesh.health.series import HopSteps
from mesh.identity.tls import TlsMaterial
from mesh.models.builtin import checkpoint_dir
from mesh.models.local import LocalModel
from mesh.node.wiring import start_asker
from mesh.pipeline.commands import Generate, Offer, RoutableShards, StartAsker
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.processes.lifecycle import SilenceLimits
from mesh.processes.memory_budget import MemoryCaps
from mesh.processes.messages import ProcessMessage, Request
from mesh.types import GenerationRequest, LayerRange, ModelId, RouteHop, SamplingParams
from tests import secure
from tests.test_formats import advertised
from tests.waiting import until

MODEL = ModelId("builtin")
TIMEOUT_S = 60.0
REQUEST = GenerationRequest("r", MODEL, prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=4))


class Owner:
    """A daemon that knows no shards, unless told."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []

    def routable(self, model_id: ModelId) -> list[Offer]:
        return self.offers

    def asker_changed(self) -> None:
        pass

    def stepped(self, answered: HopSteps) -> None:
        pass

    def asker_event(self, event: dict[str, Any]) -> None:
        pass

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        raise NotImplementedError

    async def load_judge(self, model_id: ModelId, layers: LayerRange) -> RouteHop:
        raise NotImplementedError


@pytest.fixture
def start(tmp_path: Path) -> StartAsker:
    model = LocalModel(MODEL, str(checkpoint_dir()), "", 8, None, None)
    config = Config(state_dir=tmp_path, threads=1)
    start = start_asker(config, secure.KEY, model, TlsMaterial.of(secure.KEY, []))
    options = replace(start.options, cache_dir=tmp_path)
    settings = replace(start.settings, cache_dir=str(tmp_path))
    return structs.replace(start, options=options, settings=settings)


class Overheard(AskerSupervisor):
    """Of a process that may be there or not: what it is told is written down."""

    def __init__(self, start: StartAsker, owner: Owner) -> None:
        super().__init__(start, owner)
        self.is_there = True
        self.told: list[ProcessMessage] = []

    def send(self, message: ProcessMessage) -> None:
        if not self.is_there:
            raise LinkLost("it is gone.", fix="Wait.")
        is_request = isinstance(message, Request)
        self.told.append(structs.replace(message, number=0) if is_request else message)


async def test_an_asker_knows_all_shards_and_is_told_of_them_once(start: StartAsker) -> None:
    owner = Owner()
    asker = Overheard(start, owner)

    def told() -> list[ProcessMessage]:
        for _ in range(2):
            asker.push_shards()
        found, asker.told = asker.told, []
        return found

    asker.on_started()
    assert told() == [structs.replace(start, shards=())]
    owner.offers = here = [Offer(advertised(None))]
    assert told() == [RoutableShards((*here,))]
    owner.offers = []
    asker.on_started()
    assert told() == [structs.replace(start, shards=())]
    asker.is_there, owner.offers = False, here
    assert told() == []
    asker.is_there = True
    assert told() == [RoutableShards((*here,))], "the one before this was told, not this one"


async def test_who_waits_for_an_asker_that_is_to_stop_hears_that(start: StartAsker) -> None:
    asker = Overheard(start, Owner())
    assert not asker.is_busy
    waiting = [
        asyncio.ensure_future(each)
        for each in (asker.wait_ready(), anext(asker.generate(REQUEST)), asker.lens(REQUEST, 1))
    ]
    await asyncio.sleep(0)
    assert asker.is_busy, "nobody is to stop it meanwhile"
    await asker.stop()
    async with asyncio.timeout(5):
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [ModelNotFound] * 3
    assert not asker.is_busy
    with pytest.raises(ModelNotFound):
        await asker.wait_ready()


@pytest.mark.parametrize(("is_followed", "said"), [(False, ModelNotFound), (True, NodeStopped)])
async def test_whose_answer_has_not_ended_when_its_asker_is_to_stop_hears_that(
    start: StartAsker, *, is_followed: bool, said: type[MeshError]
) -> None:
    asked = asyncio.Event()

    class Slow(Owner):
        async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
            asked.set()
            await asyncio.Event().wait()
            return []

    asker = AskerSupervisor(start, Slow())
    asker.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asker.wait_ready()
            waiting = asyncio.ensure_future(anext(asker.generate(REQUEST)))
            await asked.wait()
            asker.is_followed = is_followed
            await asker.stop()
            with pytest.raises(said):
                await waiting
    finally:
        await asker.stop()


async def test_an_asker_knows_what_whoever_asks_has_seen(start: StartAsker) -> None:
    told: list[type[ProcessMessage]] = []

    class Listened(AskerSupervisor):
        def send(self, message: ProcessMessage) -> None:
            told.append(type(message))
            super().send(message)

    owner = Owner()
    alone = replace(start.settings, fallback_to_local=False)
    asker = Listened(structs.replace(start, settings=alone), owner)
    asker.start()
    try:
        await asker.wait_ready()
        owner.offers = [Offer(advertised(None))]
        with pytest.raises(MeshError):  # nobody is at that address
            async for _ in asker.generate(REQUEST):
                pass
    finally:
        await asker.stop()
    assert told.index(RoutableShards) < told.index(Generate)


async def test_a_process_that_stands_still_is_replaced_and_an_idle_one_is_not(
    start: StartAsker,
) -> None:
    limits = SilenceLimits(suspect_s=2.0, replace_s=4.0)
    asker = AskerSupervisor(start, Owner(), limits)
    asker.start()
    try:
        await asker.wait_ready()
        stuck = asker.pid
        assert stuck is not None
        await asyncio.sleep(5.0)  # there is no event for what does not happen
        assert asker.pid == stuck
        assert asker.is_ready
        os.kill(stuck, signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(InternalError, match="stopped answering"):
                await anext(asker.generate(REQUEST))
            assert not asker.is_ready
            await asker.wait_ready()
        assert asker.pid != stuck
    finally:
        await asker.stop()


async def test_a_process_whose_device_does_nothing_more_ends_itself_and_is_replaced(
    start: StartAsker,
) -> None:
    settings = replace(start.settings, activation_dtype="fp32", cache_dir="")
    start = structs.replace(start, settings=settings)
    asker = AskerSupervisor(start, Owner(), module="tests.pipeline.doomed_asker")
    asker.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asker.wait_ready()
            first = asker.pid
            with pytest.raises(InternalError, match="device-side assert triggered"):
                await anext(asker.generate(REQUEST))
            await asker.wait_ready()
        assert asker.pid != first
        assert asker.ending is not None
        assert isinstance(asker.ending.said, DeviceLost)
    finally:
        await asker.stop()


async def test_why_a_process_without_room_for_its_ends_is_replaced_is_said(
    start: StartAsker, tmp_path: Path
) -> None:
    options = replace(start.options, caps=MemoryCaps(tmp_path / "claims", "1 MiB"))
    asker = AskerSupervisor(structs.replace(start, options=options), Owner())
    asker.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(NotEnoughMemory):
                await asker.wait_ready()
            await until(lambda: asker.ending is not None)
        assert "the ends of builtin" in str(asker.ending)
    finally:
        await asker.stop()


async def test_ends_that_fail_in_a_way_nobody_foresaw_are_reported(
    start: StartAsker, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(shutil.copytree, checkpoint_dir(), tmp_path / "odd")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # panics
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    asker = AskerSupervisor(structs.replace(start, directory=directory), Owner())
    asker.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(InternalError, match="precompiled_charsmap"):
                await asker.wait_ready()
        assert not asker.is_ready
    finally:
        await asker.stop()
