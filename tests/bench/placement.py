"""Layouts: how long they take, how far from the best they are, and what they foretell against what
is measured.

The plans are of houses drawn with a seed. The last part starts three real nodes on this machine
that share the layers of the 0.16B shape as the plan has them, so all three use the same cores: what
a token takes is foretold from what was measured beforehand, then from what its steps took.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from mesh.capacity import Device, Speed
from mesh.cli.local_node import LocalNode, start_hearth
from mesh.routing.fitting import benches
from mesh.routing.machines import Demand, HeldLayers, Machine, ModelShape
from mesh.routing.placement import lay_out
from mesh.types import LayerRange, NodeId
from tests.routing.shapes import model_of

MB = 1 << 20
NODES, LAYERS, MODELS = 50, 100, 5
SMALL_HOUSES = 60
TOKENS = 48
ROUNDS = 3


def measure() -> dict[str, Any]:
    """Seconds and milliseconds; shares of the best; tokens/s and their ratio."""
    return {
        "planner": _duration(held=False),
        "planner with layers on disk": _duration(held=True),
        "against every way there is": _against_all(),
        "foretold and measured": _foretold(),
    }


def _model(layers: int, mb: int) -> ModelShape:
    return model_of(
        "m", (mb * MB,) * layers, "bf16", ends_bytes=500 * MB, head_bytes=500 * MB,
        scratch_bytes=50 * MB,
    )  # fmt: skip


def _machine(draw: Random, number: int, *, held: LayerRange | None) -> Machine:
    gb_s, free = draw.choice((5, 10, 20, 60)), int(draw.choice((2, 4, 8, 16)) * 1024 * MB)
    speeds = (
        Speed("fp32", gb_s, 50.0, 0.3), Speed("int8", 0.9 * gb_s, 50.0, 0.05),
        Speed("int4", 0.8 * gb_s, 50.0, 0.05),
    )  # fmt: skip
    node = NodeId(f"n{number:02}")
    return Machine(
        node, node, (Device("cpu", free, free, speeds),), draw.choice((0.3, 0.3, 3.0, 8.0)),
        held=() if held is None else (HeldLayers(held),),
    )  # fmt: skip


def _duration(*, held: bool) -> dict[str, Any]:
    draw, took = Random(1), []
    machines = [
        _machine(draw, n, held=LayerRange(2 * n, 2 * n + 2) if held else None) for n in range(NODES)
    ]
    for number in range(MODELS):
        started = time.process_time()
        found = lay_out(_model(LAYERS, 200 + 20 * number), machines, Demand())
        took.append(time.process_time() - started)
        assert found.refusal is None, found.refusal
    return {"nodes": NODES, "layers": LAYERS, "models": MODELS, "cpu_s": round(sum(took), 3)}


def _against_all() -> dict[str, Any]:
    """Over small houses: what the plan takes, divided by what the best of all ways takes."""
    ratios, refused, draw = [], 0, Random(2)
    for _ in range(SMALL_HOUSES):
        shape = _model(draw.randrange(2, 7), draw.choice((300, 900)))
        machines = [
            _machine(draw, n, held=LayerRange(0, draw.randrange(1, shape.total_layers + 1)))
            for n in range(draw.randrange(1, 5))
        ]
        wish = Demand(quant="none")
        best = min(_ways(shape, machines, wish), default=None)
        found = lay_out(shape, machines, wish)
        refused += best is None
        assert (best is None) == (found.refusal is not None)
        if best is not None:
            ratios.append(found.replicas[0].token_ms / best)
    return {
        "houses": SMALL_HOUSES, "nothing fits": refused,
        "worst": round(max(ratios), 4), "median": round(statistics.median(ratios), 4),
    }  # fmt: skip


def _ways(shape: ModelShape, machines: list[Machine], demand: Demand) -> list[float]:
    places = [bench for each in machines for bench in benches(shape, each, demand, "none")]
    total, found = shape.total_layers, []
    for count in range(1, min(total, len(places)) + 1):
        for cuts in itertools.combinations(range(1, total), count - 1):
            spans = list(itertools.starmap(LayerRange, itertools.pairwise((0, *cuts, total))))
            for chosen in itertools.permutations(places, count):
                parts = list(zip(chosen, spans, strict=True))
                if all(b.need(span).total <= b.have_bytes for b, span in parts):
                    found.append(sum(b.cost(span) for b, span in parts))
    return found


def _foretold() -> dict[str, Any]:
    from tests.checkpoints import make_large_checkpoint

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = str(make_large_checkpoint(Path(folder) / "model", "0.16B", "bfloat16"))
        nodes = [
            LocalNode(
                name, Path(folder) / name, ("--model", f"{checkpoint}=bench", *more),
                {"HEARTHNET_QUANT": "int8", "HEARTHNET_THREADS": "1"},
            )
            for name, more in (
                ("one", ("--layers", "none")), ("two", ("--layers", "0-5")),
                ("three", ("--layers", "6-11")),
            )
        ]  # fmt: skip
        start_hearth(nodes, stack)
        asker = nodes[0]
        for node in nodes:
            node.wait_ready()
        ask = {"model": "bench", "quant": "int8", "layers": ["two=0-5", "three=6-11"],
               "context": 512}  # fmt: skip
        before = _plan(asker, ask)
        measured = [_speed(asker) for _ in range(1 + ROUNDS)][1:]
        time.sleep(12.0)  # what steps took is told with the next advertisement
        after = _plan(asker, ask)
    speed = statistics.median(measured)
    return {
        "measured_tok_s": round(speed, 2),
        "foretold_from_capacity": _ratio(before, speed),
        "foretold_from_its_own_steps": _ratio(after, speed),
    }


def _plan(node: LocalNode, ask: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 90.0
    while True:
        response = node.post("/mesh/v1/plan", ask)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        if answer["refusal"] is None or time.monotonic() > deadline:
            return answer
        time.sleep(1.0)  # the machine has not measured itself yet


def _ratio(answer: dict[str, Any], speed: float) -> dict[str, Any]:
    if not answer["replicas"]:
        return {"refused": answer["refusal"]}
    replica = answer["replicas"][0]
    return {
        "tok_s": round(replica["tokens_per_second"], 2),
        "ratio": round(replica["tokens_per_second"] / speed, 3),
        "shards": [[s["node"], s["layers"], round(s["decode_ms"], 2), round(s["hop_ms"], 2)]
                   for s in replica["shards"]],
        "head_ms": round(replica["head_ms"], 2),
        "asker_ms": round(replica["asker_ms"], 2),
    }  # fmt: skip


def _speed(node: LocalNode) -> float:
    """Tokens a second of one answer, by the asker's own clock, without drafts."""
    body = {
        "model": "bench", "prompt": list(range(100, 116)), "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "hearthnet": {"draft": False},
    }  # fmt: skip
    response = node.post("/v1/completions", body)
    response.raise_for_status()
    timings = response.json()["hearthnet"]["timings"]
    return float(timings["tokens_per_second"])
