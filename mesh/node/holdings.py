"""What this node holds, as processes: the shards it serves, and an asker for each model.

Models and layers come and go while it runs. Who decides that is another's business: the
configuration at the start, then `mesh.deployments`. Part of the composition root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mesh.capacity import named_devices
from mesh.config import Config
from mesh.deployments.weights import OnProgress
from mesh.errors import BadRequest, WeightsDamaged, WeightsMismatch
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsMaterial
from mesh.models.local import LocalModel
from mesh.node import wiring
from mesh.node.held_models import HeldModels
from mesh.node.home_layers import HomeLayers, load_at_home
from mesh.pipeline.supervisor import AskerOwner, AskerSupervisor
from mesh.processes.tasks import end, spawn
from mesh.shard.commands import KeepResident, ShardRequest
from mesh.shard.local_shard import LocalShard
from mesh.shard.several_devices import SeveralDevices, ShardHost
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId, RouteHop, ShardId

_LOOK_EVERY_S = 0.2


def by_hand(
    config: Config, models: Iterable[LocalModel], devices: Sequence[str]
) -> list[list[ShardRequest]]:
    """What each device serves because the configuration names it: of each range of layers an even
    part on those of the first one's kind, as nobody knows yet what fits where."""
    served: list[list[ShardRequest]] = [[] for _ in devices]
    kinds = [device.partition(":")[0] for device in devices]
    alike = [number for number, kind in enumerate(kinds) if kind == kinds[0]]
    for model in models:
        layers = model.layers
        if layers is None:
            continue
        for device, part in zip(alike, model.cuts.parts(layers, len(alike)), strict=False):
            served[device].append(wiring.shard(config, model, part))
    return served


def _host(
    devices: Sequence[str], served: Sequence[Sequence[ShardRequest]], changed: Callable[[], None]
) -> ShardHost:
    if len(devices) == 1:
        return ShardSupervisor(None, served[0], changed)
    return SeveralDevices(
        {
            device: ShardSupervisor(None, requests, changed, device=device)
            for device, requests in zip(devices, served, strict=True)
        }
    )


