"""What this node's own device holds and how fast it is: measured on this machine, kept, corrected.

A process measures (`mesh.node.measured`), once nothing loads here and there is memory for it; its
result is kept for all nodes of this user on this machine, until processor, device or torch is
another, or hearthnet. What was measured beside others who computed is measured again when nobody
does, and so is what serving contradicts; each try that is in vain is followed by a longer wait.
What is free is looked at all the time, told when it has moved, and told alone while nothing is
measured. Part of the composition root.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

import mesh
from mesh import codec
from mesh.capacity import MEASURING_MB, Capacity, Device, Measurement, device_name
from mesh.discovery.advertisement import Advertisement
from mesh.errors import Busy, MeshError
from mesh.models.hashing import read_cached, write_json_atomically
from mesh.models.partial_writer import lock_directory
from mesh.node.measured import LIMIT_S, QUIET_SHARE, is_quiet, measured
from mesh.node.served_speed import AskedTimes, ServedSpeed
from mesh.processes.cards import card_files
from mesh.processes.headroom import Headroom, ram
from mesh.processes.memory_budget import CappedMemory
from mesh.processes.processor import allowed_cores, cpu_flags, cpu_model
from mesh.processes.tasks import end, spawn
from mesh.shard.commands import Measure
from mesh.shard.room import Memory

logger = logging.getLogger(__name__)

VERSION = 3
"""Counts up when something else is measured."""

_STOP_S = 5.0
_CARD_EVERY_S = 600.0
_QUIET_TRIES = 2
"""So often the first measurement waits for a quiet moment; something has to be known."""
_NEWS = 0.1
"""A corrected speed is told when it has moved by so much."""
_NEWS_FREE = 1 / 50
"""What is free is told when it has moved by so much of all there is."""
_NEWS_DISK_BYTES = 64 << 20
"""Of a disk, by so much at least."""


@dataclass(frozen=True, slots=True)
class MeasuringTimes:
    """Seconds: the waits before a machine is measured at all, the last one again and again; how
    often a quiet moment is looked for to repeat what is not to be believed, and the longest pause
    after that, each of which is twice as long as the one before; how often what is free is looked
    at, which is a few small files of the kernel's, and on a card."""

    first_s: Sequence[float] = (5.0, 5.0, 5.0, 10.0, 30.0, 60.0, 60.0, 600.0, 3600.0)
    again_s: float = 60.0
    longest_s: float = 6 * 3600.0
    look_s: float = 2.0
    look_at_card_s: float = 10.0


@dataclass(frozen=True, slots=True)
class KeptMeasurement:
    """A measured machine as it is written down; `machine` is what it holds for."""

    machine: str
    measured: Measurement


@dataclass(frozen=True, slots=True)
class OwnHooks:
    """`memory` is what the shard process last said is free, None without one; `is_idle` whether
    nothing loads or computes; `shards` are those that are served; `on_change` is told when speeds
    or what is free become known or move; `disk` reads what weights may take on theirs, in bytes,
    `cap` what the owner gives to models of the memory of a device that has so many MiB; these two
    may block and raise OSError. `kv_tokens` is told as it is. Of main memory the device has
    `main_share`, 0 to 1."""

    memory: Callable[[], Memory | None]
    is_idle: Callable[[], bool]
    shards: Callable[[], Sequence[Advertisement]]
    on_change: Callable[[], None]
    disk: Callable[[], int | None] = lambda: None
    cap: Callable[[str, int], CappedMemory | None] = lambda device, total_mb: None
    kv_tokens: int | None = None
    main_share: float = 1.0


