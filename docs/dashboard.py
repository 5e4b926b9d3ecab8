"""docs/reference/grafana.json: a Grafana dashboard of the series of `/metrics`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT, _ACROSS = 12, 8, 2
_NODE = 'instance=~"$instance"'
_RATE = f"{{{_NODE}}}[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel: queries, each with its legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    says: str = ""


def _quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the 95th percentile of a histogram."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f" {{{{{by}}}}}")
    return tuple(
        (f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{_RATE})))", said + legend)
        for q, said in ((0.5, "median"), (0.95, "95 %"))
    )


def _rate(name: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({name}{_RATE}))", f"{{{{{by}}}}}"),)


def _now(name: str, *by: str) -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return ((f"sum by ({', '.join(by)}) ({name}{{{_NODE}}})", legend),)


PANELS = (
    Panel("First token", "s", _quantiles("hearthnet_ttft_seconds")),
    Panel("From token to token", "s", _quantiles("hearthnet_inter_token_seconds")),
    Panel("Tokens a second", "cps", _rate("hearthnet_tokens_by_kind_total", "kind")),
    Panel("Generations", "short", _now("hearthnet_generations", "state")),
    Panel(
        "A step at each node",
        "s",
        _quantiles("hearthnet_hop_seconds", "peer"),
        "Each phase by itself; the next panel says which of them it is.",
    ),
    Panel(
        "Where steps spend their time",
        "s",
        (
            (
                f"sum by (peer, phase) (rate(hearthnet_hop_seconds_sum{_RATE}))"
                f" / sum by (peer, phase) (rate(hearthnet_hop_seconds_count{_RATE}))",
                "{{peer}} {{phase}}",
            ),
        ),
        "Computing there, waiting there for others, or the way there and back.",
    ),
    Panel("Round trip", "s", _now("hearthnet_link_rtt_seconds", "instance", "peer")),
    Panel("Peers", "short", _now("hearthnet_peer_up", "instance", "peer")),
    Panel("Caches", "bytes", _now("hearthnet_kv_bytes", "instance", "state")),
    Panel("Cache positions", "short", _now("hearthnet_kv_positions", "instance", "state")),
    Panel(
        "Replays",
        "cps",
        (
            *_rate("hearthnet_replays_total", "reason"),
            (f"sum (rate(hearthnet_pipelines_aborted_total{_RATE}))", "aborted"),
            (f"sum (rate(distributed_inference_fallback_to_local_total{_RATE}))", "at home"),
        ),
    ),
    Panel("How generations end", "cps", _rate("hearthnet_generations_ended_total", "outcome")),
    Panel(
        "Wrong answers of hops",
        "cps",
        ((f"sum (rate(distributed_inference_shard_corruption_detected_total{_RATE}))", "refused"),),
    ),
    Panel(
        "Jobs of nnsight clients",
        "short",
        (
            *_now("hearthnet_jobs_running", "instance"),
            (f"sum (hearthnet_jobs_waiting{{{_NODE}}})", "waiting"),
        ),
    ),
)


def page() -> str:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"value": "$__all"}}
    dashboard: dict[str, Any] = {
        "title": "hearthnet",
        "uid": "hearthnet",
        "tags": ["hearthnet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "label": "node",
                    "datasource": source,
                    "query": "label_values(hearthnet_peers_up, instance)",
                    "refresh": 2,
                    **every,
                },
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(PANELS)],
    }
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _ACROSS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": expr,
                "legendFormat": legend,
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }
