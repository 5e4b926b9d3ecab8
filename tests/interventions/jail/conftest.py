"""Nothing of a job may be left behind by any test of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


@pytest.fixture(autouse=True)
def _no_descriptor_is_left_open() -> Iterator[None]:
    before = _open_descriptors()
    yield
    assert _open_descriptors() <= before
