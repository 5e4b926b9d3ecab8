"""A node's starts count upwards whatever its clock and its files do; a full disk is called one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mesh.errors import KeyUnreadable
from mesh.hearth.epoch import next_epoch
from mesh.hearth.record import HearthRecord, read_record, write_record
from mesh.identity.api_keys import ApiKeys, Quota, Scope
from mesh.private_files import write_private
from tests.full_disk import file_size_limit

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Wall:
    """A clock that people set."""

    def __init__(self, now: datetime) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        raise AssertionError("not asked for")


def test_a_clock_set_back_by_a_day_does_not_count_back(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    first = next_epoch(file, Wall(NOON))
    assert next_epoch(file, Wall(NOON - timedelta(days=1))) == first + 1
    assert next_epoch(file, Wall(NOON + timedelta(days=1))) > first + 1


@pytest.mark.parametrize("content", [None, b"", b"many"], ids=["lost", "empty", "damaged"])
def test_a_lost_file_does_not_count_back(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "epoch"
    first = next_epoch(file, Wall(NOON))
    file.unlink()
    if content is not None:
        write_private(file, content)
    assert next_epoch(file, Wall(NOON + timedelta(seconds=1))) > first


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyUnreadable):
        next_epoch(tmp_path / "nowhere" / "epoch", Wall(NOON))


def test_a_full_disk_is_said_to_be_full_and_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    epoch, hearth, wall = tmp_path / "epoch", tmp_path / "hearth.json", Wall(NOON)
    keys, record = ApiKeys.load(tmp_path / "keys.json"), HearthRecord("hh2" + "a" * 34, "home")
    next_epoch(epoch, wall)
    write_record(hearth, record)
    keys.create("phone", frozenset({Scope.CHAT}), Quota(), wall)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for write in (
        lambda: next_epoch(epoch, wall),
        lambda: write_record(hearth, record),
        lambda: keys.create("lab", frozenset({Scope.CHAT}), Quota(), wall),
    ):
        with file_size_limit(0), pytest.raises(KeyUnreadable, match="Free some room"):
            write()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert read_record(hearth) == record
