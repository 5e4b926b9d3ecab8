"""Drafted tokens over two nodes: tokens a second with and without, on text that repeats itself and
on text that does not."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.noise import wait_for_idle

LAYERS = {"a": "0-3", "b": "4-7", "asker": "none"}
TOKENS = 300
ROUNDS = 9
ENVIRONMENT = {
    "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY": "0",
    "OMP_NUM_THREADS": "1",
}
TEXTS: dict[str, dict[str, Any]] = {
    # The built-in model goes on with sums that differ in a number; of the second text a third
    # repeats itself; at this temperature nothing does.
    "repetitive": {"prompt": "A list of numbers: 1 2 3 4 5 6 7 8 9 10", "temperature": 0},
    "repetitive in part": {"prompt": [40 + i for i in range(24)] * 4, "temperature": 0},
    "prose": {"prompt": [300 + 7 * i for i in range(48)], "temperature": 1.5},
}


def answered(asker: LocalNode, text: str, seed: int, *, draft: bool) -> dict[str, Any]:
    """The token ids and the timings of one answer."""
    body = {"model": "builtin", "max_tokens": TOKENS, "ignore_eos": True, "seed": seed,
            "hearthnet": {"draft": draft}, **TEXTS[text]}  # fmt: skip
    response = asker.post("/v1/completions", body)
    response.raise_for_status()
    facts: dict[str, Any] = response.json()["hearthnet"]
    assert len({hop["node"] for hop in facts["route"]}) == 2, facts["route"]
    return facts


def compared(asker: LocalNode, text: str) -> dict[str, Any]:
    """Medians over rounds in which both ways alternate, and go first in turn."""
    ratios, plain, shares = [], [], []
    for number in range(ROUNDS):
        wait_for_idle()
        order = (True, False) if number % 2 else (False, True)
        facts = {draft: answered(asker, text, number, draft=draft) for draft in order}
        assert facts[True]["token_ids"] == facts[False]["token_ids"]
        speed = {draft: facts[draft]["timings"]["tokens_per_second"] for draft in order}
        ratios.append(speed[True] / speed[False])
        plain.append(speed[False])
        shares.append(facts[True]["timings"]["accepted_tokens"] / TOKENS)
    return {
        "speed_ratio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_second_without": round(statistics.median(plain), 1),
        "share_drafted_right": round(statistics.median(shares), 3),
    }


def measure() -> dict[str, Any]:
    """How many times as fast answers are with drafts, by the kind of text."""
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        nodes = [
            LocalNode(name, Path(root) / name, ("--layers", layers, "--threads", "1"), ENVIRONMENT)
            for name, layers in LAYERS.items()
        ]
        start_hearth(nodes, stack)
        asker = nodes[-1]
        asker.wait_ready()
        for text in TEXTS:
            answered(asker, text, 0, draft=True)
        return {text: compared(asker, text) for text in TEXTS} | {"rounds": ROUNDS}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
