"""The mesh as this node sees it, in JSON-able form: what the API, the CLI and the dashboard show.

Reads what others own and decides nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mesh import codec
from mesh.api.services import LOADING, NOT_HELD, ON_CALL, RESTING, Lack, LackKind
from mesh.deployments.levels import level_of
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import ModelView, ShardStore
from mesh.discovery.sightings import PeerState, PeerView
from mesh.health.detector import Verdict
from mesh.health.eventstream import EventFeed
from mesh.health.metrics import Metrics, NodeNow, PeerNow
from mesh.health.skew import skew
from mesh.identity.naming import called
from mesh.models.local import LocalModel
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.processes.supervisor import Supervisor
from mesh.routing.cover import positions_held
from mesh.shard.several_devices import ShardHost
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import LayerRange, ModelId, NodeId, ShardDescriptor, ShardId

_NO_PEERS = (PeerState.OTHER_HEARTH, PeerState.SELF)
"""Seen, and no link is wanted: in the metrics they would look like peers that are down."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Everything an overview looks at."""

    node: Callable[[], dict[str, Any]]
    models: Mapping[ModelId, LocalModel]
    store: ShardStore
    peers: Callable[[], list[PeerView]]
    askers: dict[ModelId, AskerSupervisor]
    host: ShardHost
    events: EventFeed
    metrics: Metrics
    verdict: Callable[[NodeId], Verdict]
    privacy: Callable[[], dict[str, Any]]
    lacking: Callable[[], list[Lack]]
    processes: Callable[[], list[Supervisor]]
    counts: LiveCounts
    accounts: Callable[[], list[dict[str, Any]]]
    deployments: Callable[[], list[dict[str, Any]]]
    weights: FetcherSupervisor
    software: str


