"""nnsight's client as it comes, without proxies and without its progress display."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import nnsight
import pytest

from tests.ndif.serving import Node, serving


@pytest.fixture(autouse=True)
def _plain_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(nnsight.CONFIG.APP, "REMOTE_LOGGING", False)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path) as running:
        yield running
