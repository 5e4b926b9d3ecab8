"""Closes every log a test has opened, also when the test fails: an open one keeps the process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.events import support


@pytest.fixture(autouse=True)
async def _logs_are_closed() -> AsyncIterator[None]:
    yield
    while support.OPENED:
        await support.OPENED.pop().close()
