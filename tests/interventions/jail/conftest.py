"""Nothing of a job may be left behind by any test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def _open_descriptors() -> int:
    listing = Path("/proc/self/fd")
    return len(list(listing.iterdir())) if listing.exists() else 0


@pytest.fixture(autouse=True)
def _no_descriptor_is_left_open() -> Iterator[None]:
    before = _open_descriptors()
    yield
    assert _open_descriptors() <= before