class OwnCapacity:
    """`start`, then `stop`; `now` is None until it is known."""

    def __init__(
        self,
        order: Measure,
        directory: Path,
        hooks: OwnHooks,
        pace: MeasuringTimes = MeasuringTimes(),
        measure: Callable[[Measure], Awaitable[Measurement]] = measured,
        quiet: Callable[[], Awaitable[bool]] = is_quiet,
        memory: Callable[[], Headroom] = ram,
    ) -> None:
        """`measure` is what a measurement is made with, `quiet` tells when one is to be believed,
        `memory` what main memory is free."""
        self._order = order
        self._measure_now = measure
        self._is_quiet = quiet
        self._main_memory = memory
        self._directory = directory
        self._hooks = hooks
        self._pace = pace
        self._measured: Measurement | None = None
        self._served = ServedSpeed()
        self.asked = AskedTimes()
        self._told: Capacity | None = None
        self._main: Headroom | None = None
        self._disk_bytes: int | None = None
        self.cap: CappedMemory | None = None
        """What the owner gives of the device's memory, and what is taken of that."""
        self._is_cpu = False
        """Whether it is known, without measuring, that the device is the processor."""
        self._card: Device | None = None
        """An accelerator that nothing of this node has opened, when it was looked at last."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = spawn(self._run(), "own capacity")

    async def stop(self) -> None:
        """Look no more."""
        await end([self._task], _STOP_S)

    def now(self) -> Capacity | None:
        """The device as it serves, with what is free there; without speeds before they are
        measured."""
        main, memory = self._main, self._hooks.memory()
        if main is None:
            return None
        if self._measured is not None:
            device = self._served.corrected(self._measured.device)
        elif self._is_cpu:
            device = Device("cpu", 0, 0)
        else:
            return None
        if device.kind == "cpu":
            promised_mb = memory.promised_mb if memory is not None else 0
            free_mb, total_mb = max(0, main.free_mb - promised_mb), main.total_mb
        elif memory is not None:
            free_mb, total_mb = memory.free_mb, memory.device.total_mb
        elif self._card is not None:
            free_mb, total_mb = self._card.free_bytes >> 20, self._card.total_bytes >> 20
        else:
            return None
        if (cap := self.cap) is not None:
            free_mb, total_mb = min(free_mb, cap.left_mb), min(total_mb, cap.limit_mb)
        share = self._hooks.main_share
        free_mb, total_mb = int(share * free_mb), int(share * total_mb)
        name = device_name(self._order.device, device.name)
        device = replace(device, name=name, free_bytes=free_mb << 20, total_bytes=total_mb << 20)
        return Capacity((device,), self._disk_bytes, self._hooks.kv_tokens)

    def asker_ms(self) -> float:
        """What a token costs here where it is asked for, besides head and hops; 0 while nobody
        knows."""
        return self._measured.asker_ms if self._measured is not None else 0.0

    async def _run(self) -> None:
        machine = await asyncio.to_thread(_machine, self._order)
        self._is_cpu = await asyncio.to_thread(_is_cpu, self._order)
        path = self._directory / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
        self._measured = await asyncio.to_thread(_read, path, machine)
        measuring = spawn(self._measure(path, machine), "measure capacity")
        looking = spawn(self._watch_card(), "look at free device memory")
        try:
            while True:
                with contextlib.suppress(OSError):  # what was known last has to do
                    self._disk_bytes = await asyncio.to_thread(self._hooks.disk)
                    main = await asyncio.to_thread(self._main_memory)
                    self.cap = await asyncio.to_thread(self._hooks.cap, *self._memory_of(main))
                    self._main = main
                self._look()
                await asyncio.sleep(self._pace.look_s)
        finally:
            await end([measuring, looking], _STOP_S)

    def _memory_of(self, main: Headroom) -> tuple[str, int]:
        """The device's name, and how much memory it has, in MiB; 0 while nobody knows."""
        if self._measured is None or self._measured.device.kind == "cpu":
            return "cpu", main.total_mb
        memory, name = self._hooks.memory(), self._measured.device.name
        if memory is not None:
            return name, memory.device.total_mb
        return name, self._card.total_bytes >> 20 if self._card is not None else 0

    def _look(self) -> None:
        """Learn from what is served, and tell what has moved."""
        if self._measured is not None:
            self._served.look(self._measured.device, self._hooks.shards())
        capacity = self.now()
        if capacity is None:
            return
        if self._told is None or _differ(capacity, self._told):
            self._told = capacity
            self._hooks.on_change()

    async def _watch_card(self) -> None:
        """Follow what is free on an accelerator while no process of this node says it: whoever
        holds the card open takes some of it."""
        looked_at = float("-inf")
        while True:
            now = asyncio.get_running_loop().time()
            if self._hooks.memory() is not None:
                self._card, looked_at = None, float("-inf")
            elif self._has_card and now - looked_at > _CARD_EVERY_S:  # also when that was in vain
                looked_at = now
                await self._look_at_card()
            await asyncio.sleep(self._pace.look_at_card_s)

    @property
    def _has_card(self) -> bool:
        return self._measured is not None and self._measured.device.kind != "cpu"

    async def _look_at_card(self) -> None:
        order = structs.replace(self._order, memory_only=True)
        try:
            self._card = (await self._measure_now(order)).device
        except (MeshError, TimeoutError, OSError) as error:
            logger.warning("what is free on %s is not known: %s", self._order.device, error)
        self._look()

    # Measuring

    async def _measure(self, path: Path, machine: str) -> None:
        """Until there is a measurement, then whenever it is not to be believed."""
        waits, tries = iter(self._pace.first_s), 0
        loop, pause_s, not_before = asyncio.get_running_loop(), self._pace.again_s, 0.0
        while True:
            if self._measured is None:
                await asyncio.sleep(next(waits, self._pace.first_s[-1]))
                await self._until_it_fits()
                tries += 1
                if tries > _QUIET_TRIES or await self._is_quiet():
                    await self._try(path, machine)
                continue
            await asyncio.sleep(self._pace.again_s)
            if not self._is_doubtful or loop.time() < not_before or not self._hooks.is_idle():
                continue
            if self._fits and await self._is_quiet():
                await self._try(path, machine)
                pause_s = min(self._pace.longest_s, 2 * pause_s)
                not_before = loop.time() + pause_s

    async def _until_it_fits(self) -> None:
        """Wait for the memory that measuring takes: it would push out what serves, or be killed."""
        if (main := self._main) is not None and not self._fits:
            logger.warning(
                "how fast this machine is will be measured once %d MiB are free: %d are of %d (%s)",
                MEASURING_MB, main.free_mb, main.total_mb, main.bound,
            )  # fmt: skip
        while not self._fits:  # noqa: ASYNC110 - what is free is looked at, and tells nobody
            await asyncio.sleep(self._pace.look_s)

    @property
    def _fits(self) -> bool:
        return self._main is not None and self._main.free_mb >= MEASURING_MB

    @property
    def _is_doubtful(self) -> bool:
        was = self._measured
        return was is None or was.others_share > QUIET_SHARE or self._served.contradicts

    async def _try(self, path: Path, machine: str) -> None:
        """Measure, or take over what another node of this machine has measured meanwhile."""
        if not self._hooks.is_idle():
            return
        try:
            lock = await asyncio.to_thread(_lock, path.parent)
            try:
                found = await asyncio.to_thread(_read, path, machine)
                if found is None or found == self._measured or not self._is_better(found):
                    found = await self._measure_now(self._order)
                    if not self._is_better(found):
                        return
                    plain = codec.plain(KeptMeasurement(machine, found))
                    await asyncio.to_thread(write_json_atomically, path, plain)
            finally:
                os.close(lock)
        except Busy:  # another node measures right now
            return
        except (MeshError, TimeoutError, OSError) as error:
            why = str(error) or f"it took longer than {LIMIT_S:.0f} s"
            logger.warning("how fast this machine is was not measured: %s", why)
            return
        logger.info("measured; others took %.0f %% of the processors", 100 * found.others_share)
        self._measured = found
        self._served.forget()
        self._look()

    def _is_better(self, found: Measurement) -> bool:
        """Whether it is to be believed rather than what is known."""
        was = self._measured
        return was is None or self._served.contradicts or found.others_share < was.others_share


