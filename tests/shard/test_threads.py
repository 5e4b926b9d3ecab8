from __future__ import annotations

import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from mesh.shard.device import Choice, Timed, choose_threads
from mesh.shard.threads import PASSING_S, Choose, Processor, kept_threads

CPU = torch.device("cpu")


FOUR = Processor("one", 4)


def measuring(*, pays: bool) -> Choose:
    """Measures that all cores are faster than one, or that they are not."""
    return lambda requested, device, cores: choose_threads(
        requested, device, cores, lambda threads: Timed(1.0 if pays and threads > 1 else 10.0, 1.0)
    )


def of_a_busy_machine(requested: int, device: torch.device, cores: int) -> Choice[int]:
    """Measures that all cores are slower than one, as others have them."""
    return choose_threads(
        requested,
        device,
        cores,
        lambda threads: Timed(10.0 * threads, 0.9 if threads == 1 else 0.3),
    )


PAY, DO_NOT = measuring(pays=True), measuring(pays=False)


def test_a_restart_computes_with_as_many_threads_whatever_it_would_measure(tmp_path: Path) -> None:
    first = kept_threads(0, CPU, tmp_path / "threads", processor=FOUR, choose=PAY)
    # Another process wants the cores at the second start.
    second = kept_threads(0, CPU, tmp_path / "threads", processor=FOUR, choose=DO_NOT)
    assert (first.value, second.value) == (4, 4)
    assert "measured" in first.reason
    assert str(tmp_path) in second.reason
    assert kept_threads(0, CPU, None, processor=FOUR, choose=DO_NOT).value == 1


def test_what_was_measured_while_others_wanted_the_cores_is_not_for_good(tmp_path: Path) -> None:
    first = kept_threads(0, CPU, tmp_path, processor=FOUR, choose=of_a_busy_machine)
    with_it = kept_threads(0, CPU, tmp_path, processor=FOUR, choose=PAY)
    assert (first.value, with_it.value) == (1, 1)
    (file,) = tmp_path.iterdir()
    earlier = time.time() - PASSING_S - 1
    os.utime(file, (earlier, earlier))
    assert kept_threads(0, CPU, tmp_path, processor=FOUR, choose=PAY).value == 4
    os.utime(file, (earlier, earlier))
    assert kept_threads(0, CPU, tmp_path, processor=FOUR, choose=DO_NOT).value == 4


def test_what_is_asked_for_counts_and_is_not_kept(tmp_path: Path) -> None:
    assert kept_threads(3, CPU, tmp_path, processor=FOUR, choose=PAY).value == 3
    meta = torch.device("meta")
    assert kept_threads(0, meta, tmp_path, processor=FOUR, choose=PAY).value == 1
    assert not list(tmp_path.iterdir())


def test_another_machine_chooses_for_itself_and_the_first_one_is_remembered(tmp_path: Path) -> None:
    assert kept_threads(0, CPU, tmp_path, processor=FOUR, choose=PAY).value == 4
    other = Processor("another one", 4)
    assert kept_threads(0, CPU, tmp_path, processor=other, choose=DO_NOT).value == 1
    assert kept_threads(0, CPU, tmp_path, processor=FOUR, choose=DO_NOT).value == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    together, numbers = Barrier(4), itertools.count(1)

    def choose(requested: int, device: torch.device, cores: int) -> Choice[int]:
        together.wait(10.0)  # nobody has kept anything yet
        return Choice(next(numbers), "measured")

    def start() -> int:
        return kept_threads(0, CPU, tmp_path, processor=FOUR, choose=choose).value

    with ThreadPoolExecutor(4) as pool:
        values = {each.result(30.0) for each in [pool.submit(start) for _ in range(4)]}
    assert next(numbers) == 5
    assert len(values) == 1
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"threads": 0}', '{"machine": "", "threads": true}', "\xff" * 9]
)
def test_a_damaged_file_is_measured_and_written_again(tmp_path: Path, content: str) -> None:
    kept_threads(0, CPU, tmp_path, processor=FOUR, choose=PAY)
    (file,) = tmp_path.iterdir()
    file.write_text(content, "latin-1")
    assert kept_threads(0, CPU, tmp_path, processor=FOUR, choose=DO_NOT).value == 1
    assert json.loads(file.read_text("utf-8")) == {"machine": FOUR.named(), "threads": 1}


def test_a_directory_that_cannot_be_written_keeps_nobody_from_computing(
    tmp_path: Path,
) -> None:
    (tmp_path / "threads").write_text("a file")
    choice = kept_threads(0, CPU, tmp_path / "threads", processor=FOUR, choose=PAY)
    assert choice.value == 4
    assert "kept" not in choice.reason
