"""A plan in the form that the HTTP API gives it. Decides nothing, and asks nobody."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mesh.routing.forecast import Forecast
from mesh.routing.placement import Layout


def as_json(found: Layout, *, others_rest: bool) -> dict[str, Any]:
    """A plan in the form that `PlanControl.plan` has."""
    fields = asdict(found)
    fields["replicas"] = [_replica(each) for each in found.replicas]
    fields["machines"] = [_named(asdict(each)) for each in found.machines]
    fields["refusal"] = None if found.refusal is None else _named(asdict(found.refusal))
    fields["others_rest"] = others_rest
    return fields


def _replica(one: Forecast) -> dict[str, Any]:
    fields = asdict(one)
    fields["bottleneck"] = _named(fields["bottleneck"])
    fields["shards"] = [
        {
            **_named(asdict(shard)),
            "layers": str(shard.layers),
            "need": {**asdict(shard.need), "total": shard.need.total},
        }
        for shard in one.shards
    ]
    return fields


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """With the name of a node where the HTTP API has it."""
    return {("node" if key == "name" else key): value for key, value in fields.items()}
