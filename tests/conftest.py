"""What every test gets: an event loop that must not be blocked, one torch thread, no model hub, and
programs that Ctrl-C reaches."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before anything imports torch or a Hugging Face library, in this process and its children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A node's processes import nothing from where it was started; some of those here are of tests.
os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

# A machine may be busy, and no property is about time.
settings.register_profile("any-pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-pace")

pytest_plugins = ["tests.cpu_cost"]


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Fail a test in which our own code blocks the event loop on a file, socket or sleep."""
    with blockbuster_ctx(scanned_modules=["mesh", "tui"]) as guard:
        yield guard


@pytest.fixture(autouse=True)
def _transformers_is_left_whole() -> Iterator[None]:
    """Two threads that build models at once leave transformers' classes patched for all others."""
    before = _tie_weights()
    yield
    after = _tie_weights()
    if before is not None and after is not before:
        sys.modules["transformers.modeling_utils"].PreTrainedModel.tie_weights = before
    else:
        assert after is None or after.__name__ == "tie_weights"


def _tie_weights() -> Any:
    loaded = sys.modules.get("transformers.modeling_utils")
    return None if loaded is None else loaded.PreTrainedModel.tie_weights


def pytest_configure() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left alone with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
