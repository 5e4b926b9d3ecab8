"""What follows from deployments and transfers: lines, shares, questions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tui.house import ATTIC, SOFA, deployment, span, weights, whole
from tui.deployed import coming, deployed, downloads, known_models, on_disk, what_ends
from tui.estimate import estimate
from tui.picture import Picture
from tui.widgets.progress import progress
from tui.words import fetching, lasting


def picture(**parts: Any) -> Picture:
    return Picture({**whole(), **parts})


def row(state: str, *spans: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**deployment("d" * 16, "m", (0, 1), state, "COLD", list(spans)), **more}


@pytest.mark.parametrize(
    ("state", "glyph", "words", "is_coming"),
    [
        ("READY", "ok", "ready", False),
        ("PARTLY", "wait", "answers, not all is up", True),
        ("PROVISIONING", "wait", "fetching", True),
        ("FAILED", "bad", "failed", False),
        ("AWAY", "bad", "its node is away", False),
        ("RESTING", "other", "resting", False),
        ("A_NEWER_ONE", "wait", "a_newer_one", False),
    ],
)
def test_a_state_is_a_glyph_and_a_word(state: str, glyph: str, words: str, is_coming: bool) -> None:
    (found,) = deployed(picture(deployments=[row(state)]))
    assert (found.state, found.words, found.is_coming) == (glyph, words, is_coming)
    assert found.level == "COLD, on disk"


def test_until_when_it_stays_up_is_said_beside_its_level() -> None:
    resting = row("READY", level="WARM", rests_at="2030-01-01T14:03:30+00:00")
    (found,) = deployed(picture(deployments=[resting]))
    assert found.level == "WARM, in memory, rests 14:03"
    assert found.replicas == "0 of 1"


def test_how_far_another_node_is_is_not_claimed() -> None:
    rows = [row("QUEUED", span(0, SOFA, "sofa", "0-3", "QUEUED"),
                span(0, ATTIC, "attic", "4-7", "QUEUED"))]  # fmt: skip
    (found,) = deployed(picture(deployments=rows))
    assert [part.words for part in found.parts] == ["waiting", "not up yet"]


@pytest.mark.parametrize(
    ("come", "words", "briefly"),
    [
        ((0, 0), "fetching", "fetching"),
        ((999, 1000), "fetching · 99 % (0.0 of 0.0 MB)", "fetching 99 %"),
        ((1200, 1000), "fetching · 100 % (0.0 of 0.0 MB)", "fetching 100 %"),
    ],
)
def test_a_part_is_never_said_to_have_come_before_it_has(
    come: tuple[int, int], words: str, briefly: str
) -> None:
    for phase, word in (("PROVISIONING", "fetching"), ("DEPLOYING", "loading")):
        rows = [row(phase, span(0, SOFA, "sofa", "0-3", phase, come))]
        (part,) = deployed(picture(deployments=rows))[0].parts
        as_said = words.replace("fetching", word), briefly.replace("fetching", word)
        assert (part.words, part.briefly) == as_said


@pytest.mark.parametrize(("come", "full"), [(0.0, 0), (0.05, 0), (0.5, 8), (0.999, 15), (1.0, 16)])
def test_a_bar_is_full_only_at_the_end(come: float, full: int) -> None:
    assert progress(come).plain == "█" * full + "░" * (16 - full)


def test_what_is_on_its_way_is_a_line_each() -> None:
    assert coming(picture()) == [
        ("wait", "qwen · 0 of 2 replicas · fetching · sofa 12-15 fetching 34 %,"
                 " attic 0-15 not up yet, study 0-3 failed"),
        ("wait", "fetching qwen · 34 % (4.1 of 12.0 GB) · 52.1 MB/s · 3 min left"
                 " · from attic, the hub"),
        ("wait", "fetching phi · 30 % (0.6 of 2.0 GB) · 10.0 MB/s · 2 min left · to attic"),
    ]  # fmt: skip
    failed = row("FAILED", span(0, SOFA, "sofa", "0-3", "FAILED", reason="no room"))
    quiet = picture(deployments=[failed, row("READY"), row("RESTING")], weights={})
    assert coming(quiet) == [("bad", "m · 0 of 1 replica · failed · sofa 0-3 failed")]


def test_a_daemon_that_tells_nothing_of_it_has_nothing() -> None:
    for old in (Picture(), Picture({"node": whole()["node"]})):
        assert deployed(old) == []
        assert downloads(old) == []
        assert on_disk(old) == []
        assert coming(old) == []
        assert known_models(old) == []


def test_what_is_on_disk_says_which_of_it() -> None:
    assert on_disk(picture()) == [
        "llama · all of it",
        "qwen · layers 12-13 of 16 and the ends · 34 % (4.1 of 12.0 GB)",
    ]


def test_a_wish_may_name_what_is_known() -> None:
    assert known_models(picture()) == ["llama", "qwen"]
    held = [{**whole()["weights"]["models"][0], "origin": "org/llama"}]
    there = {"models": held, "transfers": [], "sent_bytes": 0}
    assert known_models(picture(weights=there)) == ["llama", "org/llama", "qwen"]


def test_the_question_before_an_eviction_says_what_ends() -> None:
    llama, qwen = deployed(picture())
    assert what_ends(llama, picture()) == (
        "Evict llama? Unloaded: 0-7 on sofa, 8-15 on attic, 16-23 on kitchen."
        " 1 answer running now must go another way, or ends. What is on disk stays."
    )
    assert "No longer brought up: 12-15 on sofa, 0-15 on attic" in what_ends(qwen, picture())
    (resting,) = deployed(picture(deployments=[row("RESTING", span(0, SOFA, "s", "0", "RESTING"))]))
    assert "Nothing of it is loaded." in what_ends(resting, picture())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"state": "looking", "total_bytes": 0, "bytes_per_s": 0.0, "eta_s": None, "sources": []},
         "qwen · looking for who has it"),
        ({"bytes_per_s": 0.0, "eta_s": None, "note": "no disk"},
         "qwen · 34 % (4.1 of 12.0 GB) · from attic, the hub · no disk"),
    ],
)  # fmt: skip
def test_a_transfer_says_what_is_known_of_it(changed: dict[str, Any], words: str) -> None:
    transfer = {**whole()["weights"]["transfers"][0], **changed}
    assert transfer["weights_sha256"] == weights("qwen")
    assert fetching(transfer) == words


def test_times_are_short() -> None:
    assert [lasting(s) for s in (0.4, 119, 120, 7199, 7200, 9600 * 3600)] == [
        "0 s", "119 s", "2 min", "120 min", "2 h", "400 days",
    ]  # fmt: skip


def test_a_gap_is_told_beside_the_node_that_makes_it() -> None:
    shard = {"node": "attic", "layers": "0-7", "need": {"total": 2e9}, "have": 3e9,
             "fetch_bytes": 0, "gap": True}  # fmt: skip
    replica = {"shards": [shard], "tokens_per_second": 2.0, "first_token_ms": 1200.0,
               "bottleneck": {"help": "a cable"}}  # fmt: skip
    assert estimate({"refusal": None, "replicas": [replica], "machines": []}) == [
        "● replica 1: about 2.0 tok/s, first token 1.2 s",
        "  attic 0-7: needs 1.9 GiB of 2.8 GiB free, with a gap: old and new do not fit at once",
        "  would help: a cable",
    ]
