from __future__ import annotations

import pytest

from mesh.shard.torch_runtime import TorchRuntime
from tests.shard.spans import runtime


@pytest.fixture(scope="session")
def span() -> TorchRuntime:
    """All layers of the toy model, in this process: what a served shard is compared with."""
    return runtime()
