"""Publishing and removing at the same time, in a real hearth without other members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from mesh.clock import SystemClock
from mesh.config import Config
from mesh.events.intake import Report
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.hearth.network import Network
from mesh.models.local import find_local_models
from mesh.paths import cache_dir
from mesh.research.steering.control import Steering
from tests.discovery.network import new_key
from tests.research.steering.local import vector_file
from tests.research.steering.test_daemons import HIDDEN

CLOCK = SystemClock()
PLACE = "model.layers.1"


class InHearth:
    """Of a network, what steering asks for."""

    def __init__(self, hearth: Hearth) -> None:
        self._hearth = hearth
        self.on_file: Any = None

    def require_hearth(self) -> Hearth:
        return self._hearth

    def send(self, *_: object) -> None:
        raise AssertionError("nobody is here")


def unexpected(report: Report) -> None:
    raise AssertionError(report)


class PacedHearth(Hearth):
    """Once it is `paced`, what is called "new" is published after something called "old"."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.paced = False
        self.is_kept, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def publish(self, event_type: str, payload: dict[str, Any]) -> None:
        if self.paced and payload["name"] == "new":
            self.is_kept.set()
            await self.may_go_on.wait()
        await super().publish(event_type, payload)
        if self.paced and payload["name"] == "old":
            self.may_go_on.set()  # after whoever removed it has looked which files are wanted


@pytest.fixture
async def hearth(tmp_path: Path) -> AsyncIterator[PacedHearth]:
    key = new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    opened = await PacedHearth.open(key, record, tmp_path, CLOCK, unexpected)
    yield opened
    await opened.close()


@pytest.fixture
async def steering(hearth: Hearth, tmp_path: Path) -> AsyncIterator[Steering]:
    models = await asyncio.to_thread(lambda: find_local_models(Config(), cache_dir()))
    held = {model.model_id: model for model in models}
    made = Steering(cast("Network", InHearth(hearth)), held, tmp_path / "edits")
    yield made
    await made.close()


async def publish(steering: Steering, name: str, seed: int) -> Path:
    """Publish an edit; its file."""
    tensors = vector_file(HIDDEN, seed)
    made = await steering.publish(name, "builtin", PLACE, "output", tensors)
    return steering.library.path(made["sha256"])


async def test_removing_one_edit_spares_the_one_that_is_being_published(
    steering: Steering, hearth: PacedHearth
) -> None:
    old = await publish(steering, "old", seed=1)
    assert await asyncio.to_thread(old.exists)
    hearth.paced = True
    async with asyncio.timeout(20):
        publishing = asyncio.create_task(publish(steering, "new", seed=2))
        await hearth.is_kept.wait()
        await steering.remove("old")
        new = await publishing
    assert await asyncio.to_thread(new.exists)
    assert not await asyncio.to_thread(old.exists)


async def test_many_at_once_keep_exactly_their_files(steering: Steering, tmp_path: Path) -> None:
    files = await asyncio.gather(*(publish(steering, f"edit {n}", seed=n) for n in range(6)))
    left = await asyncio.to_thread(lambda: set((tmp_path / "edits").iterdir()))
    assert left == set(files)
