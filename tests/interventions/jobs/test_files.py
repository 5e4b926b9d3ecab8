"""A result that cannot be written leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mesh.interventions.jobs.files import part_of, write_whole

FULL = Path("/dev/full")


def test_a_result_is_there_whole_and_for_this_user(tmp_path: Path) -> None:
    file = tmp_path / "job"
    write_whole(file, b"older and longer")
    write_whole(file, b"result")
    assert file.read_bytes() == b"result"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_full_disk_is_left_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.touch()
    part_of(file).symlink_to(FULL)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_whole(file, b"result")
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_put_in_place_is_not_left(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(file, b"result")
    assert list(tmp_path.iterdir()) == [file]
