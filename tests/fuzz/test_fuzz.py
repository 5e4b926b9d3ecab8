"""No bytes break a decoder: random ones here, in `make chaos` those that coverage leads to."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import PairingRejected
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS, attempt

SECONDS = 20
SEEDS = seeds()
EXAMPLES = 60
MANY_EXAMPLES = 5_000


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """A good input with some bytes changed, cut out or put in, or anything at all."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=400))
    data = bytearray(draw(st.sampled_from(SEEDS[target])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_reach_the_target(target: str) -> None:
    """Where every seed was refused at once, nothing behind the first check would be searched."""
    for seed in SEEDS[target]:
        proves = seed in SEEDS["pairing"][2:]  # that its sender knows another invitation's code
        with pytest.raises(PairingRejected, match="code") if proves else nullcontext():
            TARGETS[target](seed)


@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_break_a_decoder(target: str) -> None:
    _search(target, EXAMPLES)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS)
def test_a_long_search_finds_nothing(target: str) -> None:
    if importlib.util.find_spec("atheris") is None:
        _search(target, MANY_EXAMPLES)
        print(f"{target}: {MANY_EXAMPLES} examples without coverage; no atheris here")
        return
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", target, str(SECONDS)],
        capture_output=True, text=True, timeout=SECONDS + 120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    stats = re.findall(r"stat::(number_of_executed_units|peak_rss_mb): +(\d+)", done.stderr)
    print(f"{target}: {dict(stats)}")


def _search(target: str, examples: int) -> None:
    @settings(max_examples=examples, database=None)
    @given(damaged(target))
    def search(data: bytes) -> None:
        attempt(target, data)

    search()
