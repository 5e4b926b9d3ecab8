"""What a plan says, in lines for the screen. Pure; the plan is `POST /mesh/v1/plan`'s answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.units import data_size, memory_size
from tui.words import ms, rate


def estimate(plan: Mapping[str, Any]) -> list[str]:
    """Lines: what each node would hold and needs for it, how fast that is, or why it cannot be."""
    lines = []
    refusal = plan["refusal"]
    if refusal is not None:
        lines += [f"✖ it does not fit: {refusal['message']}", refusal["fix"]]
    for number, replica in enumerate(plan["replicas"], 1):
        speed = rate(replica["tokens_per_second"])
        lines.append(f"● replica {number}: about {speed}, first token {_first(replica)}")
        lines += [_shard(shard) for shard in replica["shards"]]
        lines.append(f"  would help: {replica['bottleneck']['help']}")
    lines += [
        f"○ {row['node']}: {memory_size(row['free_bytes'])} free, not used: {row['why']}"
        for row in plan["machines"]
        if not row["used"]
    ]
    return [line for line in lines if line]


def _first(replica: Mapping[str, Any]) -> str:
    return ms(replica["first_token_ms"])


def _shard(shard: Mapping[str, Any]) -> str:
    need, have = memory_size(shard["need"]["total"]), memory_size(shard["have"])
    line = f"  {shard['node']} {shard['layers']}: needs {need} of {have} free"
    if shard["fetch_bytes"]:
        line += f", fetches {data_size(shard['fetch_bytes'])}"
    return line + (", with a gap: old and new do not fit at once" if shard["gap"] else "")
