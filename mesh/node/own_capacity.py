"""What this node's own device holds and how fast it is: measured once per machine, then kept.

A process at the lowest priority measures, once nothing loads here; its result is kept for all nodes
of this user on this machine, until processor, device or torch is another. What is free is looked at
all the time. Part of the composition root.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mesh import codec
from mesh.capacity import Capacity, Device
from mesh.errors import DeviceFailed, LinkLost, MeshError
from mesh.models.hashing import read_cached, write_json_atomically
from mesh.processes.child import Child
from mesh.processes.headroom import Headroom, ram
from mesh.processes.messages import Alive, Handlers, Inbox, LastWords
from mesh.processes.tasks import end, spawn
from mesh.shard.commands import Measure, Measured, NotMeasured
from mesh.shard.room import Memory

logger = logging.getLogger(__name__)

VERSION = 1
"""Counts up when something else is measured."""

_MODULE = "mesh.shard.measuring"
_LOOK_EVERY_S = 10.0
_LIMIT_S = 120.0
_STOP_S = 5.0
_TRIES_AFTER_S = (5.0, 10.0, 30.0, 60.0, 60.0, 600.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Kept:
    """A measured device as it is written down; `machine` is what it holds for."""

    machine: str
    device: Device


@dataclass(frozen=True, slots=True)
class OwnHooks:
    """`memory` is what the shard process last said is free, None without one; `is_idle` whether
    nothing loads; `on_change` is told when speeds become known."""

    memory: Callable[[], Memory | None]
    is_idle: Callable[[], bool]
    on_change: Callable[[], None]


class OwnCapacity:
    """`start`, then `stop`; `now` is None until it is known."""

    def __init__(self, order: Measure, directory: Path, hooks: OwnHooks) -> None:
        self._order = order
        self._directory = directory
        self._hooks = hooks
        self._device: Device | None = None
        self._main: Headroom | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = spawn(self._run(), "own capacity")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            await end([self._task], _STOP_S)

    def now(self) -> Capacity | None:
        """The device, with what is free there."""
        device, main = self._device, self._main
        if device is None or main is None:
            return None
        memory = self._hooks.memory()
        if device.kind == "cpu":
            free_mb, total_mb = main.free_mb, main.total_mb
        elif memory is not None:
            free_mb, total_mb = memory.device.free_mb, memory.device.total_mb
        else:  # nothing of this node is loaded there
            return Capacity((device,))
        return Capacity((replace(device, free_bytes=free_mb << 20, total_bytes=total_mb << 20),))

    async def _run(self) -> None:
        machine = await asyncio.to_thread(_machine, self._order)
        path = self._directory / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
        self._device = await asyncio.to_thread(_read, path, machine)
        measuring = None
        if self._device is None:
            measuring = spawn(self._measure(path, machine), "measure capacity")
        try:
            while True:
                known = self.now() is not None
                with contextlib.suppress(OSError):  # what was known last has to do
                    self._main = await asyncio.to_thread(ram)
                if not known and self.now() is not None:
                    self._hooks.on_change()
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            if measuring is not None:
                await end([measuring], _STOP_S)

    async def _measure(self, path: Path, machine: str) -> None:
        for wait_s in _TRIES_AFTER_S:
            await asyncio.sleep(wait_s)
            if not self._hooks.is_idle():
                continue
            # Another node of this machine may have done it meanwhile.
            self._device = await asyncio.to_thread(_read, path, machine)
            try:
                if self._device is None:
                    device = await measured(self._order)
                    kept = codec.plain(Kept(machine, device))
                    await asyncio.to_thread(write_json_atomically, path, kept)
                    self._device = device
            except (MeshError, TimeoutError, OSError) as error:
                logger.warning("how fast this machine is was not measured: %s", error)
                continue
            self._hooks.on_change()
            return


async def measured(order: Measure) -> Device:
    """What a process of its own finds. Raises MeshError, TimeoutError."""
    found: asyncio.Future[Device] = asyncio.get_running_loop().create_future()

    def settle(answer: Measured) -> None:
        if not found.done():
            found.set_result(answer.device)

    def fail(error: MeshError) -> None:
        if not found.done():
            found.set_exception(error)

    inbox = Inbox(_answers(settle, fail))
    gone = DeviceFailed("The measuring process ended early.", fix="See the log.")
    child = await Child.start(
        _MODULE, name="measuring", on_message=inbox.read, on_closed=lambda: fail(gone)
    )
    try:
        with contextlib.suppress(LinkLost):  # then `on_closed` says so
            child.channel.send(order)
        async with asyncio.timeout(_LIMIT_S):
            return await found
    finally:
        if not found.done():
            found.cancel()
        await child.stop(_STOP_S)


def _answers(settle: Callable[[Measured], None], fail: Callable[[MeshError], None]) -> Handlers:
    return {
        Measured: settle,
        NotMeasured: lambda answer: fail(answer.error),
        LastWords: lambda answer: fail(answer.error),
        Alive: lambda _: None,
    }


def _machine(order: Measure) -> str:
    """What a measurement holds for, without importing what measures."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    accelerators = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    parts = (
        VERSION, platform.machine(), _processor(), cores, order.device, order.threads,
        accelerators, importlib.metadata.version("torch"),
    )  # fmt: skip
    return "/".join(map(str, parts))


def _processor() -> str:
    """Its name and a digest of what it can."""
    name, able = platform.processor(), ""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            key, _, text = line.partition(":")
            if key.strip() in ("model name", "Hardware"):
                name = text.strip()
            elif key.strip() in ("flags", "Features"):
                able = hashlib.sha256(" ".join(sorted(text.split())).encode()).hexdigest()[:8]
            elif not key.strip() and able:
                break  # the first processor's lines are through
    return f"{name} {able}"


def _read(path: Path, machine: str) -> Device | None:
    kept = read_cached(path, Kept)
    return kept.device if kept is not None and kept.machine == machine else None
