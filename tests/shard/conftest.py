from __future__ import annotations

import pytest

from mesh.shard.runtime import SpanRuntime
from tests.shard.spans import runtime


@pytest.fixture(scope="session")
def span() -> SpanRuntime:
    """All layers of the toy model, in this process: what a served shard is compared with."""
    return runtime()
