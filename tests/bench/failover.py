"""How long an answer pauses when a hop is killed, in units of what must be computed anyway.

The shard process of a hop is killed in the middle of an answer. Its socket closes at once, a
stand-in is asked and is sent the hop's inputs again. That replay is one prefill of the span, so the
pause is given as a multiple of one prefill of as many positions through the same span, measured on
the same stand-in in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mesh.models.builtin import checkpoint_dir
from mesh.types import Done, GenerationRequest, LayerRange, SamplingParams, TokenDelta, shard_id
from tests import secure
from tests.chaos.lab import MODEL, Lab, open_lab

PROMPT_TOKENS = 384
AFTER_TOKENS = 16
REPEATS = 5
SPAN = "3-5"
TARGET_EXTRA_S = 0.25
FORMATS = {"fp32": ("fp32", "none"), "auto": ("auto", "none"), "int8": ("auto", "int8"),
           "int4": ("auto", "int4")}  # fmt: skip
"""Dtype and quant by what they are called."""


def measure(repeats: int = REPEATS) -> dict[str, Any]:
    """For each format medians: the pause, one prefill of the span, their ratio, and what is beyond
    that prefill."""
    found = {}
    for name, numbers in FORMATS.items():
        with tempfile.TemporaryDirectory(prefix="hearthnet-bench-") as directory:
            found[name] = asyncio.run(_measure(Path(directory), repeats, *numbers))
    return found


async def _measure(directory: Path, repeats: int, dtype: str, quant: str) -> dict[str, Any]:
    pauses, prefills, failovers = [], [], []
    load = {"directory": str(checkpoint_dir()), "model_id": MODEL, "layers": SPAN, "dtype": dtype,
            "quant": quant}  # fmt: skip
    async with open_lab(directory, dtype, quant) as lab:
        for number in range(repeats):
            pause_s, count = await _pause(lab, directory, number, load)
            pauses.append(pause_s)
            failovers.append(count)
            prefills.append(await _prefill(lab, number))
    pause, prefill = statistics.median(pauses), statistics.median(prefills)
    return {
        "replayed_positions": PROMPT_TOKENS + AFTER_TOKENS,
        "failovers": failovers,
        "pause_ms": round(pause * 1e3, 1),
        "prefill_of_the_span_ms": round(prefill * 1e3, 1),
        "pause_in_prefills": round(pause / prefill, 2),
        "beyond_the_prefill_ms": round((pause - prefill) * 1e3, 1),
        "target_beyond_ms": TARGET_EXTRA_S * 1e3,
        "within_target": pause - prefill <= TARGET_EXTRA_S,
    }


async def _pause(lab: Lab, directory: Path, number: int, load: dict[str, Any]) -> tuple[float, int]:
    """Seconds from the kill of the middle hop's process to the next token; and the failovers."""
    killed_at = next_at = 0.0
    async with secure.hosting(directory, load) as victim:
        theirs = victim.shards[shard_id(MODEL, LayerRange.parse(SPAN))].descriptor
        shards = [lab.advertise(name, span, lab.port) for name, span in _ROUTE.items()]
        shards.append(lab.advertise("b", SPAN, int(theirs.endpoint.rpartition(":")[2])))
        async with lab.asker(shards, stall_limit_s=30.0) as engine:
            tokens = failovers = 0
            async for frame in engine.chat(_request(number)):
                if isinstance(frame, TokenDelta):
                    tokens += 1
                    if killed_at and not next_at and tokens > AFTER_TOKENS:
                        next_at = time.perf_counter()
                    if tokens == AFTER_TOKENS:
                        assert victim.pid is not None
                        os.kill(victim.pid, signal.SIGKILL)
                        killed_at = time.perf_counter()
                elif isinstance(frame, Done):
                    failovers = frame.failovers
    return next_at - killed_at, failovers


async def _prefill(lab: Lab, number: int) -> float:
    """Seconds that the stand-in takes for as many positions through the same span, alone."""
    shards = [lab.advertise(name, span, lab.port) for name, span in _ROUTE.items()]
    async with lab.asker(shards, stall_limit_s=30.0) as engine:
        async for _ in engine.chat(_request(number + 100, PROMPT_TOKENS + AFTER_TOKENS, 1)):
            pass
        # Chunks overlap in the hops; the sum of a hop's compute times is what one prefill costs.
        (steps,) = (hop.steps for hop in engine.take_steps() if hop.node == "y")
        return sum(compute_ms for _, compute_ms, _ in steps) / 1e3


def _request(seed: int, rows: int = PROMPT_TOKENS, count: int = 2 * AFTER_TOKENS) -> Any:
    return GenerationRequest(
        f"bench-{seed}",
        MODEL,
        prompt_ids=tuple(5 + (seed * 7919 + 31 * i) % 300 for i in range(rows)),
        sampling=SamplingParams(max_tokens=count, ignore_eos=True),
    )


_ROUTE = {"a": "0-2", "c": "6-7", "y": SPAN}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