class Overview:
    """Implements `mesh.api.services.MeshView`."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts

    def status(self) -> dict[str, Any]:
        """The whole picture, in the form that `MeshView.status` has."""
        parts = self._parts
        return {
            "node": parts.node(),
            "peers": self.peers(),
            "models": self.models(),
            "shards": self._local_shards(),
            "memory": _memory(parts.host),
            "devices": _devices(parts.host),
            "processes": [process.standing.row() for process in parts.processes()],
            "sessions": parts.host.health.sessions,
            "generations": [
                {**codec.plain(live), **counted}
                for asker in parts.askers.values()
                for live in asker.report.generations
                # What an asker said last may be older than the end of a generation.
                if (counted := parts.counts.row(live.id)) is not None
            ],
            "deployments": parts.deployments(),
            "loads": self._loads(),
            "weights": {**parts.weights.facts(), "elsewhere": self._elsewhere()},
            "accounts": self._accounts(),
            "reasons": self._reasons(),
            "warnings": parts.events.warnings(20),
        }

    def peers(self) -> list[dict[str, Any]]:
        """A row for each peer: name, address, state, round trip, the shards it serves now."""
        known = {view.info.node_id: view for view in self._parts.store.nodes()}
        rows = []
        for peer in self._parts.peers():
            view = known.get(peer.node_id) if peer.node_id is not None else None
            software = view.info.software if view else None
            # Of a peer that is not linked nobody gets anything.
            shown = view.offers.shards if view and view.online else ()
            rows.append(
                {
                    "id": peer.node_id,
                    "name": peer.name,
                    "address": peer.address,
                    "state": peer.state.value,
                    "reason": peer.reason,
                    "verdict": self._verdict(peer),
                    "rtt_ms": None if peer.rtt_ms is None else round(peer.rtt_ms, 3),
                    "software": software,
                    "skew": skew(self._parts.software, software),
                    "shards": [self._seen(shard) for shard in shown],
                }
            )
        return rows

    def models(self) -> list[dict[str, Any]]:
        """A row for each model that anybody holds: runnable or why not, missing layers, nodes.

        Those that make embeddings come last: who names none wants an answer."""
        models = self._parts.models.values()
        stays = {
            (row["model_id"], row["weights_sha256"]): row["rests_at"]
            for row in self._parts.deployments()
        }
        rows = [self._local_model(model) for model in models]
        local = {(model.model_id, model.weights_sha256) for model in models}
        for view in self._parts.store.models():
            if (view.model_id, view.weights_sha256) in local:
                continue
            # Without its embedding and head this node cannot ask for it.
            is_deployed = (view.model_id, view.weights_sha256) in stays
            shards = self._reached(view.shards)
            lacking = _lacks(_missing(shards, view.total_layers))
            reason = lacking or (ON_CALL if is_deployed else NOT_HELD)
            level = level_of(each.health for each in shards).value
            rows.append(
                {
                    **_model(view, shards, reason),
                    "context": None,
                    "level": level,
                    "local": False,
                    "checkpoint": None,
                    "abilities": None,
                }
            )
        rows.sort(key=lambda row: "embedding" in (row["abilities"] or ()))
        return [{**row, "rests_at": stays.get((row["id"], row["weights_sha256"]))} for row in rows]

    def privacy(self) -> dict[str, Any]:
        """Who can see what of prompts and answers, per model and route."""
        return self._parts.privacy()

    def readiness(self) -> list[Lack]:
        """What is missing before a request can be answered; empty when ready."""
        parts = self._parts
        lacking = [Lack(LackKind.FAILED, said) for said in self._troubles()] + self._not_loaded()
        lacking += [
            Lack(LackKind.LOADING, f"the ends of {model_id} are loading")
            for model_id, asker in parts.askers.items()
            if asker.error is None and not asker.is_ready and asker.standing.trouble is None
        ]
        lacking += [
            Lack(LackKind.LOADING, f"{name} is loading")
            for name in parts.host.wanted
            if not parts.host.knows(name)
        ]
        for row in self.models():
            if row["local"] and row["missing"] and row["reason"] != RESTING:
                code = LackKind.LOADING if row["reason"] == LOADING else LackKind.LAYERS
                said = f"no node serves layers {', '.join(row['missing'])} of {row['id']}"
                lacking.append(Lack(code, said))
        return lacking

    def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """See `EventStream.batches`."""
        return self._parts.events.batches(after, pace_s=pace_s, idle_s=idle_s)

    def metrics(self) -> bytes:
        """All series in Prometheus' text format."""
        return self._parts.metrics.render(self._present())

    # Private

    def _present(self) -> NodeNow:
        parts = self._parts
        loads = [each.report.load for each in parts.host.shards.values() if each.report is not None]
        active = sum(load.kv_mb - load.parked_mb for load in loads)
        used = sum(load.kv_tokens_used for load in loads)
        queued = sum(
            bool(live.queued) for a in parts.askers.values() for live in a.report.generations
        )
        return NodeNow(
            [_peer_now(peer) for peer in parts.peers() if peer.state not in _NO_PEERS],
            parts.counts.states(queued),
            (
                ("active", active * 2**20),
                ("parked", sum(load.parked_mb for load in loads) * 2**20),
            ),
            (("used", used), ("free", sum(load.kv_tokens for load in loads) - used)),
        )

    def _accounts(self) -> list[dict[str, Any]]:
        """What each process reports of who holds what, peers with the names of their nodes."""
        names = {view.info.node_id: view.info.name for view in self._parts.store.nodes()}
        reports = [report for report in self._parts.accounts() if report.get("principals")]
        return [
            {
                **report,
                "principals": [
                    {**row, "node": names.get(row["name"]) if row["kind"] == "peer" else None}
                    for row in report["principals"]
                ],
            }
            for report in reports
        ]

    def _loads(self) -> list[dict[str, Any]]:
        """What is being loaded here now: by which process, what it takes, since when."""
        found = [(process.name, process.load()) for process in self._parts.processes()]
        return [{**load, "process": name} for name, load in found if load is not None]

    def _elsewhere(self) -> list[dict[str, Any]]:
        """What other nodes say that they fetch, and how far that is."""
        return [
            {
                "node_id": view.info.node_id,
                "node": view.info.name,
                "model_id": held.model_id,
                "weights_sha256": held.weights_sha256,
                **held.arriving.row(),
            }
            for view in self._parts.store.nodes()
            for held in view.offers.weights
            if view.online and held.arriving is not None
        ]

    def _verdict(self, peer: PeerView) -> str | None:
        """What the failure detector thinks of a linked peer; None for one that is not linked."""
        if peer.node_id is None or peer.state is not PeerState.UP:
            return None
        return self._parts.verdict(peer.node_id).value

    def _reached(self, shards: Iterable[Advertisement]) -> list[Advertisement]:
        """Without those of nodes that are silent for too long: nobody is routed there."""
        verdict = self._parts.verdict
        return [each for each in shards if verdict(each.descriptor.host) is not Verdict.LOST]

    def _seen(self, shard: Advertisement) -> dict[str, Any]:
        """A peer's shard with its standing at this node's asker; None when nothing is known."""
        descriptor = shard.descriptor
        asker = self._parts.askers.get(descriptor.model_id)
        key = _key(descriptor)
        standings = asker.report.standings if asker is not None else []
        known = [row for row in standings if (row["host"], row["shard_id"]) == key]
        return {**_shard(shard), "standing": known[0] if known else None}

    def _local_model(self, model: LocalModel) -> dict[str, Any]:
        shards = self._reached(self._parts.store.shards(model.model_id, model.weights_sha256))
        asker = self._parts.askers.get(model.model_id)
        conflicts = self._parts.store.conflicts(model.model_id)
        return {
            **_model(model, shards, self._why_not(model, _missing(shards, model.total_layers))),
            "context": _context(model, shards),
            "level": self._level(shards),
            "local": True,
            "other_weights": sorted(set(conflicts) - {model.weights_sha256}),
            "directory": model.directory,
            "checkpoint": None if model.facts is None else asdict(model.facts),
            "abilities": list(asker.loaded.abilities)
            if asker is not None and asker.is_ready
            else None,
        }

    def _level(self, shards: Sequence[Advertisement]) -> str:
        """Where the weights of these are; this node knows of its own before it has said it."""
        own = {_key(hosted.descriptor): hosted.health for hosted in self._parts.host.serving}
        return level_of(own.get(_key(each.descriptor), each.health) for each in shards).value

    def _why_not(self, model: LocalModel, missing: Sequence[str]) -> str | None:
        """Why a model whose files are here cannot be asked now; None when it can."""
        host = self._parts.host
        asker = self._parts.askers.get(model.model_id)
        if asker is not None and asker.error is not None:
            return f"failed: {asker.error.message}"
        own = [name for name, r in host.wanted.items() if r.model_id == model.model_id]
        failed = [why.message for name, why in host.failed.items() if name in own]
        if missing and failed:
            return f"{_lacks(missing)}; failed: {failed[0]}"
        is_coming = any(not host.knows(name) for name in own)
        if asker is None and not self._is_wanted(model.model_id):
            return RESTING
        if asker is None or not asker.is_ready or (missing and is_coming):
            return LOADING
        return _lacks(missing)

    def _is_wanted(self, model_id: ModelId) -> bool:
        """Whether something is to be loaded for a model of this node that nobody asks now."""
        rows = [row for row in self._parts.deployments() if row["model_id"] == model_id]
        return not rows or not all(row["resting"] for row in rows)

    def _troubles(self) -> list[str]:
        """The processes of this node that are out of order, in words."""
        troubles = [process.standing.trouble for process in self._parts.processes()]
        return [trouble for trouble in troubles if trouble is not None]

    def _not_loaded(self) -> list[Lack]:
        """What this machine is to hold and does not, with the reason where one is known."""
        parts = self._parts
        ends = [(f"the ends of {name}", asker.error) for name, asker in parts.askers.items()]
        tried = [*ends, *parts.host.failed.items()]
        failed = [f"{what} did not load: {why}" for what, why in tried if why is not None]
        return [Lack(LackKind.FAILED, said) for said in failed] + parts.lacking()

    def _local_shards(self) -> list[dict[str, Any]]:
        host = self._parts.host
        serving = {shard.descriptor.shard_id for shard in host.serving}
        return [
            {
                **_shard(Advertisement(hosted.descriptor, hosted.health)),
                "online": hosted.health.online and name in serving,
                "facts": hosted.facts,
            }
            for name, hosted in host.shards.items()
        ]

    def _reasons(self) -> list[str]:
        parts = self._parts
        reasons = list(parts.host.reasons)
        for hosted in parts.host.shards.values():
            reasons += [f"{hosted.descriptor.shard_id}: {r}" for r in hosted.loaded.reasons]
        for model_id, asker in parts.askers.items():
            reasons += [f"ends of {model_id}: {reason}" for reason in asker.loaded.reasons]
        return reasons + self._troubles() + [each.said for each in self._not_loaded()]


