"""What links of 3 ms one way cost: 8 answers at once, and what drafts give back to a single one.

Two shards live in network namespaces, the asker outside; all that passes between them goes through
`tests.chaos.bad_cable`, which carries each packet at once or so much later, in order: what carrying
costs is in both. Needs root and TUN devices, and says so where it has none. Both ways of a
comparison alternate and go first in turn; ratios are taken within a round, and medians over rounds
reported. What other programs had of the machine meanwhile is told as a share of one core.

Drafts must not change an answer.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.drafts import TEXTS
from tests.bench.noise import Meter, wait_for_idle
from tests.chaos import bad_cable, namespaces
from tests.chaos.namespaces import Namespace, ip
from tests.checkpoints import make_large_checkpoint

DELAY_S = 0.003
STREAMS = 8
ROUNDS = 3
TOKENS, TOKENS_EACH = 300, 160
ENVIRONMENT = {
    "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class PlacedNode(LocalNode):
    """A node at these `addresses` of a namespace, or of this machine."""

    addresses: tuple[str, ...] = ()
    space: Namespace | None = None

    def launch(
        self, command: list[str], environment: dict[str, str], tether: int, log: int
    ) -> subprocess.Popen[bytes]:
        """See `LocalNode`."""
        at = command.index("--interface")
        flags = [flag for address in self.addresses for flag in ("--interface", address)]
        placed = [*command[:at], *flags, *command[at + 2 :]]
        inside = placed if self.space is None else [*self.space.inside(*placed)]
        return super().launch(inside, environment, tether, log)


@dataclass(frozen=True, slots=True)
class Household:
    """An asker and the namespaces of its two shards."""

    asker: LocalNode
    spaces: Sequence[Namespace]
    model: str
    pids: list[int]

    @contextlib.contextmanager
    def links(self, delay_s: float) -> Iterator[None]:
        """Meanwhile everything between asker and shards takes so long, one way, and is carried in
        the same way where that is 0."""
        with contextlib.ExitStack() as stack:
            for space in self.spaces:
                stack.enter_context(bad_cable.lossy(space, loss=0.0, delay_s=delay_s))
            yield

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is told of one answer, of `TOKENS` unless the body says otherwise."""
        asked = {"model": self.model, "max_tokens": TOKENS, "ignore_eos": True, **body}
        response = self.asker.post("/v1/completions", asked)
        assert response.status_code == 200, response.text
        facts: dict[str, Any] = response.json()["hearthnet"]
        assert len({hop["node"] for hop in facts["route"]}) == 2, facts["route"]
        return facts


@contextlib.contextmanager
def household(root: Path, halves: Sequence[str], model: str, *flags: str) -> Iterator[Household]:
    """Three daemons; the shards hold these `halves` of the layers."""
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(Namespace(number)) for number in (1, 2)]
        for space in spaces:
            ip("-n", space.name, "route", "add", "default", "via", space.here)
        common = ("--threads", "1", *flags)
        here = tuple(space.here for space in spaces)
        asker = PlacedNode(
            "asker", root / "asker", (*common, "--layers", "none"), ENVIRONMENT, addresses=here
        )
        shards = [
            PlacedNode(
                name, root / name, (*common, "--layers", layers), ENVIRONMENT,
                addresses=(space.there,), space=space,
            )
            for name, layers, space in zip("ab", halves, spaces, strict=True)
        ]  # fmt: skip
        start_hearth([asker, *shards], stack)
        asker.wait_ready()
        pids = []
        for node in (asker, *shards):
            assert node.process is not None
            daemon = psutil.Process(node.process.pid)
            pids += [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
        yield Household(asker, spaces, model, pids)


def streams(house: Household, delay_s: float, number: int) -> float:
    """Tokens a second of `STREAMS` answers together."""
    bodies = [
        {"prompt": [300 + 7 * i + stream for i in range(16 + stream)], "temperature": 1.5,
         "seed": number, "max_tokens": TOKENS_EACH, "hearthnet": {"draft": False}}
        for stream in range(STREAMS)
    ]  # fmt: skip
    with house.links(delay_s), ThreadPoolExecutor(STREAMS) as pool:
        began = time.monotonic()
        list(pool.map(house.answer, bodies))
        return STREAMS * TOKENS_EACH / (time.monotonic() - began)


def compared(
    house: Household, one: Callable[[int], float], other: Callable[[int], float]
) -> dict[str, Any]:
    """`one` as a multiple of `other`, round by round."""
    ratios, others, foreign = [], [], []
    for number in range(ROUNDS):
        wait_for_idle(limit_s=3.0)
        meter = Meter(house.pids)
        first, second = (one, other) if number % 2 else (other, one)
        speeds = {first: first(number), second: second(number)}
        ratios.append(speeds[one] / speeds[other])
        others.append(speeds[other])
        foreign.append(meter.foreign())
    return {
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_second_of_the_other": round(statistics.median(others), 1),
        "foreign": round(statistics.median(foreign), 2),
    }


def many_answers(house: Household) -> dict[str, Any]:
    """Aggregate of 8 answers behind slow links beside quick ones."""
    return compared(
        house,
        lambda number: streams(house, DELAY_S, number),
        lambda number: streams(house, 0.0, number),
    )


def drafts(house: Household, text: str, delay_s: float) -> dict[str, Any]:
    """One answer with drafts beside the same without."""
    ids: dict[int, list[int]] = {}
    shares = []

    def speed(number: int, *, draft: bool) -> float:
        body = {**TEXTS[text], "seed": number, "hearthnet": {"draft": draft}}
        with house.links(delay_s):
            facts = house.answer(body)
        known = ids.setdefault(number, facts["token_ids"])
        assert facts["token_ids"] == known, "drafts changed the answer"
        if draft:
            shares.append(facts["timings"]["accepted_tokens"] / TOKENS)
        per_second: float = facts["timings"]["tokens_per_second"]
        return per_second

    found = compared(house, partial(speed, draft=True), partial(speed, draft=False))
    return found | {"share_drafted_right": round(statistics.median(shares), 3)}


def measure() -> dict[str, Any]:
    """The built-in model, then 0.16 B parameters in 16 and in 8 bit."""
    reason = namespaces.why_not() or bad_cable.why_not()
    if reason:
        return {"not measured": reason}
    found: dict[str, Any] = {"delay_ms": DELAY_S * 1e3, "rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with household(root / "small", ("0-3", "4-7"), "builtin") as house:
            found["built-in"] = {
                f"{text}, {kind} links": drafts(house, text, delay_s)
                for text in TEXTS
                for kind, delay_s in (("slow", DELAY_S), ("quick", 0.0))
            } | {"8 answers, slow beside quick links": many_answers(house)}
        directory = make_large_checkpoint(root / "checkpoint", "0.16B")
        for quant in ("none", "int8"):
            large = ("--model", f"{directory}=bench", "--quant", quant)
            with household(root / quant, ("0-5", "6-11"), "bench", *large) as house:
                found[f"0.16 B, quant {quant}"] = {
                    "8 answers, slow beside quick links": many_answers(house)
                }
    return found


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
