from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from mesh.shard import device as devices
from mesh.shard import threads as kept
from mesh.shard.threads import kept_threads

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A machine of four cores; how many of them pay is what was last put into the list."""
    pays = [True]
    for module in (devices, kept):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(
        devices, "_gemv_ms", lambda threads: 1.0 if (threads > 1) == pays[-1] else 10.0
    )
    return pays


def test_a_restart_computes_with_as_many_threads_whatever_it_would_measure(
    measured: list[bool], tmp_path: Path
) -> None:
    first = kept_threads(0, CPU, tmp_path / "threads")
    measured.append(False)  # another process wants the cores at the second start
    second = kept_threads(0, CPU, tmp_path / "threads")
    assert (first.value, second.value) == (4, 4)
    assert "measured" in first.reason
    assert str(tmp_path) in second.reason
    assert kept_threads(0, CPU, None).value == 1


def test_what_is_asked_for_counts_and_is_not_kept(measured: list[bool], tmp_path: Path) -> None:
    assert kept_threads(3, CPU, tmp_path).value == 3
    assert kept_threads(0, torch.device("meta"), tmp_path).value == 1
    assert not list(tmp_path.iterdir())


def test_another_machine_chooses_for_itself_and_the_first_one_is_remembered(
    measured: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_threads(0, CPU, tmp_path).value == 4
    measured.append(False)
    with monkeypatch.context() as other:
        other.setattr(kept, "cpu_model", lambda: "another one")
        assert kept_threads(0, CPU, tmp_path).value == 1
    assert kept_threads(0, CPU, tmp_path).value == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_that_start_together_agree(
    measured: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, numbers = Barrier(4), itertools.count(1)

    def choose(requested: int, device: torch.device) -> devices.Choice[int]:
        together.wait(10.0)  # nobody has kept anything yet
        return devices.Choice(next(numbers), "measured")

    monkeypatch.setattr(kept, "choose_threads", choose)
    with ThreadPoolExecutor(4) as pool:
        chosen = [pool.submit(kept_threads, 0, CPU, tmp_path) for _ in range(4)]
        values = {each.result(30.0).value for each in chosen}
    assert next(numbers) == 5
    assert len(values) == 1
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"threads": 0}', '{"machine": "", "threads": true}', "\xff" * 9]
)
def test_a_damaged_file_is_measured_and_written_again(
    measured: list[bool], tmp_path: Path, content: str
) -> None:
    kept_threads(0, CPU, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content, "latin-1")
    measured.append(False)
    assert kept_threads(0, CPU, tmp_path).value == 1
    assert json.loads(file.read_text("utf-8")) == {"machine": kept.machine_class(), "threads": 1}


def test_a_directory_that_cannot_be_written_keeps_nobody_from_computing(
    measured: list[bool], tmp_path: Path
) -> None:
    (tmp_path / "threads").write_text("a file")
    choice = kept_threads(0, CPU, tmp_path / "threads")
    assert choice.value == 4
    assert "kept" not in choice.reason
