"""`hearthnet harvest` over real daemons: killed half-way, taken up again, complete."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.conftest import StartNode, own_node, starter
from tests.research.harvest.test_recording import check

__all__ = ["own_node"]  # the fixture

GIVES_DISK = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__HARVEST_MB": "200"}
LINES = [f"The cat in the hall said {word}, and nobody heard it." for word in "abcdefghijklmnop"]
PATTERN = "model.layers.[35].mlp"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The nodes by name; the asker is the last one."""
    with starter(tmp_path_factory.mktemp("house")) as start:
        yield _started(start)


def _started(start: StartNode) -> list[LocalNode]:
    nodes = [
        start("low", "--layers", "0-3", environment=GIVES_DISK),
        start("high", "--layers", "4-7", environment=GIVES_DISK),
        start("asker", "--layers", "none"),
    ]
    for node in nodes:
        node.wait_ready()
    return nodes


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"text": line, "label": i}) for i, line in enumerate(LINES)]
    path.write_text("\n".join([*lines[:5], "", *lines[5:]]) + "\n")
    return path


def command(node: LocalNode, dataset: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "mesh.cli.main", "harvest", "builtin", "--module", PATTERN,
        "--dataset", str(dataset), "--out", str(out), "--batch", "2", "--parallel", "1",
        "--state-dir", str(node.state_dir), *more,
    ]  # fmt: skip


def test_a_killed_harvest_goes_on_where_it_was(
    house: list[LocalNode], dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asker = house[-1]
    first = subprocess.Popen(command(asker, dataset, out), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len([*(out / "batches").glob("*.json")]) < 2:
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    before = {path: path.stat().st_mtime_ns for path in (out / "batches").glob("*.json")}
    assert not (out / "index.json").exists()
    assert 2 <= len(before) < len(LINES) // 2
    again = subprocess.run(
        command(asker, dataset, out, "--json"), check=True, capture_output=True, timeout=100
    )
    assert json.loads(again.stdout)["batches"] == len(LINES) // 2
    assert {path: path.stat().st_mtime_ns for path in before} == before, "done batches were redone"
    index = json.loads((out / "index.json").read_text())
    assert [p["line"] for p in index["prompts"]] == [n for n in range(len(LINES) + 1) if n != 5]
    assert len(index["files"]) == len(LINES)
    files = {node.name: Path(node.state_dir) / "harvest" for node in house}
    assert not files["asker"].exists()
    for number in range(index["batches"]):
        prompts = [p["ids"] for p in index["prompts"][2 * number : 2 * number + 2]]
        entries = [entry for entry in index["files"] if entry["batch"] == number]
        assert {(e["node_name"], e["module"]) for e in entries} == {
            ("low", "model.layers.3.mlp"), ("high", "model.layers.5.mlp"),
        }  # fmt: skip
        for entry in entries if number in {0, index["batches"] - 1} else ():
            result = {"prompts": prompts, "files": [entry]}
            assert check(files[entry["node_name"]], checkpoint_dir(), result) < 1e-4
    assert not [path for folder in files.values() for path in folder.rglob("*.tmp")]


def test_another_harvest_is_not_mixed_in(
    house: list[LocalNode], dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    dataset.write_text("\n".join(LINES[:2]))
    dataset = dataset.rename(dataset.with_suffix(".txt"))
    subprocess.run(command(house[-1], dataset, out), check=True, timeout=100)
    done = subprocess.run(
        command(house[-1], dataset, out, "--max-tokens", "3"),
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "max_tokens" in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--module", "model.layers.*.norm"], "fits no module"), (["--module", "a b"], "pattern")],
)
def test_a_pattern_without_modules_is_refused(
    house: list[LocalNode], dataset: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    done = subprocess.run(
        command(house[-1], dataset, tmp_path / "out", *more),
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr


def test_who_gives_no_disk_is_named(own_node: StartNode, dataset: Path, tmp_path: Path) -> None:
    nodes = [own_node("stingy", "--layers", "0-7"), own_node("asker", "--layers", "none")]
    for node in nodes:
        node.wait_ready()
    body = {"model": "builtin", "run": "0" * 16, "batch": 0, "module": PATTERN,
            "texts": ["a b", "The kettle sings in the kitchen."], "max_tokens": 5}  # fmt: skip
    answer = nodes[-1].post("/mesh/v1/harvest", body)
    assert answer.status_code == 507
    said = answer.json()["error"]["message"]
    assert said.startswith("stingy: This node gives no disk to harvests. ")
    assert "host.harvest_mb there" in answer.json()["error"]["fix"]
    huge = nodes[0].post("/mesh/v1/harvest", body | {"max_tokens": 10**30})
    assert (huge.status_code, huge.json()["error"]["param"]) == (400, "max_tokens")
    own = nodes[0].post("/mesh/v1/harvest", body)  # what a node asks of itself
    assert own.status_code == 200
    result = own.json()
    assert result["cut"] == [1]
    assert [file["rows"] for file in result["files"]] == [sum(map(len, result["prompts"]))] * 2
