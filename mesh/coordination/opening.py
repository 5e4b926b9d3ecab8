"""From settings to a coordinator: which store, and whether memory stands in front of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mesh.clock import Clock
from mesh.config.sections import CoordinationSection
from mesh.coordination.coordinator import Coordinator
from mesh.coordination.direct import DirectRecords
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.layered import LayeredRecords, StoreTimes
from mesh.coordination.ready import ReadyFlags
from mesh.coordination.redis import RedisStore
from mesh.coordination.sqlite import SqliteStore
from mesh.coordination.store import RecordStore, Warn, client_missing


def open_coordinator(
    settings: CoordinationSection, file: Path, clock: Clock, warn: Warn
) -> Coordinator:
    """A coordinator, not started. `file` is for the ``sqlite`` store; `warn` is told of outages.

    Raises StoreClientMissing when the store needs a package that is not installed.
    """
    flags = ReadyFlags(clock)
    store = _store(settings, file, clock)
    if store is not None and settings.store.endswith("-only"):
        return Coordinator(DirectRecords(store, flags, clock, warn), flags)
    times = StoreTimes(refresh_s=settings.refresh_seconds)
    return Coordinator(LayeredRecords(store, flags, warn, times), flags)


def _store(settings: CoordinationSection, file: Path, clock: Clock) -> RecordStore | None:
    kind = settings.store.removesuffix("-only")
    if kind == "sqlite":
        return SqliteStore(file)
    if kind == "redis":
        _require("redis", "redis", "redis")
        return RedisStore(settings.redis_url)
    if kind == "kubernetes":
        _require("kubernetes_asyncio", "kubernetes-asyncio", "kubernetes")
        return KubernetesStore(settings.namespace, settings.kubeconfig, clock)
    return None


def _require(module: str, package: str, extra: str) -> None:
    """Only looked for: importing takes its time, and is done in a thread by the store."""
    if find_spec(module) is None:
        raise client_missing(package, extra)
