"""What follows from a status: the readiness, the bars, the bottleneck."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mesh.api.services import RESTING
from tests.tui.house import hop, peer, shard, whole
from tui.picture import GAP, Picture, bottleneck, coverages, nodes, readiness
from tui.words import away, happened, loading


def picture(**parts: Any) -> Picture:
    return Picture({**whole(), **parts})


def model(runnable: bool, reason: str | None, *missing: str) -> dict[str, Any]:
    return {"id": "m", "total_layers": 8, "runnable": runnable, "missing": list(missing),
            "reason": reason, "context": None, "nodes": [], "local": True}  # fmt: skip


@pytest.mark.parametrize(
    ("models", "state", "words"),
    [
        ([], "bad", "no model is held by anybody: hearthnet run MODEL"),
        ([model(False, "loading")], "wait", "starting · m: loading"),
        ([model(False, "missing layers 4-7", "4-7")], "bad", "not working · m: missing layers 4-7"),
        ([model(False, RESTING)], "other", f"at rest · m: {RESTING}"),
        ([model(True, None)], "ok", "working · m · 3 nodes · 1 answer at 18.5 tok/s"),
    ],
)
def test_the_verdict_is_one_line(models: list[Any], state: str, words: str) -> None:
    found = readiness(picture(models=models))
    assert found.state == state
    assert words in found.words


def test_who_is_linked_and_does_not_answer_is_not_counted_as_here() -> None:
    attic, *others = whole()["peers"]
    for verdict, state, here in (("suspect", "wait", 3), ("lost", "bad", 2)):
        found = picture(peers=[{**attic, "verdict": verdict}, *others], models=[model(True, None)])
        assert nodes(found)[1].state == state
        assert f" · {here} nodes · " in readiness(found).words


def test_a_model_at_rest_is_no_trouble() -> None:
    (found,) = coverages(picture(models=[model(False, RESTING, "0-7")]))
    assert found.state == "other"


def test_before_the_first_update_nothing_is_claimed() -> None:
    assert readiness(Picture()).state == "wait"
    assert nodes(Picture()) == []
    assert coverages(Picture()) == []


@pytest.mark.parametrize(
    ("width", "bar"),
    [
        (8, "AAAABB··"),
        (4, "AAB·"),
        (17, "AAAAAAAABBBB····"),
        (1, "·"),
        (100, "A" * 16 + "B" * 8 + "·" * 8),
    ],
)
def test_a_bar_shows_gaps_at_every_width(width: int, bar: str) -> None:
    held = picture(
        shards=[shard("m", "0-3")],
        peers=[peer("attic", "a", 1.0, [shard("m", "4-5")])],
        models=[model(False, "missing layers 6-7", "6-7")],
    )
    (found,) = coverages(held)
    assert "".join(cell[0] for cell in found.cells(width)) == bar.replace("·", GAP)
    assert "missing layers 6-7" in found.words


def test_who_holds_a_layer_as_well_is_known() -> None:
    spare = peer("attic", "a", 1.0, [shard("m", "2-7")])
    held = picture(shards=[shard("m", "0-3")], peers=[spare], models=[model(True, None)])
    (found,) = coverages(held)
    assert found.cells(8) == ["A", "A", "AB", "AB", "B", "B", "B", "B"]
    assert "2 layers held more than once" in found.words


def test_nobody_blames_a_cable_between_a_machine_and_itself() -> None:
    running = {"route": [hop("sofa", "0-7", 20.0, 2.0)], "tokens_per_second": 40.0}
    slowest = bottleneck(running, "sofa")
    assert slowest is not None
    assert "cable" not in slowest.words


def test_a_node_that_is_gone_holds_nothing() -> None:
    gone = peer("attic", "a", None, [shard("m", "0-7")], state="unreachable")
    (found,) = coverages(picture(shards=[], peers=[gone], models=[model(False, "missing", "0-7")]))
    assert set(found.cells(8)) == {GAP}


@pytest.mark.parametrize(
    ("route", "speed", "place", "words"),
    [
        ([hop("a", "0-3", 5.0, 4.0), hop("b", "4-7", 20.0, 2.0)], 30.0, 1, "a cable would help"),
        ([hop("a", "0-3", 50.0, 49.0), hop("b", "4-7", 2.0, 1.0)], 19.0, 0, "fewer layers there"),
        ([hop("a", "0-7", 50.0, 49.0)], 19.0, 0, "a faster machine would help"),
        ([hop("a", "0-7", 5.0, 4.0)], 10.0, 0, "embedding and head"),
        ([hop("a", "0-7", 5.0, 4.0)], None, 0, "a faster machine"),
    ],
)
def test_the_bottleneck_says_what_would_help(
    route: list[Any], speed: float | None, place: int, words: str
) -> None:
    found = bottleneck({"route": route, "tokens_per_second": speed})
    assert found is not None
    assert found.place == place
    assert words in found.words


def test_without_times_there_is_no_bottleneck() -> None:
    assert bottleneck({"route": [], "tokens_per_second": None}) is None
    assert bottleneck({"route": [hop("a", "0-7", 0.0, 0.0)], "tokens_per_second": None}) is None


def test_more_nodes_than_letters_are_shown() -> None:
    many = [peer(f"n{number:02}", f"k{number}", 1.0, []) for number in range(40)]
    seen = nodes(picture(peers=many))
    assert len(seen) == 41
    assert seen[25].letter == "Z"
    assert seen[40].letter == "*"


@pytest.mark.parametrize(
    ("phase", "done", "total", "words"),
    [
        ("", 0, 0, "m:0-3 · needs 50 MiB · for 3 s"),
        ("reading", 999, 1000, "m:0-3 · 99 % read (0.0 of 0.0 MB) · needs 50 MiB · for 3 s"),
        ("packing", 12.4e9, 40e9, "m:0-3 · 31 % packed (12.4 of 40.0 GB) · needs 50 MiB · for 3 s"),
        ("reading", 5e6, 5e6, "m:0-3 · 100 % read (5.0 of 5.0 MB) · needs 50 MiB · for 3 s"),
    ],
)
def test_a_load_says_how_far_it_is(phase: str, done: float, total: float, words: str) -> None:
    load = {"name": "m:0-3", "need_mb": 50, "age_s": 3.1, "phase": phase,
            "done_bytes": int(done), "total_bytes": int(total)}  # fmt: skip
    assert loading(load) == words


def test_a_neighbours_node_is_no_trouble_and_comes_last() -> None:
    strangers = [
        peer(
            "next door", letter * 52, None, [], state="other hearth", reason="it belongs to another"
        )
        for letter in "0z"
    ]
    seen = nodes(picture(peers=[strangers[0], *picture().rows("peers"), strangers[1]]))
    assert [(node.name, node.state, node.word) for node in seen[-2:]] == [
        ("next door", "other", "other hearth")
    ] * 2
    assert "next door" not in [node.name for node in seen[:-2]]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "shard_status", "shard_id": "a:b:6-11", "node": "gamma", "status": "degraded",
          "reason": "The connection broke."},
         "gamma dropped out (The connection broke); looking for others with layers 6-11"),
        ({"type": "shard_status", "shard_id": "toy:6-11", "node": "gamma", "status": "full",
          "reason": "No room."}, "gamma has no more room for layers 6-11; looking for others"),
        ({"type": "shard_status", "shard_id": "toy:6-11", "node": "gamma", "status": "draining",
          "reason": "it is stopping"}, "gamma is stopping; layers 6-11 are moved"),
        ({"type": "shard_failover", "lost": "toy:6-11", "replaced_by": ["toy:6-11"]},
         "layers 6-11 are asked elsewhere now"),
        ({"type": "shard_failover", "lost": "toy:6-11", "replaced_by": ["toy:6-8", "toy:9-11"]},
         "layers 6-11 are asked elsewhere now, over layers 6-8 and 9-11"),
        ({"type": "queued", "position": 2}, "all shards are full; number 2 in line"),
        ({"type": "bringing_up", "model": "toy", "phase": "LOADING", "percent": None},
         "toy is not up yet: LOADING"),
        ({"type": "pipeline_aborted", "reason": "no replacement"},
         "the distributed run ended: no replacement"),
    ],
)  # fmt: skip
def test_what_happens_to_a_route_is_told_in_words(event: dict[str, Any], said: str) -> None:
    assert happened(event) == said


def test_who_is_away_is_said_with_for_how_long_where_that_is_known() -> None:
    seven = datetime(2030, 1, 1, 7, tzinfo=UTC)
    laptop = {"id": "l", "name": "lap\x1b[2Jtop", "last_seen": seven.isoformat()}
    phone = {"id": "p", "name": "phone", "last_seen": None}
    assert away([laptop, phone], seven + timedelta(hours=3)) == ["lap[2Jtop (3 h)", "phone"]
    assert away([laptop], seven - timedelta(hours=3)) == ["lap[2Jtop (0 s)"], "a clock was set"
