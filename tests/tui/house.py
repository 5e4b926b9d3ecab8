"""A scripted household behind the real API: what the dashboard's tests and pictures show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

from mesh.api.plan import PlanBody
from mesh.clock import SystemClock
from mesh.errors import NoRoute, NotFound
from mesh.health.eventstream import EventFeed
from mesh.hearth.listing import LogFilter
from mesh.types import Principal
from tests.fakes import ScriptedView

MOMENT = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
SOFA, ATTIC, KITCHEN, STUDY = (
    "sofa" + "a" * 48,
    "attc" + "b" * 48,
    "ktch" + "c" * 48,
    "stdy" + "d" * 48,
)


class FrozenClock(SystemClock):
    """The wall clock of the house: a second later with each event."""

    def __init__(self) -> None:
        self.events = 0

    def now(self) -> datetime:
        self.events += 1
        return MOMENT + timedelta(seconds=self.events)


def shard(model: str, layers: str, **more: Any) -> dict[str, Any]:
    return {
        "shard_id": f"{model}:{layers}", "model_id": model, "layers": layers, "dtype": "bf16",
        "p50_latency_ms": 4.2, "queue_depth": 0, "active_streams": 1, **more,
    }  # fmt: skip


def hop(node: str, layers: str, p50_ms: float, compute_ms: float) -> dict[str, Any]:
    return {
        "shard_id": f"llama:{layers}", "node": node, "layers": layers, "p50_ms": p50_ms,
        "p95_ms": 2 * p50_ms, "compute_p50_ms": compute_ms,
    }  # fmt: skip


class House(ScriptedView):
    """Four nodes, two models, one answer that runs; all of it can be changed by a test."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = EventFeed(FrozenClock())
        self.picture = whole()

    def status(self) -> dict[str, Any]:
        return self.picture

    def models(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.picture["models"]
        return rows

    def peers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.picture["peers"]
        return rows

    def privacy(self) -> dict[str, Any]:
        words = [
            "llama: layers 0-7 on sofa: this machine; nobody else sees these.",
            "llama: layers 8-15 on attic: can compute back most of prompt and answer.",
        ]
        return {"routes": [], "precautions": {}, "words": words}

    def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        return self.stream.batches(after, pace_s=pace_s, idle_s=idle_s)

    def change(self, **parts: Any) -> None:
        """Another picture."""
        self.picture = {**self.picture, **parts}
        self.stream.stir()


def whole() -> dict[str, Any]:
    """All is well but for one model's gap and one node that is gone."""
    own = {
        "id": SOFA, "name": "sofa", "software": "hearthnet/0", "started_at": MOMENT.isoformat(),
        "api": "http://127.0.0.1:8420", "api_tls": None, "endpoint": "wss://192.0.2.5:8421",
        "state_dir": "/state", "enabled": True, "paused": False,
    }  # fmt: skip
    peers = [
        peer("attic", ATTIC, 0.7, [shard("llama", "8-15")]),
        peer("kitchen", KITCHEN, 11.4, [shard("llama", "16-23"), shard("qwen", "0-11")]),
        peer("study", STUDY, None, [], state="unreachable", reason="no answer"),
    ]
    memory = {"weights_mb": 800, "caches_mb": 64, "headroom_mb": 50}
    return {
        "node": own,
        "peers": peers,
        "models": [
            {"id": "llama", "total_layers": 24, "runnable": True, "missing": [], "reason": None,
             "context": 8192, "nodes": ["attic", "kitchen", "sofa"], "local": True},
            {"id": "qwen", "total_layers": 16, "runnable": False, "missing": ["12-15"],
             "reason": "missing layers 12-15", "context": None, "nodes": ["kitchen"],
             "local": False},
        ],
        "shards": [shard("llama", "0-7", memory=memory)],
        "memory": {"free_mb": 5000, "total_mb": 16000, "bound": "RAM", "ram_mb": 5000},
        "processes": [
            {"name": "the shards' process", "state": "up", "pid": 1, "silent_s": 0, "starts": 1,
             "why_alone": None, "ending": None},
            {"name": "llama's process", "state": "starting", "pid": 2, "silent_s": 0, "starts": 1,
             "why_alone": None, "ending": None},
            {"name": "the jobs' process", "state": "ended", "pid": None, "silent_s": 0, "starts": 3,
             "why_alone": None, "ending": "killed by signal 9"},
        ],
        "sessions": [],
        "generations": [
            {"id": "0011223344556677", "model": "llama", "failovers": 1, "prompt_tokens": 120,
             "tokens": 48, "tokens_per_second": 18.5, "first_token_ms": 640.0, "age_s": 4.0,
             "route": [hop("sofa", "0-7", 4.1, 4.0), hop("attic", "8-15", 6.0, 4.8),
                       hop("kitchen", "16-23", 22.0, 5.0)]},
        ],
        "loads": [],
        "deployments": [
            deployment("0" * 15 + "1", "llama", (1, 1), "READY", "HOT", [
                span(0, SOFA, "sofa", "0-7"), span(0, ATTIC, "attic", "8-15"),
                span(0, KITCHEN, "kitchen", "16-23")]),
            deployment("0" * 15 + "2", "qwen", (0, 2), "PROVISIONING", "WARM", [
                span(0, KITCHEN, "kitchen", "0-11"),
                span(0, SOFA, "sofa", "12-15", "PROVISIONING", (4_100_000_000, 12_000_000_000)),
                span(1, ATTIC, "attic", "0-15", "QUEUED"),
                span(1, STUDY, "study", "0-3", "FAILED", reason="needs 900 MiB, 300 MiB are free")],
                "12-15"),
        ],
        "weights": {
            "models": [
                disk("llama", [], 24, 48_000_000_000, 48_000_000_000),
                disk("qwen", ["12-13"], 16, 4_100_000_000, 12_000_000_000),
            ],
            "transfers": [
                {"id": "1", "model_id": "qwen", "weights_sha256": weights("qwen"),
                 "state": "fetching", "done_bytes": 4_100_000_000, "total_bytes": 12_000_000_000,
                 "bytes_per_s": 52_100_000.0, "eta_s": 151.6, "note": "",
                 "sources": [{"source": "a", "name": "attic", "bytes": 1, "bytes_per_s": 1.0},
                             {"source": "hub", "name": "the hub", "bytes": 1, "bytes_per_s": 1.0}]},
            ],
            "elsewhere": [
                {"node_id": ATTIC, "node": "attic", "model_id": "phi",
                 "weights_sha256": weights("phi"), "done_bytes": 600_000_000,
                 "total_bytes": 2_000_000_000, "bytes_per_s": 10_000_000, "eta_s": 140.0},
            ],
            "sent_bytes": 0,
        },
        "accounts": [],
        "reasons": ["device=cpu: no accelerator found"],
        "warnings": [{"id": 1, "type": "warning", "at": MOMENT.isoformat(), "code": "disk",
                      "message": "The disk is nearly full.", "fix": "Free some."}],
    }  # fmt: skip


def weights(model: str) -> str:
    return model.encode().hex().ljust(64, "0")


def deployment(
    name: str, model: str, replicas: tuple[int, int], state: str, level: str,
    spans: list[dict[str, Any]], *missing: str,
) -> dict[str, Any]:  # fmt: skip
    ready, wished = replicas
    return {
        "deployment": name, "model_id": model, "weights_sha256": weights(model), "total_layers": 16,
        "merged": [], "replicas": wished, "replicas_ready": ready, "dedicated": False,
        "in_use": False, "rests_at": None,
        "quant": None, "context": None, "minimum_s": 0.0, "keep_alive_s": None, "nodes": [],
        "layers": [], "resting": state == "RESTING", "state": state, "level": level,
        "missing": list(missing),
        "epoch": 1, "why": None, "by": "sofa", "wished_at": MOMENT.isoformat(), "spans": spans,
    }  # fmt: skip


def span(
    replica: int, key: str, name: str, layers: str, phase: str = "READY",
    come: tuple[int, int] = (0, 0), reason: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    done, total = come
    return {
        "replica": replica, "node_id": key, "node": name, "layers": layers, "phase": phase,
        "done_bytes": done, "total_bytes": total, "reason": reason,
        "bytes_per_s": 0.0, "eta_s": None, "error": None,
    }  # fmt: skip


def disk(model: str, layers: list[str], total: int, here: int, whole: int) -> dict[str, Any]:
    return {
        "id": model, "weights_sha256": weights(model), "origin": None, "directory": "/models",
        "partial": here != whole, "total_layers": total, "layers": layers, "ends": True,
        "here_bytes": here, "total_bytes": whole,
    }  # fmt: skip


def peer(
    name: str, key: str, rtt_ms: float | None, shards: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    return {
        "id": key, "name": name, "address": "192.0.2.7:8421", "state": "up", "reason": "",
        "verdict": "healthy" if rtt_ms is not None else None, "rtt_ms": rtt_ms,
        "software": "hearthnet/0", "shards": shards, **more,
    }  # fmt: skip


class Jobs:
    """A queue with three jobs; what is killed has ended."""

    runner = None
    spool = None

    def __init__(self) -> None:
        self.killed: list[str] = []

    async def overview(self, who: Principal | None) -> dict[str, list[dict[str, Any]]]:
        rows = [job(name, "RUNNING") for name in ("1f" * 16, "2e" * 16) if name not in self.killed]
        ended = [job(name, "ERROR") for name in self.killed]
        return {"models": [], "jobs": rows, "ended": [*ended, job("3d" * 16, "COMPLETED")]}

    async def log(self, job_id: str, owner: Principal | None) -> dict[str, Any]:
        if job_id == "3d" * 16:
            return {"id": job_id, "lines": [], "dropped": 0}
        return {"id": job_id, "lines": ["layer 3", "\x1b[31mloss 0.25"], "dropped": 0}

    async def kill(self, job_id: str, owner: Principal | None, why: str) -> Any:
        if job_id in self.killed:
            raise NotFound("There is no such job.", fix="None.")
        self.killed.append(job_id)
        return type("Job", (), {"job_id": job_id, "status": type("S", (), {"value": "ERROR"})})


def job(job_id: str, status: str) -> dict[str, Any]:
    ended = MOMENT.timestamp() + 90 if status != "RUNNING" else None
    return {
        "id": job_id, "model": "llama", "owner": "anna", "status": status, "blocking": True,
        "description": "The job is running." if ended is None else "Done.",
        "received_at": MOMENT.timestamp(), "ended_at": ended, "payload_bytes": 1, "result_bytes": 0,
    }  # fmt: skip


class Hearth:
    """The hearth's verbs, as far as the dashboard uses them; remembers who was put out."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.wanted: list[LogFilter] = []

    def view(self) -> dict[str, Any]:
        named = {"sofa": SOFA, "attic": ATTIC}
        return {"members": [{"name": n, "node_id": i} for n, i in named.items()], "out": []}

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        return {"code": "7-maple-river", "ttl_s": 180.0, "level": "trusted", "port": 1}

    async def revoke(self, who: str, reason: str) -> dict[str, Any]:
        self.out.append(who)
        return {"done": True, "action": "revoke", "votes_missing": 0, "member": {}}

    async def log(self, wanted: LogFilter) -> dict[str, Any]:
        self.wanted.append(wanted)
        row = {"id": "00", "kind": "decision", "author": SOFA, "author_name": "sofa",
               "at": MOMENT.isoformat(), "type": "member.added", "place": "2",
               "says": {"name": "attic"}}  # fmt: skip
        return {"decisions": [row], "facts": [], "next": None}


class Deployments:
    """The verbs of deployments, as far as the dashboard and the page use them; remembers what was
    wished. What is called `nowhere` is refused; `gaps` come of all else."""

    def __init__(self) -> None:
        self.wished: list[tuple[Any, ...]] = []
        self.orders: list[dict[str, Any]] = []
        self.gaps: list[dict[str, str]] = []

    def view(self) -> list[dict[str, Any]]:
        return []

    async def deploy(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["model"] == "nowhere":
            raise NoRoute("no machine may hold nowhere now.", fix="Start a trusted node.")
        self.wished.append(("deploy", order["model"], order["replicas"]))
        self.orders.append(order)
        return {"deployment": "0" * 15 + "3", "model_id": order["model"], "gaps": self.gaps}

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        self.wished.append(("scale", model, replicas))
        return {"deployment": model, "model_id": "llama", "gaps": self.gaps}

    async def evict(self, model: str) -> list[dict[str, Any]]:
        self.wished.append(("evict", model))
        return [{"deployment": model, "model_id": model, "evicted": True}]


class Pulls:
    """What is pulled, until it is cancelled."""

    def __init__(self) -> None:
        self.running = [{"pull": "7", "model": "org/qwen", "transfer": "1"}]

    def view(self) -> dict[str, Any]:
        return {"models": [], "transfers": [], "neighbours": [], "pulls": self.running}

    async def has_looked(self) -> None:
        pass

    async def staged(self) -> list[dict[str, Any]]:
        return []

    async def cancel(self, name: str) -> dict[str, Any]:
        self.running = [each for each in self.running if each["pull"] != name]
        return {"pull": name, "state": "failed"}


GAP = {"node": "attic", "drops": "8-15", "loads": "8-11"}


class Plans:
    """Estimates: what is called `huge` does not fit, of `secret` nothing is known, and `slow` waits
    until it may `proceed`. Remembers of each what was asked for beside the defaults."""

    def __init__(self) -> None:
        self.asked, self.proceed = asyncio.Event(), asyncio.Event()
        self.orders: list[dict[str, Any]] = []

    async def plan(self, order: dict[str, Any]) -> dict[str, Any]:
        default = PlanBody(model=order["model"]).model_dump(by_alias=True)
        asked = {name: said for name, said in order.items() if said != default[name]}
        self.orders.append({"model": order["model"], **asked})
        if order["model"] == "secret":
            raise NotFound("Nobody has 'secret'.", fix="Name another.")
        if order["model"] == "slow":
            self.asked.set()
            await self.proceed.wait()
        is_huge = order["model"] == "huge"
        refusal = {"code": "not_enough_memory", "message": "96.0 GiB are missing.",
                   "fix": "Add a machine.", "missing_bytes": 96 * 10**9, "node": None}  # fmt: skip
        replicas = [] if is_huge else [planned()] * order["replicas"]
        machines = [{"node_id": STUDY, "node": "study", "free_bytes": 1_500_000_000,
                     "total_bytes": 4 * 10**9, "layers_that_fit": 2, "used": False,
                     "why": "faster without it"}]  # fmt: skip
        return {"replicas": replicas, "machines": machines, "refusal": refusal if is_huge else None}


def planned() -> dict[str, Any]:
    shards = [
        {"node": name, "layers": layers, "need": {"total": 4_100_000_000}, "have": 6_000_000_000,
         "fetch_bytes": fetch, "gap": False}
        for name, layers, fetch in (("sofa", "0-7", 0), ("attic", "8-15", 3_900_000_000))
    ]  # fmt: skip
    return {"shards": shards, "tokens_per_second": 18.5, "first_token_ms": 640.0,
            "bottleneck": {"help": "a cable to attic"}}  # fmt: skip
