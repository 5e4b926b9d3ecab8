"""A scripted household behind the real API: what the dashboard's tests and pictures show."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

from mesh.clock import SystemClock
from mesh.errors import NotFound
from mesh.health.eventstream import EventFeed
from mesh.hearth.listing import Wanted
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
            {"name": "the jobs' process", "state": "silent", "pid": 2, "silent_s": 6, "starts": 3,
             "why_alone": None, "ending": None},
        ],
        "sessions": [],
        "generations": [
            {"id": "0011223344556677", "model": "llama", "failovers": 1, "prompt_tokens": 120,
             "tokens": 48, "tokens_per_second": 18.5, "first_token_ms": 640.0, "age_s": 4.0,
             "route": [hop("sofa", "0-7", 4.1, 4.0), hop("attic", "8-15", 6.0, 4.8),
                       hop("kitchen", "16-23", 22.0, 5.0)]},
        ],
        "loads": [],
        "accounts": [],
        "reasons": ["device=cpu: no accelerator found"],
        "warnings": [{"id": 1, "type": "warning", "at": MOMENT.isoformat(), "code": "disk",
                      "message": "The disk is nearly full.", "fix": "Free some."}],
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
        self.wanted: list[Wanted] = []

    def view(self) -> dict[str, Any]:
        return {}

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        return {"code": "7-maple-river", "ttl_s": 180.0, "level": "trusted", "port": 1}

    async def revoke(self, who: str, reason: str) -> dict[str, Any]:
        self.out.append(who)
        return {"done": True, "action": "revoke", "votes_missing": 0, "member": {}}

    async def log(self, wanted: Wanted) -> dict[str, Any]:
        self.wanted.append(wanted)
        row = {"id": "00", "kind": "decision", "author": SOFA, "author_name": "sofa",
               "at": MOMENT.isoformat(), "type": "member.added", "place": "2",
               "says": {"name": "attic"}}  # fmt: skip
        return {"decisions": [row], "facts": [], "next": None}