def _is_cpu(order: Measure) -> bool:
    """Whether the device is surely the processor, without importing what asks it."""
    has_card = sys.platform == "darwin" or bool(card_files())
    return order.device.startswith("cpu") or (order.device == "auto" and not has_card)


def _differ(now: Capacity, told: Capacity) -> bool:
    """Whether there is clearly more or less free, a format is clearly faster or slower, or there
    are others."""
    now_free, told_free = now.disk_free_bytes, told.disk_free_bytes
    if now_free is None or told_free is None:
        if now_free is not told_free:
            return True
    elif abs(now_free - told_free) > max(_NEWS_DISK_BYTES, _NEWS_FREE * told_free):
        return True
    return any(map(_device_differs, now.devices, told.devices))


def _device_differs(one: Device, other: Device) -> bool:
    if abs(one.free_bytes - other.free_bytes) > _NEWS_FREE * max(one.total_bytes, 1):
        return True
    pairs = list(zip(one.speeds, other.speeds, strict=False))
    return len(one.speeds) != len(other.speeds) or any(
        now.format != then.format or abs(now.decode_gb_s / then.decode_gb_s - 1) > _NEWS
        for now, then in pairs
    )


def _machine(order: Measure) -> str:
    """What a measurement holds for, without importing what measures."""
    cores = len(allowed_cores() or range(os.cpu_count() or 1))
    able = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    parts = (
        VERSION, mesh.__version__, platform.machine(), cpu_model(), able, cores, order.device,
        order.threads, order.dtype, card_files(), importlib.metadata.version("torch"),
    )  # fmt: skip
    return "/".join(map(str, parts))


def _lock(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    return lock_directory(directory)


def _read(path: Path, machine: str) -> Measurement | None:
    kept = read_cached(path, KeptMeasurement)
    return kept.measured if kept is not None and kept.machine == machine else None
