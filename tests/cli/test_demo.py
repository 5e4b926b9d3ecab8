"""The demo as people run it: it says what it shows, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

COMMAND = Path(sysconfig.get_path("scripts"), "hearthnet")
"""As people start it. With ``python -m`` CPython ends by the signal itself, though it was caught,
where Ctrl-C came while an import ran text with `exec`, as that of a dataclass does."""
MARK = "TESTED_DEMO"
OTHERS = {
    "HEARTHNET_MODEL": "/nowhere",
    "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ENABLED": "false",
}
"""Settings for the user's own node, which are nothing to the demo."""


@contextmanager
def demo(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running demo, and the mark by which everything that it starts is known."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [COMMAND, "demo"],
        env={**os.environ, **OTHERS, MARK: mark, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process, mark
    finally:
        for left in marked(mark):
            left.kill()
        process.communicate()


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # somebody else's, or it just ended
    return found


@pytest.mark.timeout(400)
def test_the_ids_are_equal_and_no_process_is_left(tmp_path: Path) -> None:
    with demo(tmp_path) as (process, mark):
        said, _ = process.communicate(timeout=220)
        assert process.returncode == 0, said
        assert said.count("token ids    equal") == 2
        assert "was killed" in said
        assert marked(mark) == []
    assert list(tmp_path.glob("hearthnet-demo-*")) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_demo_that_is_cut_short_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with demo(tmp_path) as (process, mark):
        assert process.stdout is not None
        assert any("founded the hearth" in line for line in process.stdout)
        assert len(marked(mark)) > 1
        process.send_signal(number)
        assert process.wait(60) == code
        deadline = time.monotonic() + 20
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert marked(mark) == []
