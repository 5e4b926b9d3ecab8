"""`hearthnet status --watch`: what changes is drawn anew, and never what is past."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from tests.api.conftest import Served
from tests.cli.conftest import COMMAND, Run
from tests.cli.terminal import Terminal
from tests.fakes import ScriptedView

CLEARED = "\x1b[2J"


class Fetching(ScriptedView):
    """A machine to which so many MB more have come with every look; `has_come` after 400."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.steps = 0, 0
        self.has_come = asyncio.Event()

    def status(self) -> dict[str, Any]:
        self.here += self.steps
        if self.steps:
            self.news.set()  # as a fetch stirs, with each of its bytes
        if self.here >= 400:
            self.steps = 0
            self.has_come.set()
        transfer = {
            "id": "1", "model_id": "llama", "weights_sha256": "0" * 64, "state": "fetching",
            "done_bytes": self.here * 10**6, "total_bytes": 10**9, "bytes_per_s": 52.1e6,
            "eta_s": 19.0, "sources": [{"name": "attic", "bytes_per_s": 52.1e6}], "note": "",
        }  # fmt: skip
        weights = {"models": [], "transfers": [transfer], "sent_bytes": 0}
        return {**super().status(), "accounts": [], "weights": weights}


def watch(daemon: Served) -> Fetching:
    view = Fetching()
    daemon.view.status = view.status  # type: ignore[method-assign]
    view.news = daemon.view.news
    return view


async def test_it_is_drawn_anew_and_leaves_out_what_nobody_can_read(
    daemon: Served, environment: dict[str, str]
) -> None:
    view = watch(daemon)
    async with Terminal(environment | {"TERM": "xterm"}, "status", "--watch") as terminal:
        await terminal.until("fetching: llama, 0 % of 1.0 GB, 52.1 MB/s, 19 s left")
        begun, view.steps = terminal.everything.count(CLEARED), 10
        await asyncio.wait_for(view.has_come.wait(), 20)
        await terminal.until("fetching: llama, 40 %")
        drawn = terminal.everything.count(CLEARED) - begun
        assert 1 <= drawn < 40 // 2  # of forty that were told


async def test_what_a_window_has_no_room_for_is_left_out_at_its_end(
    daemon: Served, environment: dict[str, str]
) -> None:
    plain = daemon.view.status
    told = {"reasons": [f"reason {number}" for number in range(30)], "accounts": []}
    daemon.view.status = lambda: {**plain(), **told}  # type: ignore[method-assign]
    screen = {key: value for key, value in environment.items() if key != "COLUMNS"}
    async with Terminal(screen | {"TERM": "xterm"}, "status", "--watch") as terminal:
        await terminal.until_screen("more lines; the window has too few")
        assert "· mesh on" in terminal.screen.display[0]
        assert "more lines" in terminal.screen.display[-2]


async def test_a_dashboard_needs_a_terminal_that_can_be_drawn_on(
    environment: dict[str, str],
) -> None:
    async with Terminal(environment | {"TERM": "dumb"}, "top") as terminal:
        await terminal.until("status --watch")
        assert await terminal.process.wait() == 2
        assert "\x1b" not in terminal.everything


async def test_what_was_noted_is_not_noted_again(
    daemon: Served, environment: dict[str, str]
) -> None:
    view = watch(daemon)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "status", "--watch", stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        await process.stdout.readuntil(b"---\n")
        view.steps = 1
        await process.stdout.readuntil(b"---\n")
        await daemon.server.close()
        _, err = await process.communicate()
    assert err.count(b"note: device=cpu: no accelerator found\n") == 1


async def test_json_is_a_line_for_each_and_the_end_of_the_daemon_its_end(
    daemon: Served, environment: dict[str, str]
) -> None:
    view = watch(daemon)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "status", "--watch", "--json", stdout=asyncio.subprocess.PIPE,
        env=environment, limit=1 << 20,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        first = json.loads(await process.stdout.readline())
        view.steps = 1
        second = json.loads(await process.stdout.readline())
        await daemon.server.close()
        await process.communicate()
    assert first["node"] == second["node"]
    assert first["weights"] != second["weights"]
    assert process.returncode == 0


async def test_what_does_not_go_together_is_a_usage_error(hearthnet: Run) -> None:
    both = await hearthnet("status", "--wait-ready", "m", "--watch")
    assert (both.code, both.out) == (2, "")
    assert "exclude each other" in both.err
    alone = await hearthnet("status", "--layers", "0-3")
    assert (alone.code, alone.out) == (2, "")
    assert "--wait-ready" in alone.err


async def test_the_line_of_a_pull_is_one_line_that_is_written_over(
    environment: dict[str, str],
) -> None:
    sources = [{"name": f"a machine called {n}", "bytes_per_s": 26.1e6} for n in range(4)]
    transfer = {"note": "", "state": "fetching", "total_bytes": 10**9, "done_bytes": 0,
                "bytes_per_s": 52.1e6, "eta_s": 19.0, "sources": sources}  # fmt: skip
    told = [{"state": "running", "transfer": {**transfer, "done_bytes": done * 10**8}}
            for done in (1, 5, 10)]  # fmt: skip
    told.append({"state": "done", "model": "toy", "directory": "/models/toy"})
    goes_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int((re.findall(rb"(?i)length: (\d+)", head) or [0])[0]))
                said = {"pull": "toy"} if head.startswith(b"POST ") else told.pop(0)
                if len(told) == 0:
                    await goes_on.wait()
                body = json.dumps(said).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        narrow = environment | {"COLUMNS": "80"}
        async with Terminal(narrow, "pull", "toy", "--host", host) as terminal:
            await terminal.until("10 % of 1.0 GB, 52.1 MB/s, 19 s left (a machine called 0")
            await terminal.until_screen("all of 1.0 GB has come and is checked")
            assert len(terminal.shown().splitlines()) == 1, terminal.shown()
            goes_on.set()
            await terminal.until("toy is in /models/toy")
