"""What the asker's process does with its commands; its engine is real, its hops are toys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mesh.pipeline.engine_process import EngineProcess
from mesh.pipeline.frames import encode_request
from mesh.pipeline.order import HarvestOrder
from tests.health.watched import watched
from tests.pipeline.toy_mesh import ToyNetwork, toy_request

ORDER = HarvestOrder("0" * 16, 0, "layers.", "layers.*", ("a text",), 8)
COMMANDS: dict[str, dict[str, Any]] = {
    "generate": {"request": encode_request(toy_request([1, 2], 5))},
    "harvest": {"order": ORDER.to_fields()},
}


@pytest.mark.parametrize("kind", sorted(COMMANDS))
async def test_what_is_cancelled_before_it_began_leaves_nothing_behind(kind: str) -> None:
    process = EngineProcess()
    with watched(ToyNetwork()) as mesh:
        process._engine = mesh.engine
        process._command({"op": kind, "id": "r", **COMMANDS[kind]})
        process._command({"op": "cancel", "id": "r"})  # as when both come in one read
        assert process._readers
        await asyncio.gather(*process._background, return_exceptions=True)
        await asyncio.sleep(0)
        assert not process._readers
        await mesh.engine.close()
