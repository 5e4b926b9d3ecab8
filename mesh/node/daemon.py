"""A node as a process of the operating system: its lock, its signals, its runtime file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mesh.config import Config
from mesh.discovery import interfaces
from mesh.hearth.record import read_record
from mesh.identity.keys import load_or_create
from mesh.logs import log_file
from mesh.models.local import find_local_models
from mesh.node.node import Node
from mesh.paths import StatePaths, cache_dir
from mesh.private_files import remove_stale_drafts
from mesh.processes.cards import all_cards
from mesh.processes.descriptors import allow_enough, say_when_out
from mesh.processes.leftovers import leave_nothing
from mesh.processes.shared_pages import unmap_files
from mesh.processes.tasks import abandonable
from mesh.runtime import DaemonRecord, sole_use

logger = logging.getLogger(__name__)


def run(config: Config, *, on_ready: Callable[[DaemonRecord], None] | None = None) -> None:
    """Run a node in the foreground until SIGINT, SIGTERM, or its terminal is closed.

    `on_ready` is called once the API answers. Raises MeshError when the node cannot start.
    """
    allow_enough()
    leave_nothing()
    paths = StatePaths(config.state_dir).create()
    with sole_use(paths):
        remove_stale_drafts(paths.root)
        asyncio.run(_run(config, paths, on_ready))


async def _run(
    config: Config, paths: StatePaths, on_ready: Callable[[DaemonRecord], None] | None
) -> None:
    config = await asyncio.to_thread(with_known_name, config, paths)
    config = await asyncio.to_thread(with_all_cards, config)
    key = await asyncio.to_thread(load_or_create, paths.identity_key)
    # The first time that reads all weights: Ctrl-C is not to wait for it.
    models = await abandonable(find_local_models, config, cache_dir())
    chosen, skipped = await asyncio.to_thread(interfaces.choose, list(config.interface))
    for line in [*chosen, *skipped]:
        logger.info("interface %s", line)
    node = Node(config, key, models, [str(each.address) for each in chosen] or ["127.0.0.1"])
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    say_when_out(loop)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, node.pause, True)
    loop.add_signal_handler(signal.SIGUSR2, node.pause, False)
    try:
        await node.start()
        await asyncio.to_thread(unmap_files)  # of what starting needed
        log = log_file()
        record = replace(node.record(), log="" if log is None else str(log))
        await asyncio.to_thread(record.write, paths.runtime_file)
        if on_ready is not None:
            on_ready(record)
        await stopped.wait()
    finally:
        await node.stop()
        await asyncio.to_thread(_forget, paths.runtime_file)


def with_known_name(config: Config, paths: StatePaths) -> Config:
    """Where no setting says what this node is called, it is what the hearth knows it by."""
    record = read_record(paths.hearth)
    if record is None or not record.node_name or "name" in config.model_fields_set:
        return config
    return config.model_copy(update={"name": record.node_name})


def with_all_cards(config: Config) -> Config:
    """``all`` devices by their names; ``auto`` where nobody knows their number without torch."""
    if config.device != "all":
        return config
    return config.model_copy(update={"device": ",".join(all_cards()) or "auto"})


def _forget(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
