"""What processes of a node claim of one memory: never more than the limit, however they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import NotEnoughMemory
from mesh.processes.headroom import ram
from mesh.processes.memory_budget import MemoryBudget, MemoryCaps, TakenMemory
from mesh.units import memory_limit_mb

LIMIT_MB = 100

TAKER = """
import random, sys
from pathlib import Path
from mesh.processes.memory_budget import MemoryBudget
budget, mine, most = MemoryBudget(Path(sys.argv[1]), 100, "here"), [], 0
dice = random.Random(int(sys.argv[2]))
for _ in range(150):
    if mine and dice.random() < 0.4:
        mine.pop(dice.randrange(len(mine))).release()
    elif (claim := budget.take(dice.randint(1, 60))) is not None:
        mine.append(claim)
    most = max(most, budget.standing().taken_mb)
print(most)
"""
HOLDER = """
import sys, time
from pathlib import Path
from mesh.processes.memory_budget import MemoryBudget
claim = MemoryBudget(Path(sys.argv[1]), 100, "here").take(70)
print(claim is not None, flush=True)
time.sleep(60)
"""


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_processes_take_at_the_same_time_never_exceeds_the_limit(tmp_path: Path) -> None:
    takers = [python(TAKER, tmp_path / "claims", seed) for seed in range(3)]
    most = [int(taker.communicate(timeout=60)[0]) for taker in takers]
    assert LIMIT_MB / 2 < max(most) <= LIMIT_MB
    assert MemoryBudget(tmp_path / "claims", LIMIT_MB, "here").standing().taken_mb == 0


def test_whoever_is_killed_gives_back_what_it_had(tmp_path: Path) -> None:
    budget = MemoryBudget(tmp_path, LIMIT_MB, "here")
    holder = python(HOLDER, tmp_path)
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "True\n"
        assert budget.standing().left_mb == 30
        assert budget.take(31) is None
        holder.kill()
    assert budget.take(LIMIT_MB) is not None


@settings(max_examples=30)
@given(steps=st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=20))
def test_the_sum_of_what_is_held_is_what_is_taken(
    steps: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    budget = MemoryBudget(tmp_path_factory.mktemp("claims"), LIMIT_MB, "here")
    held: list[tuple[int, TakenMemory]] = []
    for mb, gives_back in steps:
        if gives_back and held:
            held.pop(0)[1].release()
        elif (claim := budget.take(mb)) is not None:
            held.append((mb, claim))
        else:
            assert sum(each for each, _ in held) + mb > LIMIT_MB, "it would have fitted"
        assert budget.standing().taken_mb == sum(each for each, _ in held) <= LIMIT_MB
    for _, claim in held:
        claim.release()
        claim.release()  # twice is once
    assert budget.standing().taken_mb == 0


def test_threads_of_one_process_count_as_processes_do(tmp_path: Path) -> None:
    budget, got = MemoryBudget(tmp_path, LIMIT_MB, "here"), list[TakenMemory]()

    def take() -> None:
        if (claim := budget.take(40)) is not None:
            got.append(claim)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    for claim in got:
        claim.release()


def test_a_disk_that_takes_nothing_is_a_refusal_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotEnoughMemory, match="cannot be written"):
        MemoryBudget(tmp_path / "file" / "claims", LIMIT_MB, "here").take(1)


def test_a_card_s_memory_and_the_machine_s_are_limited_apart(tmp_path: Path) -> None:
    caps = MemoryCaps(tmp_path, "512 MiB", "50 %")
    card, main, shared = (caps.budget(name, 8000) for name in ("cuda:0", "cpu", "mps"))
    assert card is not None
    assert main is not None
    assert (card.limit_mb, main.limit_mb, main) == (4000, 512, shared)
    assert card.setting.endswith("host.max_card_memory")
    claim = card.take(4000)
    assert claim is not None
    assert (card.standing().left_mb, main.standing().left_mb) == (0, 512)
    claim.release()
    assert MemoryCaps(tmp_path, card="1").budget("cpu", 8000) is None
    half = MemoryCaps(tmp_path, "50%").budget("cpu", 0)
    assert half is not None
    assert half.limit_mb == ram().total_mb // 2


@pytest.mark.parametrize(
    ("text", "mb"),
    [("", None), ("12 GiB", 12288), ("1.5", 1536), ("512MiB", 512), ("50 %", 400), ("100%", 800)],
)
def test_limits_are_sizes_or_shares(text: str, mb: int | None) -> None:
    assert memory_limit_mb(text, 800) == mb


@pytest.mark.parametrize("text", ["0", "-1 GiB", "101 %", "12 GB", "much", "1e9", "5 % of it"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither GiB"):
        memory_limit_mb(text, 800)
