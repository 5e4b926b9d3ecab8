"""The layers that have to run at home (`routing.keep_first`, `keep_last`), loaded for this node.

Beside what the node serves: nobody else is told of these shards. What cannot be loaded is tried
again, and said in `lacking`. Also loaded here, once: small spans that others are checked by.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.api.services import Lack, LackKind
from mesh.clock import backoff_s, set_by
from mesh.config import Config
from mesh.discovery.advertisement import Advertisement
from mesh.errors import MeshError, NotEnoughMemory, as_mesh_error
from mesh.models.local import LocalModel, require_within
from mesh.models.manifest import read_manifest
from mesh.models.partial import read_partial, require_present
from mesh.node import wiring
from mesh.processes.tasks import end, spawn
from mesh.routing.cover import home_layers
from mesh.shard.local_shard import LocalShard
from mesh.shard.several_devices import ShardHost
from mesh.types import LayerRange, ModelId, ShardId, shard_id

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0


async def load_at_home(
    config: Config, model: LocalModel, layers: LayerRange, host: ShardHost
) -> LocalShard:
    """These layers, for this node alone. Raises NotEnoughMemory and what loading raises."""
    limit_mb = config.distributed.host.shard_max_vram_mb
    require_within(model, limit_mb, layers)
    name = shard_id(model.model_id, layers)
    if name not in host.private and name not in host.shards:
        # What fails to load is left alone for a while, also once a deployment has fetched it.
        await asyncio.to_thread(_require_here, Path(model.directory), layers)
    return await host.ensure(wiring.shard(config, model, layers))


def _require_here(directory: Path, layers: LayerRange) -> None:
    """Raise WeightsMissing where they are not in a partial checkpoint. Blocks."""
    if directory.is_dir() and read_partial(directory) is not None:
        require_present(read_manifest(directory).layer_tensors(layers))


class HomeLayers:
    """`start`, then `look` whenever the shard process may have lost something, then `stop`."""

    def __init__(
        self,
        config: Config,
        models: Sequence[LocalModel],
        host: ShardHost,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._host = host
        self._on_change = on_change
        self._wanted: dict[ShardId, tuple[LocalModel, LayerRange]] = {}
        self._errors: dict[ShardId, MeshError] = {}
        self._tries: dict[ShardId, tuple[int, float]] = {}
        """Of what did not load: how often it was tried in vain, and when it is tried again."""
        self._judges_mb: dict[ShardId, int] = {}
        self._judging = asyncio.Lock()
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_started = False
        for model in models:
            self.add(model)

    def start(self) -> None:
        """Begin to load, as soon as there is anything to load."""
        self._is_started = True
        if self._wanted and self._task is None:
            self._task = spawn(self._keep(), "keep layers at home")

    def add(self, model: LocalModel) -> None:
        """This node asks the model from now on, so that some of it may have to be here."""
        routing = self._config.routing
        kept = routing.keep_first, routing.keep_last
        for layers in home_layers(model.total_layers, *kept, model.cuts):
            if model.layers is None or not model.layers.covers(layers):
                name = shard_id(model.model_id, layers)
                self._wanted[name] = model, layers
                self._tries.pop(name, None)
        if self._is_started:
            self.start()
            self.look()

    def remove(self, model_id: ModelId) -> None:
        """This node asks the model no longer."""
        gone = [name for name, (model, _) in self._wanted.items() if model.model_id == model_id]
        for name in gone:
            del self._wanted[name]
            self._errors.pop(name, None)
            self._tries.pop(name, None)

    async def stop(self) -> None:
        """Load no more."""
        await end([self._task])

    def look(self) -> None:
        """The shard process may have ended."""
        self._due.set()

    async def judge(self, model: LocalModel, layers: LayerRange) -> LocalShard:
        """Layers that other nodes are checked by. Raises NotEnoughMemory when they, with those
        loaded for that before, are too many.

        Only where the shard process runs anyway: a node told to hold no layers is left alone.
        """
        name = shard_id(model.model_id, layers)
        async with self._judging:  # two at once would both fit
            here = self._host.private
            loaded = {key: mb for key, mb in self._judges_mb.items() if key in here}
            loaded.setdefault(name, model.layers_mb * len(layers) // model.total_layers)
            limit_mb = self._config.distributed.spot_check_home_mb
            if not self._host.is_to_run or sum(loaded.values()) > limit_mb:
                raise NotEnoughMemory(
                    f"layers {layers} of {model.model_id} are not loaded only to check others.",
                    fix="Hold layers on this node, or raise spot_check_home_mb.",
                )
            hosted = await load_at_home(self._config, model, layers, self._host)
            self._judges_mb = loaded
            return hosted

    def shards(self, model_id: ModelId) -> list[Advertisement]:
        """Those of the model that are loaded, for this node's own routes."""
        loaded = self._host.private_serving
        here = [loaded[name] for name in self._wanted if name in loaded]
        return [
            Advertisement(hosted.descriptor, hosted.health)
            for hosted in here
            if hosted.descriptor.model_id == model_id
        ]

    def lacking(self) -> list[Lack]:
        """What has to run here and is not loaded, with the reason where one is known."""
        return [
            Lack(
                LackKind.FAILED if name in self._errors else LackKind.LOADING,
                f"{name} has to run on this machine and {self._errors.get(name, 'is loading')}",
            )
            for name in self._missing()
        ]

    def _missing(self) -> list[ShardId]:
        """What has to run here, and is neither loaded for this node alone nor served."""
        here = self._host.private | self._host.shards
        return [name for name in self._wanted if name not in here]

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._due.clear()
            missing = self._missing()
            now = [name for name in missing if self._tries.get(name, (0, 0.0))[1] <= loop.time()]
            for name in now:
                await self._load(name)
            if now:
                self._on_change()
            tries = (self._tries[name] for name in missing if name in self._tries)
            next_at = min((at for _, at in tries), default=float("inf"))
            await set_by(self._due, min(next_at, loop.time() + _LAST_RETRY_S))

    async def _load(self, name: ShardId) -> None:
        if name not in self._wanted:
            return  # taken back while another was loaded
        model, layers = self._wanted[name]
        loading = load_at_home(self._config, model, layers, self._host)
        try:
            await as_mesh_error(loading, f"loading {name}")
            self._errors.pop(name, None)
            self._tries.pop(name, None)
        except MeshError as error:
            if name not in self._errors:
                logger.warning("%s has to run on this machine: %s", name, error)
            self._errors[name] = error
            count = self._tries.get(name, (0, 0.0))[0] + 1
            wait_s = backoff_s(count, _FIRST_RETRY_S, _LAST_RETRY_S)
            self._tries[name] = count, asyncio.get_running_loop().time() + wait_s
