"""What `hearthnet doctor` looks at, and in which order: this machine, its daemon, its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mesh.cli.options import AskedDaemon
from mesh.cli.ports import require_free
from mesh.cli.starting import require_devices
from mesh.config import Config, client_host, load_config
from mesh.errors import (
    ConfigError,
    FileRefused,
    Forbidden,
    MeshError,
    NotFound,
    NotRunning,
    Unauthorized,
)
from mesh.health.checkup.findings import Examination, Finding, failed, fine, note, wrong
from mesh.paths import StatePaths, cache_dir, models_dir

if TYPE_CHECKING:
    from mesh.client import Client

_ANSWERS_WITHIN_S = 10.0
_SILENT = "If its process is there: `hearthnet logs`, `hearthnet restart`. Or name another."


@dataclass(slots=True)
class _Told:
    """What a daemon said; `findings` are about what it did not."""

    picture: dict[str, Any]
    missing: list[tuple[str, str]]
    hearth: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)


def examine(daemon: AskedDaemon) -> Examination:
    """Look at this machine and its daemon; of one that is named by a URL, at that daemon only.

    Takes seconds. What cannot be looked at is a finding; nothing is raised for it.
    """
    is_elsewhere = daemon.host is not None or (
        daemon.state_dir is None and daemon.api_port is None and client_host() is not None
    )
    findings: list[Finding] = []
    config = _configuration(daemon, findings)
    client = None if config is None else _client(daemon, config, findings)
    if not is_elsewhere and config is not None:
        findings += _machine(config, is_running=client is not None)
    findings += asyncio.run(_live(client, None if is_elsewhere else config))
    return Examination(tuple(findings))


def _configuration(daemon: AskedDaemon, findings: list[Finding]) -> Config | None:
    try:
        loaded = load_config({"state_dir": daemon.state_dir})
    except ConfigError as error:
        findings.append(failed("configuration", error))
        return None
    where = f"{loaded.file} is read" if loaded.file is not None else "there is no file, and no need"
    findings.append(fine("configuration", where))
    return loaded.config


def _client(daemon: AskedDaemon, config: Config, findings: list[Finding]) -> Client | None:
    try:
        return daemon.client()
    except NotRunning:
        fix = "`hearthnet up --detach` starts one."
        findings.append(note("daemon", f"No daemon runs with {config.state_dir}.", fix))
    except (ConfigError, FileRefused) as error:  # what is named is no URL, or not ours to see
        findings.append(failed("daemon", error))
    return None


def _machine(config: Config, *, is_running: bool) -> Iterable[Finding]:
    from mesh.health.checkup import machine

    paths = StatePaths(config.state_dir)
    yield from machine.versions()
    yield from machine.clock(datetime.now(UTC), paths)
    yield from machine.disks(paths, config.models_dir or models_dir())
    yield from machine.identity(paths)
    try:
        require_devices(config.device)
    except MeshError as error:
        yield failed("device", error)
    if is_running:
        return
    yield _models(config)
    try:
        require_free(config)
    except MeshError as error:
        yield failed("ports", error)
    else:
        yield fine("ports", f"{config.port} for nodes and {config.api_port} for the API are free")


def _models(config: Config) -> Finding:
    from mesh.models.local import find_local_models

    try:
        found = find_local_models(config, cache_dir(), is_hashed=False)
    except MeshError as error:
        return failed("models", error)
    return fine("models", f"the files of {', '.join(model.model_id for model in found)} are there")


async def _live(client: Client | None, config: Config | None) -> list[Finding]:
    """What takes a network: the daemon, its peers, and who else is there. Without `config` nothing
    is looked at here."""

    findings: list[Finding] = []
    told: _Told | None = None
    if client is not None:
        async with client:
            told = await _said(client, findings)
            around = _around(config, told)
            if told is not None and told.picture["node"]["enabled"]:
                findings += (await asyncio.gather(_try(client, told), around))[1]
            else:
                findings += await around
    else:
        findings += await _around(config, None)
    if told is not None:
        findings += _judged(told)
    return findings


async def _around(config: Config | None, told: _Told | None) -> list[Finding]:
    from mesh.discovery.interfaces import ASKED
    from mesh.health.checkup.network import Known, network
    from mesh.hearth.record import read_record

    if config is None or not config.is_distributed:
        return []
    try:
        record = await asyncio.to_thread(read_record, StatePaths(config.state_dir).hearth)
    except MeshError as error:
        return [failed("hearth", error)]
    known, requested = Known(hearth=record.hearth_id if record is not None else ""), ()
    if told is not None:
        node = told.picture["node"]
        peers = frozenset(row["id"] for row in told.picture["peers"] if row["id"])
        known = Known(node["id"], known.hearth, peers)
        # It may have been started with flags, which no file has.
        rows = node.get("interfaces", [])
        requested = tuple(row["address"] for row in rows if row["why"] == ASKED)
        if not any(row["used"] for row in rows):  # what it was told to use is not there now
            requested = tuple(row["name"] for row in rows)
    return await network(requested or config.interface, known)


async def _said(client: Client, findings: list[Finding]) -> _Told | None:
    """What a daemon says of itself; None of one that says nothing."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            return _Told(await client.status(), await client.readiness())
    except TimeoutError:
        said = f"The daemon takes connections and does not answer within {_ANSWERS_WITHIN_S:g} s."
        findings.append(wrong("daemon", said, _SILENT))
    except MeshError as error:
        findings.append(failed("daemon", error))
    return None


async def _try(client: Client, told: _Told) -> None:
    """What only its owner may ask of it."""
    told.hearth = await _owned(client.hearth(), told, "who is in the hearth") or {}
    told.tried = await _owned(client.reach(), told, "who reaches whom")


async def _owned(
    question: Awaitable[dict[str, Any]], told: _Told, what: str
) -> dict[str, Any] | None:
    try:
        return await question
    except (Unauthorized, Forbidden):
        fix = "Ask with the owner's key, or on that machine."
        told.findings.append(note("peers", f"This key may not ask {what}.", fix))
    except NotFound:
        fix = "Update hearthnet there."
        told.findings.append(note("peers", f"The daemon is too old to say {what}.", fix))
    except MeshError as error:
        told.findings.append(failed("peers", error))
    return None


def _judged(told: _Told) -> Iterable[Finding]:
    from mesh import __version__
    from mesh.health.checkup.daemon import daemon
    from mesh.health.checkup.peers import peers
    from tui.words import out_of_order

    own, now = f"hearthnet/{__version__}", datetime.now(UTC)
    yield from daemon(told.picture, told.missing, own, now, out_of_order)
    yield from told.findings
    if told.tried is not None:
        yield from peers(told.picture, told.tried, told.hearth.get("members", []))
