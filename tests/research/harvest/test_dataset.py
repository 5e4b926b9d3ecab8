"""Data sets read in the same batches every time, and the directory a harvest grows in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mesh.errors import BadRequest, DiskFull
from mesh.research.harvest.dataset import BATCH_CHARS, batches, digest
from mesh.research.harvest.index import HarvestIndex, HarvestPlan
from tests.full_disk import file_size_limit

PLAN = HarvestPlan("m", "model.layers.*", "ab" * 32, 100, 2)


def test_lines_become_batches(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\ntwo \n\n  \nGrüße\nlast".encode())
    found = list(batches(path, 2))
    assert [batch.texts for batch in found] == [("one", "two "), ("Grüße", "last")]
    assert [batch.lines for batch in found] == [(0, 1), (4, 5)]
    assert [batch.number for batch in found] == [0, 1]
    assert found == list(batches(path, 2))


def test_long_texts_are_not_put_together(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(["x" * (BATCH_CHARS // 2 + 1)] * 3))
    assert [len(batch.texts) for batch in batches(path, 100)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b'{"t": "x"}', "no object with a `text`"),
        (b'{"text": 1}', "no object with a `text`"),
        (b"[1]", "no object with a `text`"),
        (b"null", "no object with a `text`"),
        (b"\xff", "no UTF-8"),
        (rb'{"text": "\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(BadRequest, match=f"line 2: .*{why}"):
        list(batches(path, 1))


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n")
    with pytest.raises(BadRequest, match="no prompt"):
        list(batches(path, 1))


def test_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        digest(tmp_path / "absent")


OTHER_PLAN = HarvestPlan("m", "model.layers.1", "ab" * 32, 100, 2)


def result(batch: int, weights: str = "w") -> dict[str, object]:
    prompts = [{"line": batch, "ids": [1]}]
    return {"batch": batch, "weights_sha256": weights, "prompts": prompts, "files": [{"file": "f"}]}


def test_a_directory_is_taken_up_again(tmp_path: Path) -> None:
    HarvestIndex(tmp_path / "out", PLAN).add(result(1))
    (tmp_path / "out" / "batches" / "000000.99.tmp").write_text("{")  # half-written, then killed
    index = HarvestIndex(tmp_path / "out", PLAN)
    assert index.done() == {1}
    index.add(result(0))
    assert index.finish(2) == tmp_path / "out" / "index.json"


def test_batches_that_come_at_the_same_moment_are_all_kept(tmp_path: Path) -> None:
    for again in range(5):
        index = HarvestIndex(tmp_path / f"{again}", PLAN)
        with ThreadPoolExecutor(8) as at_once:
            list(at_once.map(index.add, [result(number) for number in range(8)]))
        assert index.done() == set(range(8))


def test_other_weights_and_other_plans_are_kept_apart(tmp_path: Path) -> None:
    HarvestIndex(tmp_path / "out", PLAN).add(result(0))
    with pytest.raises(BadRequest, match="weights"):
        HarvestIndex(tmp_path / "out", PLAN).add(result(1, "other"))
    with pytest.raises(BadRequest, match="module"):
        HarvestIndex(tmp_path / "out", OTHER_PLAN)


def test_a_directory_is_nobodys_before_the_first_batch(tmp_path: Path) -> None:
    refused = HarvestIndex(tmp_path / "out", PLAN)
    HarvestIndex(tmp_path / "out", OTHER_PLAN).add(result(0))
    with pytest.raises(BadRequest, match="module"):
        refused.add(result(1))
    assert refused.done() == {0}


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    index = HarvestIndex(tmp_path / "out", PLAN)
    (tmp_path / "out" / "batches" / "000000.json").write_text("{")
    with pytest.raises(BadRequest, match=r"000000\.json is damaged"):
        index.finish(1)


def test_what_the_disk_does_not_take_is_a_sentence_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFull, match="cannot be written"):
        HarvestIndex(tmp_path / "file" / "out", PLAN)
    index = HarvestIndex(tmp_path / "out", PLAN)
    batches_here = tmp_path / "out" / "batches"
    with file_size_limit(8), pytest.raises(DiskFull, match="File too large"):
        index.add(result(0))
    assert list(batches_here.iterdir()) == []
    index.add(result(0))
    (batches_here / "000000.json").unlink()
    (batches_here / "000000.json").mkdir()
    with pytest.raises(BadRequest, match="cannot be read"):
        index.finish(1)
