"""What all devices of this node hold and how fast they are, each looked after by itself.

Cores that were named apart (``cpu:0-3``) have a part of main memory each, by their number; a card
has its own. Part of the composition root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from mesh.capacity import Capacity, cores_of, named_devices
from mesh.config import Config
from mesh.node import wiring
from mesh.node.own_capacity import OwnCapacity, OwnHooks
from mesh.node.served_speed import AskedTimes
from mesh.paths import capacity_dir
from mesh.processes.memory_budget import CappedMemory
from mesh.shard.several_devices import ShardHost


class OwnDevices:
    """`start`, then `stop`; what is asked of an asker's device is asked of the first."""

    def __init__(self, config: Config, host: ShardHost, hooks: OwnHooks) -> None:
        """`hooks` are those of a node with one device; of several each has its own shards and
        memory."""
        names = named_devices(config.device)
        own = [hooks] if len(names) == 1 else [_of(name, names, host, hooks) for name in names]
        self._each = [
            OwnCapacity(wiring.measure(config, name), capacity_dir(), its)
            for name, its in zip(names, own, strict=True)
        ]

    def start(self) -> None:
        """Begin to look."""
        for each in self._each:
            each.start()

    async def stop(self) -> None:
        """Look no more."""
        await asyncio.gather(*(each.stop() for each in self._each))

    def now(self) -> Capacity | None:
        """The devices of which something is known; None before any is."""
        known = [said for each in self._each if (said := each.now()) is not None]
        if not known:
            return None
        return replace(known[0], devices=tuple(d for said in known for d in said.devices))

    def free_mb(self) -> dict[str, int]:
        """What is free on each device of which that is known."""
        said = self.now()
        devices = () if said is None else said.devices
        return {device.name: device.free_bytes >> 20 for device in devices}

    def asker_ms(self) -> float:
        """See `OwnCapacity.asker_ms`."""
        return self._each[0].asker_ms()

    @property
    def asked(self) -> AskedTimes:
        """What answers have told of tokens that were asked for here."""
        return self._each[0].asked

    @property
    def cap(self) -> CappedMemory | None:
        """What the owner gives of the first device's memory."""
        return self._each[0].cap


def _of(name: str, names: Sequence[str], host: ShardHost, hooks: OwnHooks) -> OwnHooks:
    process = host.processes[name]
    return replace(
        hooks,
        memory=lambda: process.health.memory,
        shards=lambda: [each for each in hooks.shards() if each.descriptor.device == name],
        main_share=_main_share(name, names),
    )


def _main_share(name: str, names: Sequence[str]) -> float:
    """What of main memory a part of the processor has, 0 to 1."""
    cores = {each: len(cores_of(each) or ()) for each in names}
    return cores[name] / sum(cores.values()) if cores[name] else 1.0