class Holdings:
    """`start`, then `stop`; in between models and layers are added and dropped."""

    def __init__(
        self,
        config: Config,
        key: NodeKey,
        models: Iterable[LocalModel],
        owner: AskerOwner,
        tls: Callable[[], Awaitable[TlsMaterial]],
    ) -> None:
        """`tls` is what processes that start now prove themselves with."""
        self.models = HeldModels(models)
        self.askers: dict[ModelId, AskerSupervisor] = {}
        named = list(self.models.values())
        devices = named_devices(config.device)
        served = by_hand(config, named, devices)
        self.by_hand = frozenset(request.shard_id for some in served for request in some)
        """The shards that the configuration names."""
        self.host = _host(devices, served, owner.asker_changed)
        self.home = HomeLayers(config, named, self.host, self.push_shards)
        self._config = config
        self._key = key
        self._owner = owner
        self._tls = tls
        self._resident: dict[str, tuple[int | None, tuple[ShardId, ...]]] = {}
        """Which process of each device was told last that the weights of which shards stay."""
        self.is_started = False
        """Whether its processes know where they are to listen."""
        self._replacing: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> None:
        """Start what the configuration names; shards listen at `address`."""
        tls = await self._tls()
        for device, process in self.host.processes.items():
            process.first_command = wiring.start_shards(
                self._config, self._key, address, tls, device
            )
            if process.wanted:
                process.start()
        self.is_started = True
        self.home.start()
        for model in self.models.values():
            self._start_asker(model, tls)

    async def stop_asking(self) -> None:
        """End all askers."""
        await end(self._replacing)
        await asyncio.gather(*(asker.stop() for asker in self.askers.values()))

    # What comes and goes

    async def serve(
        self,
        model_id: ModelId,
        layers: LayerRange,
        *,
        quant: str,
        context: int,
        device: str,
        on_progress: OnProgress,
        copy: int = 0,
    ) -> LocalShard:
        """Serve these layers of a model whose files are here. Raises what loading raises.

        `device` is the one to load them on where they are on none yet, '' for any; which `copy` of
        them it is counts from 0. `quant` is the
        number format and `context` the positions of its cache, '' and 0 for what the configuration
        says. `on_progress` is told how far the load is, without a rate.
        """
        request = replace(wiring.shard(self._config, self._model(model_id), layers), copy=copy)
        if quant:
            request = replace(request, quant=quant)
        if context:
            tokens = max(context, request.settings.kv_tokens)
            request = replace(request, settings=replace(request.settings, kv_tokens=tokens))
        name = request.shard_id
        telling = spawn(self._tell_load(name, on_progress), f"progress of loading {name}")
        try:
            if isinstance(self.host, SeveralDevices):
                return await self.host.serve(request, device)
            return await self.host.serve(request)
        finally:
            await end([telling])

    async def unserve(self, shard: ShardId) -> int:
        """Serve a shard no longer: sessions get `drain_seconds` to move, then its memory is given
        back. Returns how many sessions were ended. Raises InternalError."""
        return await self.host.drop(shard, self._config.distributed.host.drain_seconds)

    def distrust(self, weights_sha256: str) -> None:
        """Load the shards and ends of a checkpoint anew whose files had changed and are right
        again: what was made of them may be of before that."""
        for name, shard in {**self.host.shards, **self.host.private}.items():
            if shard.descriptor.weights_sha256 == weights_sha256:
                error = WeightsDamaged(
                    f"{name} was withdrawn: files that it was loaded from had changed.",
                    fix="It is loaded again by itself, as they were fetched again.",
                )
                self.host.distrust(name, error)
        for model_id in self.askers:
            if self.models[model_id].weights_sha256 == weights_sha256:
                work = self._ask_anew(model_id)
                spawn(work, f"load the ends of {model_id} again", among=self._replacing)

    def keep_resident(self, shards: Collection[ShardId]) -> None:
        """Have the weights of exactly these stay on the device, used or not. A process that was
        started anew is told again."""
        for device, process in self.host.processes.items():
            told = process.pid, tuple(sorted(shards))
            if told == self._resident.get(device) or not process.is_up:
                continue
            if process.tell(KeepResident(told[1])):
                self._resident[device] = told

    async def ask(self, model: LocalModel) -> None:
        """Ask this model from now on, whose ends are on this disk, in its number format: who asks
        in another one begins anew. What the configuration names has the configuration's. Raises
        WeightsMismatch when another checkpoint is held by its name."""
        if self.asks(model.model_id, model.weights_sha256) and not self.asks(
            model.model_id, model.weights_sha256, model.quant
        ):
            await self.ask_no_more(model.model_id, forget=False)
        tls = None if model.model_id in self.askers else await self._tls()
        # Nothing is waited for from here on: of two who ask at once each would start an asker.
        known = self.models.get(model.model_id)
        if known is not None and known.weights_sha256 != model.weights_sha256:
            raise WeightsMismatch(
                f"{known.directory} is held here as {model.model_id}, with other weights.",
                fix="Hold it by another name (--model PATH=ID), or deploy those weights.",
            )
        if model.model_id not in self.models.by_hand:
            self.models.put(model)
        if tls is not None and model.model_id not in self.askers:
            self._start_asker(model, tls)
            self.home.add(model)

    def asks(self, model_id: ModelId, weights_sha256: str, quant: str | None = None) -> bool:
        """Whether this node asks these weights, in this number format where one is given."""
        known = self.models.get(model_id) if model_id in self.askers else None
        if known is None or known.weights_sha256 != weights_sha256:
            return False
        return quant in (None, known.quant) or model_id in self.models.by_hand

    async def ask_no_more(self, model_id: ModelId, *, forget: bool = True) -> None:
        """Ask this model no longer; running answers get `drain_seconds` to end. Unless it is to be
        forgotten, it still is a model of this node. Nothing happens to what the configuration
        names."""
        if model_id in self.models.by_hand:
            return
        asker = self.askers.pop(model_id, None)
        if forget:
            self.models.drop(model_id)
        self.home.remove(model_id)
        if asker is not None:
            await self._end_asker(asker)

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        """Load the whole model here: hops over all its layers. Raises MeshError."""
        model = self._model(model_id)
        whole = LayerRange(0, model.total_layers)
        hosted = await load_at_home(self._config, model, whole, self.host)
        return [RouteHop(hosted.descriptor, whole)]

    async def load_judge(self, model_id: ModelId, layers: LayerRange) -> RouteHop:
        """Load these layers here, to check others by: a hop over them. Raises MeshError."""
        hosted = await self.home.judge(self._model(model_id), layers)
        return RouteHop(hosted.descriptor, layers)

    # What all processes are told

    def trust(self, users: tuple[bytes, ...], revoked: list[str]) -> None:
        """These members may use what is here, and these tokens hold no longer."""
        self.host.trust(users)
        self.host.revoke_tokens(revoked)
        for asker in self.askers.values():
            asker.trust(users)
            asker.push_shards()

    def push_shards(self) -> None:
        """Tell the askers who serves what now."""
        for asker in self.askers.values():
            asker.push_shards()

    def try_again(self) -> None:
        """Load what did not load, whatever happened when that was tried."""
        self.host.try_again()
        for asker in self.askers.values():
            asker.try_again()

    def accounts(self) -> list[dict[str, Any]]:
        """Who holds what in each process."""
        askers = [{**asker.report.accounts, "where": name} for name, asker in self.askers.items()]
        return [*self.host.health.accounts, *askers]

    @property
    def is_used(self) -> bool:
        """Whether somebody asks here or is served."""
        if any(asker.is_busy for asker in self.askers.values()):
            return True
        return any(shard.health.active_streams for shard in self.host.serving)

    def why_disabled(self, model_id: ModelId) -> str | None:
        """Why this model cannot be run, when that is because the mesh is switched off."""
        if self._config.is_distributed:
            return None
        local = self.models.get(model_id)
        served = [shard.descriptor.layers for shard in self.host.serving]
        if local is None or not LayerRange(0, local.total_layers).lacking(served):
            return None
        return f"distributed inference is switched off and {model_id} is not held here as a whole."

    # Private

    async def _tell_load(self, name: ShardId, on_progress: OnProgress) -> None:
        while True:
            for process in self.host.processes.values():
                load = process.load()
                if load is not None and load["name"] == name and load["total_bytes"]:
                    on_progress(load["done_bytes"], load["total_bytes"], 0.0, "")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _model(self, model_id: ModelId) -> LocalModel:
        model = self.models.get(model_id)
        if model is None:
            raise BadRequest(f"{model_id} is not held here.", fix="See `hearthnet models`.")
        return model

    async def _ask_anew(self, model_id: ModelId) -> None:
        """Who asks from now on is answered by another process than those who have asked."""
        tls, before = await self._tls(), self.askers.get(model_id)
        if before is not None:
            self._start_asker(self._model(model_id), tls)
            before.is_followed = True
            await self._end_asker(before)

    async def _end_asker(self, asker: AskerSupervisor) -> None:
        """Its running answers get `drain_seconds` to end."""
        try:
            async with asyncio.timeout(self._config.distributed.host.drain_seconds):
                while asker.is_busy:  # noqa: ASYNC110 - it says so every now and then
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            pass
        finally:
            await asker.stop()

    def _start_asker(self, model: LocalModel, tls: TlsMaterial) -> None:
        asker = AskerSupervisor(
            wiring.start_asker(self._config, self._key, model, tls), self._owner
        )
        self.askers[model.model_id] = asker
        asker.start()
