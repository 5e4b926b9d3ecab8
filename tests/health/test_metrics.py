"""What is on /metrics, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mesh.health.metrics import Metrics, NodeNow, PeerNow
from mesh.health.series import PRESENT, SERIES, HopSteps
from mesh.types import Done, PromptPiece, ShardFailover, ShardId, TokenDelta
from tests.fakes import done

SHARD = ShardId("m:0-3")


def samples_of(metrics: Metrics, present: NodeNow | None = None) -> dict[str, float]:
    """Values by ``name{label=value,...}``, as they are read from the text."""
    text = (metrics.render() if present is None else metrics.render(present)).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}"
            assert name not in found  # Prometheus refuses all of such a text
            found[name] = sample.value
    return found


def test_every_series_has_a_unit_or_counts() -> None:
    names = [each.name for each in (*SERIES, *PRESENT)]
    assert len(set(names)) == len(names)
    for each in (*SERIES, *PRESENT):
        assert each.name.startswith(("hearthnet_", "distributed_inference_"))
        assert each.help.endswith(".")
        assert set(each.labels) <= {
            "shard_id", "peer", "phase", "kind", "outcome", "reason", "status", "state"
        }  # fmt: skip
        if each.kind == "histogram":
            assert each.name.endswith(("_seconds", "_ms", "_per_second"))


def test_the_times_of_a_step_are_told_apart() -> None:
    metrics = Metrics()
    metrics.steps(HopSteps(SHARD, "attic", [(10.0, 6.0, 1.0), (30.0, 20.0, 0.0)]))
    found = samples_of(metrics)
    assert found["distributed_inference_shard_latency_ms_sum{shard_id=m:0-3}"] == 40
    sums = {
        phase: found[f"hearthnet_hop_seconds_sum{{peer=attic,phase={phase}}}"]
        for phase in ("compute", "queue", "link")
    }
    assert {phase: round(value, 6) for phase, value in sums.items()} == {
        "compute": 0.026, "queue": 0.001, "link": 0.013,
    }  # fmt: skip
    assert found["hearthnet_hop_seconds_count{peer=attic,phase=link}"] == 2


def test_tokens_are_counted_by_kind() -> None:
    metrics = Metrics()
    metrics.frame(PromptPiece("a b", (1, 2)))
    metrics.frame(TokenDelta("x", (1, 2), prompt_tokens=9))
    end = done((1, 2), prompt_tokens=9)
    metrics.frame(end)
    found = samples_of(metrics)
    kinds = {"prompt": 7, "cached": 2, "generated": 2, "drafted": 8, "accepted": 6}
    for kind, count in kinds.items():
        assert found[f"hearthnet_tokens_by_kind_total{{kind={kind}}}"] == count
    assert found["hearthnet_tokens_total{}"] == 2
    assert found["hearthnet_ttft_seconds_count{}"] == 1
    assert found["hearthnet_ttft_seconds_sum{}"] == end.first_token_ms / 1e3


def test_what_said_nothing_had_no_first_token() -> None:
    metrics = Metrics()
    silent: Done = done(())
    metrics.frame(silent)
    assert samples_of(metrics)["hearthnet_ttft_seconds_count{}"] == 0


def test_replays_say_why() -> None:
    metrics = Metrics()
    for reason in ("degraded", "draining", "degraded"):
        metrics.frame(ShardFailover(SHARD, (SHARD,), 7, reason))
    found = samples_of(metrics)
    assert found["hearthnet_replays_total{reason=degraded}"] == 2
    assert found["hearthnet_replays_total{reason=draining}"] == 1
    assert found["distributed_inference_failovers_total{}"] == 3


def test_peers_are_those_of_now_each_once() -> None:
    metrics = Metrics()
    attic, cellar = PeerNow("attic", "aaaaaa", True, 0.002), PeerNow("cellar", "b", False, None)
    found = samples_of(metrics, NodeNow([attic, cellar]))
    assert found["hearthnet_peer_up{peer=attic}"] == 1
    assert found["hearthnet_peer_up{peer=cellar}"] == 0
    assert found["hearthnet_link_rtt_seconds{peer=attic}"] == 0.002
    assert "hearthnet_link_rtt_seconds{peer=cellar}" not in found
    assert found["hearthnet_peers_up{}"] == 1
    twins = [attic, PeerNow("attic", "cccccc", True, 0.1)]
    found = samples_of(metrics, NodeNow(twins))
    assert found["hearthnet_link_rtt_seconds{peer=attic aaaaaa}"] == 0.002
    assert not any("cellar" in name for name in found)


def test_caches_and_generations_have_states() -> None:
    present = NodeNow(
        generations=(("running", 2), ("waiting", 1)),
        kv_bytes=(("active", 1024.0), ("parked", 0.0)),
    )
    found = samples_of(Metrics(), present)
    assert found["hearthnet_generations{state=waiting}"] == 1
    assert found["hearthnet_kv_bytes{state=active}"] == 1024