def _peer_now(peer: PeerView) -> PeerNow:
    rtt_s = None if peer.rtt_ms is None else peer.rtt_ms / 1e3
    is_up = peer.state is PeerState.UP
    return PeerNow(peer.name, (peer.node_id or peer.address)[:6], is_up, rtt_s if is_up else None)


def _key(shard: ShardDescriptor) -> tuple[NodeId, ShardId]:
    return shard.host, shard.shard_id


def _shard(shard: Advertisement) -> dict[str, Any]:
    health = codec.plain(shard.health)
    del health["last_seen"]
    return {
        **codec.plain(shard.descriptor),
        "advertised_at": shard.descriptor.advertised_at.isoformat(),
        **health,
        "p50_latency_ms": round(shard.health.p50_latency_ms, 3),
        "p95_latency_ms": round(shard.health.p95_latency_ms, 3),
    }


def _model(
    model: LocalModel | ModelView, shards: Sequence[Advertisement], reason: str | None
) -> dict[str, Any]:
    """What is said of every model; `reason` is why it cannot be asked."""
    return {
        "id": model.model_id,
        "total_layers": model.total_layers,
        "runnable": reason is None,
        "missing": _missing(shards, model.total_layers),
        "reason": reason,
        "nodes": [*called({(s.descriptor.host, s.descriptor.node_name) for s in shards}).values()],
        "weights_sha256": model.weights_sha256,
    }


def _context(model: LocalModel, shards: Sequence[Advertisement]) -> int | None:
    """How many positions a prompt and its answer may take: the model's, and no more than those
    have caches for who have the most for a layer, as far as they say."""
    held = positions_held([shard.descriptor for shard in shards], model.total_layers)
    return min((each for each in (held, model.context) if each), default=None)


def _memory(host: ShardHost) -> dict[str, Any] | None:
    memory = host.health.memory
    return None if memory is None else {**asdict(memory.device), "ram_mb": memory.ram_mb}


def _devices(host: ShardHost) -> list[dict[str, Any]]:
    """Their memory, where there are several."""
    said = {name: each.health.memory for name, each in host.processes.items() if name}
    return [{"device": name, **asdict(memory.device)} for name, memory in said.items() if memory]


def _missing(shards: Sequence[Advertisement], total_layers: int) -> list[str]:
    lacking = LayerRange(0, total_layers).lacking(shard.descriptor.layers for shard in shards)
    return [str(part) for part in lacking]


def _lacks(missing: Sequence[str]) -> str | None:
    return f"missing layers {', '.join(missing)}" if missing else None
