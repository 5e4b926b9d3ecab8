"""The dashboard in a terminal that is none, against the real API in front of a scripted house."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from rich.console import Console
from textual.pilot import Pilot

from mesh.api.app import create_app
from mesh.api.ndif.results import ResultUrls
from mesh.api.ndif.routes import JobsApi
from mesh.api.server import ApiServer, serve_api
from mesh.api.services import ApiSettings, HearthControl, Services
from mesh.client import Client
from mesh.interventions.jobs.queue.service import JobQueue
from tests.fakes import ScriptedGenerations
from tests.tui.house import MOMENT, Deployments, Hearth, House, Jobs, Plans, Pulls
from tui.app import TopApp

OWNER = "the-owners-key"
VERBS = {"up": "Start this machine's node.", "peers": "List the nodes.", "invite": "Let one in.",
         "deploy": "Load a model."}  # fmt: skip
PATIENCE_S = 30.0


@dataclass
class Daemon:
    """The parts of a running API."""

    house: House = field(default_factory=House)
    jobs: Jobs = field(default_factory=Jobs)
    hearth: Hearth = field(default_factory=Hearth)
    deployments: Deployments = field(default_factory=Deployments)
    plans: Plans = field(default_factory=Plans)
    pulls: Pulls = field(default_factory=Pulls)
    generations: ScriptedGenerations = field(default_factory=ScriptedGenerations)
    server: ApiServer | None = None
    url: str = ""

    async def start(self) -> None:
        queue = JobsApi(cast("JobQueue", self.jobs), cast("ResultUrls", None))
        hearth = cast("HearthControl", self.hearth)
        settings = ApiSettings(api_key=OWNER)
        parts: dict[str, Any] = dict.fromkeys(each.name for each in fields(Services))
        given = {"deployments": self.deployments, "plans": self.plans, "pulls": self.pulls}
        services = Services(**{**parts, **given})
        app = create_app(
            self.generations, self.house, settings, hearth, jobs=queue, services=services
        )
        self.server = await serve_api(app, "127.0.0.1", 0, None)
        self.url = self.server.url()

    async def stop(self) -> None:
        if self.server is not None:
            self.generations.proceed.set()
            await self.server.close()
            self.server = None

    def connect(self) -> Client:
        return Client(self.url, api_key=OWNER)


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    served = Daemon()
    await served.start()
    yield served
    await served.stop()


@pytest.fixture(autouse=True)
def _loop_is_never_blocked() -> Iterator[BlockBuster]:
    """As everywhere, but for `tui` itself: screens are imported, and their styles read, as they are
    first shown, and this loop serves one person."""
    with blockbuster_ctx(scanned_modules=["mesh"]) as guard:
        yield guard


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One time zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@dataclass
class Top:
    """The app under test and its keys."""

    app: TopApp
    pilot: Pilot[None]

    def text(self) -> str:
        """What the terminal shows."""
        return shown(self.app)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(
        self, wanted: str | Callable[[], object], patience_s: float = PATIENCE_S
    ) -> str:
        """Until the terminal shows this text, or something holds."""
        deadline = time.monotonic() + patience_s
        while True:
            await self.pilot.pause()
            text = self.text()
            if (wanted in text) if isinstance(wanted, str) else wanted():
                return text
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{text}"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    connect: Callable[[], Client], size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Top]:
    """The app while the block runs, its ages as of one moment."""
    app = TopApp(connect, lambda: VERBS, lambda: MOMENT.timestamp() + 42)
    app.animation_level = "none"
    app.NOTIFICATION_TIMEOUT = PATIENCE_S  # a busy machine looks too late at what goes after 5 s
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Top(app, pilot)


def shown(app: TopApp) -> str:
    """The terminal as plain text, without spaces at the ends of lines."""
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), record=True,
                      force_terminal=True, legacy_windows=False)  # fmt: skip
    update = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
    console.print(update)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"
