"""What a token costs behind a short and behind a long context, over two nodes of one core each.

The shards' computing grows with the context by what attention reads; all else (links, scheduling,
head, sampling) should not. Both are told in milliseconds a token, and the second beside that of the
shortest context.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode
from tests.bench.mesh_speed import SHAPES, mesh_run
from tests.bench.noise import wait_for_idle
from tests.bench.peers import FORMATS, mesh
from tests.checkpoints import make_large_checkpoint

SHAPE = "0.16B"
CONTEXTS = (64, 1024, 4096, 8000)
TOKENS = 48
ROUNDS = 3


def measure() -> dict[str, Any]:
    """By format and context, medians over rounds in which the contexts follow each other."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        directory = make_large_checkpoint(Path(name) / SHAPE, SHAPE)
        for flags in FORMATS.values():
            with mesh(directory, Path(name), SHAPES[SHAPE], flags) as asker:
                found[" ".join(flags)] = _compared(asker)
    return found


def _compared(asker: LocalNode) -> dict[str, Any]:
    rng = random.Random(0)
    rows: dict[int, list[tuple[float, float]]] = {context: [] for context in CONTEXTS}
    for _ in range(ROUNDS):
        for context, told in rows.items():
            wait_for_idle(limit_s=5.0)
            facts = mesh_run(asker, [rng.randrange(3, 30000) for _ in range(context)], TOKENS)
            computing = sum(hop["compute_p50_ms"] for hop in facts["hops"])
            told.append((computing, 1e3 / facts["tokens_per_second"] - computing))
    medians = {
        context: [statistics.median(column) for column in zip(*told, strict=True)]
        for context, told in rows.items()
    }
    base = medians[CONTEXTS[0]][1]
    return {
        str(context): {
            "shards_ms": round(computing, 2),
            "all_else_ms": round(rest, 2),
            "all_else_beside_the_shortest": round(rest / base, 2),
        }
        for context, (computing, rest) in medians.items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
