"""The verbs about models on disk: pull, list, show, remove. Plain values in, JSON-able out.

Finds out what a name means: a model of a neighbour or of this node, a directory, or a repository of
the hub. Imports no torch; what is slow happens in the fetcher or a thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from mesh.clock import backoff_s, set_within
from mesh.errors import (
    Busy,
    MeshError,
    ModelInUse,
    ModelNotFound,
    TransferFailed,
    as_mesh_error,
)
from mesh.models.hub_cache import plain_name, split_name
from mesh.models.manifest import read_manifest
from mesh.paths import absolute
from mesh.processes.tasks import end, spawn
from mesh.transfers.begun import MAIN, BegunPull, BegunPulls, PullWish
from mesh.transfers.commands import LocalCheckpoint, PeerHolding, Transfer
from mesh.transfers.hub import REPOSITORY
from mesh.transfers.names import is_of, means, meant, only, only_node
from mesh.transfers.shelf import Holding
from mesh.transfers.staged import remove_staged, staged_bytes
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import NodeId

logger = logging.getLogger(__name__)

MAX_PULLS = 64
"""Pulls that are remembered, most of them ended."""
_LONGEST_WAIT_S = 30.0
_TRIES, _LONGEST_REST_S = 20, 300.0
"""Of a pull that goes on after a restart: an hour at least."""

Notify = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class _Pull:
    id: str
    model: str
    task: asyncio.Task[None]
    order: str = ""
    """The id of its transfer, once it has one."""
    state: str = "running"
    directory: Path | None = None
    error: MeshError | None = None
    is_offer: bool = False
    """Of a directory that others may have, until it is cancelled."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class PullContext:
    """What the rest of the node knows: who holds what, and which directories are in use."""

    peers: Callable[[], Sequence[PeerHolding]]
    in_use: Callable[[], Collection[Path]]
    notify: Notify
    cache_dir: Path
    models_dir: Path
    begun: Path
    """The file with what has not ended."""


