"""`hearthnet top` in a real terminal over a real mesh of three nodes, which die and come back.

What the terminal shows is captured at each moment; with ``TOP_CAPTURES=DIR`` it is kept
there, to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from mesh.cli.local_node import LocalNode, start_hearth

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux"),
]

SOFA, ATTIC, KITCHEN = (f"{name}-{os.getpid()}" for name in ("sofa", "attic", "kitchen"))
"""Others test on loopback as well, and their nodes are seen."""
LAYERS = {SOFA: "0-3", ATTIC: "3-7", KITCHEN: "4-7"}
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.1


class Pane:
    """A terminal of tmux with `hearthnet top` in it; its server is this one's own."""

    def __init__(self, command: str, size: tuple[int, int], kept: Path) -> None:
        self._server = ("tmux", "-L", f"hearthnet-{os.getpid()}-{size[0]}", "-f", os.devnull)
        self._kept = kept
        self._taken = 0
        self.width = size[0]
        width, height = map(str, size)
        shell = f"{command}; echo left with $?; sleep 600"
        self._tmux("new-session", "-d", "-x", width, "-y", height, shell)

    def close(self) -> None:
        self._tmux("kill-server")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def shown(self, *flags: str) -> str:
        return self._tmux("capture-pane", "-p", *flags)

    def until(self, name: str, wanted: Callable[[str], object]) -> str:
        """The first screen that is as wanted; the last one is kept whatever happens."""
        deadline = time.monotonic() + PATIENCE_S
        while not wanted(screen := self.shown()):
            if time.monotonic() > deadline:
                self.keep(f"{name}-not-seen")
                raise AssertionError(f"{name} did not come:\n{screen}")
            time.sleep(LOOK_EVERY_S)
        self.keep(name)
        return screen

    def keep(self, name: str) -> None:
        self._taken += 1
        stem = f"{self._taken:02}-{name}"
        (self._kept / f"{stem}.txt").write_text(self.shown(), "utf-8")
        (self._kept / f"{stem}.ansi").write_text(self.shown("-e"), "utf-8")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._server, *arguments], check=True, capture_output=True, text=True, timeout=20
        )
        return done.stdout


class Answer:
    """A long answer, read slowly in a thread; `tokens` came so far."""

    def __init__(self, node: LocalNode) -> None:
        self.tokens = 0
        self.error = ""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(node,), name="answer")
        self._thread.start()

    def leave(self) -> None:
        self._left.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _read(self, node: LocalNode) -> None:
        body = {"model": "builtin", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True,
                "temperature": 0.0, "stream": True}  # fmt: skip
        headers = {"Authorization": f"Bearer {node.record.api_key}"}
        url = f"{node.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as response:
                for line in response.iter_lines():
                    if self._left.is_set():
                        return
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        self.error = str(chunk.get("error", ""))
                        self.tokens += 1
                        time.sleep(0.03)
        except httpx.HTTPError as error:
            self.error = repr(error)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalNode]]:
    root = tmp_path_factory.mktemp("house")
    nodes = {
        name: LocalNode(name, root / name, ("--layers", layers, "--threads", "1"))
        for name, layers in LAYERS.items()
    }
    with ExitStack() as stack:
        start_hearth(list(nodes.values()), stack)
        for node in nodes.values():
            node.wait_ready(60.0)
        yield nodes


@pytest.fixture(params=[(100, 30), (80, 24)], ids=["100x30", "80x24"])
def pane(
    request: pytest.FixtureRequest, house: dict[str, LocalNode], tmp_path: Path
) -> Iterator[Pane]:
    top = [sys.executable, "-m", "mesh.cli.main", "top", "--state-dir", str(house[SOFA].state_dir)]
    folder = Path(os.environ.get("TOP_CAPTURES", tmp_path))
    kept = folder / f"{request.param[0]}x{request.param[1]}"
    kept.mkdir(parents=True, exist_ok=True)
    started = Pane(f"env -u COLUMNS -u LINES {shlex.join(top)}", request.param, kept)
    yield started
    started.close()


def of(name: str, screen: str) -> str:
    """The line of a node in the list of nodes."""
    found = re.search(rf"^.*[●◌✖] {name}\b.*$", screen, re.MULTILINE)
    return found[0] if found else ""


def test_nodes_die_and_return_and_the_screen_says_so(
    pane: Pane, house: dict[str, LocalNode]
) -> None:
    sofa = house[SOFA]
    first = pane.until("working", lambda screen: "working · builtin · 3 nodes" in screen)
    assert max(map(len, first.splitlines())) == pane.width, "it fills the terminal"
    with ExitStack() as stack:
        answer = Answer(sofa)
        stack.callback(answer.leave)
        pane.until("an-answer", lambda screen: "1 answer at" in screen and "first token" in screen)
        serving = sofa.get("/mesh/v1/status")["generations"][0]["route"][-1]["node"]
        other = {ATTIC: KITCHEN, KITCHEN: ATTIC}[serving]

        house[serving].kill()
        lost = pane.until(
            "one-is-lost",
            lambda screen: "✖" in of(serving, screen) and "1 failover" in screen,
        )
        assert "working · builtin · 2 nodes · 1 answer at" in lost
        assert "●" in of(other, lost)
        tokens = answer.tokens

        house[serving].start()
        pane.until("it-is-back", lambda screen: "working · builtin · 3 nodes" in screen)
        house[serving].wait_ready(60.0)
        assert answer.tokens > tokens, "the answer went on"
        assert not answer.error

    for name in (serving, other):
        house[name].kill()
    gap = pane.until(
        "a-gap",
        lambda screen: all("✖" in (line := of(name, screen)) and "unreachable" in line
                           for name in (serving, other)),
    )  # fmt: skip
    assert "not working · builtin: missing layers 4-7" in gap
    for name in (serving, other):
        house[name].start()
    pane.until("whole-again", lambda screen: "working · builtin · 3 nodes" in screen)
    for name in (serving, other):
        house[name].wait_ready(60.0)

    sofa.kill()
    pane.until("no-daemon", lambda screen: "again" in screen and SOFA in screen)
    sofa.start()
    sofa.wait_ready(60.0)
    pane.until(
        "the-daemon-is-back",
        lambda screen: "working · builtin · 3 nodes" in screen and "again in" not in screen,
    )
    pane.press("q")
    assert "Traceback" not in pane.until("left", lambda screen: "left with 0" in screen)
