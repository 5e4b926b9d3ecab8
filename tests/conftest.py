"""What every test gets: an event loop that must not be blocked, one torch thread, no model hub."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Set before anything imports torch or a Hugging Face library, in this process and its children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Fail a test in which our own code blocks the event loop on a file, socket or sleep."""
    with blockbuster_ctx(scanned_modules=["mesh", "tui"]) as guard:
        yield guard


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left alone with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