class Pulls:
    """Starts pulls and remembers how they ended; `go_on` with those of the last start first."""

    go_on_s: float = 5.0
    """By then this node has found its neighbours, and asks no hub in their place."""

    def __init__(self, fetcher: FetcherSupervisor, around: PullContext) -> None:
        self._fetcher = fetcher
        self._around = around
        self._begun = BegunPulls(around.begun)
        self._pulls: dict[str, _Pull] = {}
        self._numbers = itertools.count(1)

    def view(self) -> dict[str, Any]:
        """``{"models": [{"id", "weights_sha256", "origin", "directory", "partial", "total_layers",
        "layers", "ends", "here_bytes", "total_bytes", "dtype", "in_use"}] of what is here,
        "transfers": [{"id", "model_id", "weights_sha256", "state": waiting, looking, fetching or
        hub, "done_bytes", "total_bytes", "bytes_per_s", "eta_s", "sources", "note"}],
        "sent_bytes", "neighbours": [{"id", "weights_sha256", "origin", "total_layers", "nodes":
        [{"node_id", "name", "layers", "ends", "fetching"}]}], "pulls": [{"pull", "model",
        "transfer": its id | None}] that run, "offers": [{"pull", "directory"}]}``."""
        facts = self._fetcher.facts()
        in_use = {str(path) for path in self._around.in_use()}
        for model in facts["models"]:
            model["in_use"] = model["directory"] in in_use
        neighbours: dict[tuple[str, str], dict[str, Any]] = {}
        for peer in self._around.peers():
            held = peer.held
            row = neighbours.setdefault(
                (held.model_id, held.weights_sha256),
                {
                    "id": held.model_id,
                    "weights_sha256": held.weights_sha256,
                    "origin": held.origin or None,
                    "total_layers": held.total_layers,
                    "nodes": [],
                },
            )
            row["nodes"].append(
                {
                    "node_id": peer.node,
                    "name": peer.node_name,
                    "layers": [str(span) for span in held.layers],
                    "ends": held.ends,
                    "fetching": not held.weights_sha256,
                }
            )
        return {
            **facts,
            "neighbours": list(neighbours.values()),
            "pulls": self._running(),
            "offers": self._offers(),
        }

    def _running(self) -> list[dict[str, Any]]:
        """The pulls under way, each with the id of its transfer once it has one."""
        return [
            {"pull": pull.id, "model": pull.model, "transfer": pull.order or None}
            for pull in self._pulls.values()
            if not pull.ended.is_set()
        ]

    def _offers(self) -> list[dict[str, Any]]:
        """The directories that others may have because they were pulled."""
        return [
            {"pull": pull.id, "directory": str(pull.directory)}
            for pull in self._pulls.values()
            if pull.is_offer
        ]

    def start(self, wish: PullWish) -> dict[str, Any]:
        """``{"pull": its name, to be asked for}``. Raises ModelNotFound for a name that means
        nothing, BadRequest for one that means several things, Busy when too many run.
        """
        begun = self._meant(wish)
        self._forget_old()
        name = str(next(self._numbers))
        self._begin(name, begun, self._fetch(name, begun))
        return {"pull": name}

    async def go_on(self) -> None:
        """Take up the pulls that had not ended when this node did, under the names they had, and
        offer the directories again that were offered."""
        begun = await self._begun.read()
        last = max((int(name) for name in begun if name.isdecimal()), default=0)
        self._numbers = itertools.count(last + 1)
        for name, each in begun.items():
            self._begin(name, each, self._goes_on(name, each))

    async def has_looked(self) -> None:
        """Once this node knows what is here: a model would be looked for elsewhere before that."""
        await self._fetcher.has_looked()

    async def outcome(self, name: str, wait_s: float) -> dict[str, Any]:
        """``{"pull", "model", "state": running, done, failed or withdrawn, "directory" | None,
        "error" | None, "transfer": as one of `GET /mesh/v1/weights` | None}``, after it ended or
        `wait_s`. Raises ModelNotFound for one nobody knows."""
        pull = self._require(name)
        await set_within(pull.ended, min(wait_s, _LONGEST_WAIT_S))
        return {
            "pull": name,
            "model": pull.model,
            "state": pull.state,
            "directory": None if pull.directory is None else str(pull.directory),
            "error": None if pull.error is None else pull.error.to_dict(),
            "transfer": self._transfer(pull),
        }

    async def cancel(self, name: str) -> dict[str, Any]:
        """What came is kept, and a directory is offered no longer: what became of the pull."""
        pull = self._require(name)
        await end([pull.task])
        await self._begun.remove(name)
        if pull.is_offer and pull.directory is not None:
            pull.is_offer, pull.state = False, "withdrawn"
            if pull.directory not in self._around.in_use():
                self._fetcher.withdraw(pull.directory)
        return await self.outcome(name, 0.0)

    async def remove(self, model: str) -> dict[str, Any]:
        """Delete a model that was fetched, and what came of it from the hub before the rest:
        ``{"removed": its id, "bytes"}``. Raises ModelInUse, ModelNotFound, Busy."""
        held = self._held(model)
        holding = only(model, held) if held else None
        if holding is not None and holding.directory in self._around.in_use():
            raise ModelInUse(
                f"{model} is what this node serves.", fix="Stop serving it, then remove it."
            )
        size = await asyncio.to_thread(remove_staged, self._around.models_dir, model)
        if holding is not None:
            await self._fetcher.remove(holding.directory)
            size += holding.here_bytes
        elif not size:
            raise ModelNotFound(f"{model!r} is not here.", fix="See `hearthnet list`.")
        self._around.notify("model_removed", {"model": model})
        return {"removed": model if holding is None else holding.model_id, "bytes": size}

    async def staged(self) -> list[dict[str, Any]]:
        """What came from the hub of models that are not all here, by what it takes on the disk."""
        found = await asyncio.to_thread(staged_bytes, self._around.models_dir)
        return [{"model_id": model_id, "bytes": size} for model_id, size in found.items()]

    async def close(self) -> None:
        """End what runs; the next start goes on with it."""
        await end([pull.task for pull in self._pulls.values()])

    # Private

    def _meant(self, wish: PullWish) -> BegunPull:
        if _is_path(wish.model):
            return BegunPull(wish)
        wish = replace(wish, model=plain_name(wish.model))
        peers = self._around.peers()
        if wish.source not in ("", "hub"):
            wish = replace(wish, source=only_node(wish.source, peers))
            peers = [peer for peer in peers if peer.node == wish.source]
        holdings = [] if wish.source else [*self._fetcher.holdings]
        if wish.revision != MAIN:  # which of them a branch or a tag is, the hub alone knows
            peers = [peer for peer in peers if is_of(peer.held.origin, wish.revision)]
            holdings = [held for held in holdings if is_of(held.origin, wish.revision)]
        known = meant(wish.model, peers, holdings)
        if known is not None and wish.source != "hub":
            return BegunPull(wish, known)
        repository, _ = split_name(wish.model)
        if wish.source not in ("", "hub") or REPOSITORY.fullmatch(repository) is None:
            which = "" if wish.revision == MAIN else f" of revision {wish.revision!r}"
            raise ModelNotFound(
                f"No node that is up has {wish.model!r}{which}.",
                fix="See `hearthnet list` for what there is; the hub's models are ORG/NAME.",
                param="model",
            )
        return BegunPull(wish)

    def _begin(self, name: str, begun: BegunPull, work: Coroutine[Any, Any, Path]) -> None:
        model = begun.wish.model
        task = spawn(self._run(name, work), f"pull {model}")
        self._pulls[name] = _Pull(name, model, task)
        self._around.notify("pull_started", {"pull": name, "model": model})

    async def _goes_on(self, name: str, begun: BegunPull) -> Path:
        """As `_fetch`; whoever has it, the way to the hub, or the disk of a directory that is
        offered, may be up later than this node."""
        await asyncio.sleep(self.go_on_s)
        for count in range(1, _TRIES):
            try:
                return await self._fetch(name, begun)
            except MeshError as error:
                if not isinstance(error, TransferFailed) and not _is_path(begun.wish.model):
                    raise
                logger.warning("%s is still to be pulled: %s", begun.wish.model, error)
                await asyncio.sleep(backoff_s(count, self.go_on_s, _LONGEST_REST_S))
        return await self._fetch(name, begun)

    async def _fetch(self, name: str, begun: BegunPull) -> Path:
        wish, fetcher = begun.wish, self._fetcher
        if _is_path(wish.model):
            return await self._offer(name, wish)
        await self._begun.put(name, begun)

        def on_order(order: str) -> None:
            self._require(name).order = order

        if begun.meant is not None:
            sources = (NodeId(wish.source),) if wish.source else ()
            return await fetcher.ensure(
                *begun.meant, wish.layers, ends=wish.ends, sources=sources, on_order=on_order
            )  # fmt: skip
        return await fetcher.pull(
            wish.model, wish.layers, revision=wish.revision, ends=wish.ends, drop=wish.drop,
            hub_alone=wish.source == "hub", on_order=on_order,
        )  # fmt: skip

    async def _offer(self, name: str, wish: PullWish) -> Path:
        """A directory is here already: only its hashes are needed, and others may have it."""
        directory = await asyncio.to_thread(absolute, Path(wish.model))
        await self._begun.put(name, BegunPull(replace(wish, model=str(directory))))
        manifest = await asyncio.to_thread(
            read_manifest, directory, cache_dir=self._around.cache_dir
        )
        self._fetcher.offer(LocalCheckpoint(manifest.model_id, manifest.path))
        return directory

    async def _run(self, name: str, work: Awaitable[Path]) -> None:
        pull: _Pull | None = None
        try:
            directory = await as_mesh_error(work, "the pull")
            pull = self._pulls[name]
            pull.state, pull.directory = "done", directory
            self._around.notify("pull_done", {"pull": name, "model": pull.model})
        except MeshError as error:
            pull = self._pulls[name]
            pull.state, pull.error = "failed", error
            fields = {"pull": name, "model": pull.model, "error": error.to_dict()}
            self._around.notify("pull_failed", fields)
        finally:
            if pull is None:
                pull = self._pulls[name]
                pull.state, pull.error = "failed", Busy("It was cancelled.", fix="Pull it again.")
                self._around.notify("pull_cancelled", {"pull": name, "model": pull.model})
            is_there = pull.state == "done" and _is_path(pull.model)
            pull.is_offer = is_there and not self._begun.is_twice(name)
            pull.ended.set()
        if not pull.is_offer:
            await self._begun.remove(name)

    def _transfer(self, pull: _Pull) -> dict[str, Any] | None:
        found = (each for each in self._fetcher.transfers if each.id == pull.order)
        return next(map(_row, found), None)

    def _held(self, model: str) -> list[Holding]:
        return [
            holding
            for holding in self._fetcher.holdings
            if holding.weights_sha256 and means(model, holding.model_id, holding.weights_sha256)
        ]

    def _require(self, name: str) -> _Pull:
        pull = self._pulls.get(name)
        if pull is None:
            raise ModelNotFound(f"There is no pull {name!r}.", fix="See `hearthnet list`.")
        return pull

    def _forget_old(self) -> None:
        others = {name: pull for name, pull in self._pulls.items() if not pull.is_offer}
        ended = [name for name, pull in others.items() if pull.ended.is_set()]
        for _ in range(len(others) - MAX_PULLS + 1):
            if not ended:
                raise Busy(f"{MAX_PULLS} pulls run already.", fix="Wait for some to end.")
            del self._pulls[ended.pop(0)]


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~"))


def _row(transfer: Transfer) -> dict[str, Any]:
    row: dict[str, Any] = to_builtins(transfer)
    return row
