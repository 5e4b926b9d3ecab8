"""What `hearthnet` alone says at every stage between nothing and a house that answers."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.cli.glance import three_lines

READY = {
    "id": "m", "runnable": True, "missing": [], "reason": None, "local": True, "nodes": ["here"],
}  # fmt: skip
PEER = {"name": "attic", "state": "up"}


def said(
    models: list[dict[str, Any]], *, peers: tuple[dict[str, Any], ...] = (PEER,), **more: Any
) -> list[str]:
    node = {"name": "here", "hearth": {"name": "the house"}, "enabled": True, "paused": False}
    picture = {
        "node": node | more.pop("node", {}), "peers": list(peers), "models": models,
        "shards": [{"model_id": "m", "layers": "0-3"}], "processes": [], **more,
    }  # fmt: skip
    return three_lines(picture).split("\n")


def test_all_is_well() -> None:
    assert said([READY]) == [
        "here is up in the house with attic; it holds m 0-3.",
        "m answers.",
        "next: hearthnet chat",
    ]


def test_a_single_machine_is_told_how_a_second_comes_in() -> None:
    first, *others = said([READY], peers=())
    assert first == "here is up in the house, alone; it holds m 0-3."
    assert others == [
        "m answers from this machine alone.",
        "next: hearthnet chat; `hearthnet invite` lets a second machine in",
    ]


def lacking(**more: Any) -> dict[str, Any]:
    return READY | {"runnable": False} | more


@pytest.mark.parametrize(
    ("model", "now", "following"),
    [
        (
            lacking(missing=["4-7"], reason="missing layers 4-7"),
            "Nobody that it sees holds layers 4-7 of m.",
            "next: on another machine, hearthnet up --layers 4-7",
        ),
        (lacking(reason="loading"), "m is loading.", "next: hearthnet chat; it waits"),
        (
            lacking(reason="failed: no memory"),
            "m does not answer: failed: no memory.",
            "next: hearthnet doctor",
        ),
        (
            lacking(reason="not held here (--model)", local=False, nodes=["attic"]),
            "m is held by attic, and this machine has no files of it.",
            "next: hearthnet down, then hearthnet up --model PATH=m --layers none",
        ),
    ],
)
def test_a_model_that_does_not_answer(model: dict[str, Any], now: str, following: str) -> None:
    assert said([model])[1:] == [now, following]


def test_no_model_at_all() -> None:
    assert said([])[1:] == ["No model is here, nor at anyone it sees.", "next: hearthnet run MODEL"]


def test_what_is_broken_comes_first() -> None:
    hung = {"name": "the shards' process", "state": "ended", "ending": "killed by signal 9"}
    assert said([READY], processes=[hung], node={"paused": True})[1:] == [
        "the shards' process is ended: killed by signal 9.",
        "next: hearthnet doctor",
    ]
    assert said([READY], node={"paused": True})[2] == "next: hearthnet resume"


def test_one_of_two_models() -> None:
    broken = lacking(id="n", missing=["0-1"], reason="missing layers 0-1")
    assert said([READY, broken])[1] == "m answers; n does not: missing layers 0-1."
    assert said([READY], node={"enabled": False})[1] == "m answers here. The mesh is off."
