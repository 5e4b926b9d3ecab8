"""`hearthnet chat` on a terminal, before a real node with the built-in model."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode
from tests.checkpoints import make_checkpoint
from tests.cli.terminal import Terminal
from tests.warm.daemons import WarmNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with WarmNode("solo", tmp_path / "solo") as started:
        started.wait_ready()
        yield started


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_question_its_route_and_why(environment: dict[str, str], node: LocalNode) -> None:
    known = {key: value for key, value in environment.items() if key != "COLUMNS"}
    screen = known | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    flags = ("--state-dir", str(node.state_dir), "--verbose")
    async with Terminal(screen, "chat", *flags) as terminal:
        await terminal.prompt()
        terminal.type("/set max_tokens 12\r")
        await terminal.until("max_tokens = 12")
        await terminal.prompt()
        terminal.type("Hello, who are you?\r")
        await terminal.until("total ")
        await terminal.prompt()
        terminal.type("/route\r")
        await terminal.until("first token")
        await terminal.until("total ")
        await terminal.prompt()
        terminal.screen.reset()
        terminal.type("/why\r")
        await terminal.prompt()
        shares = [
            [float(share) for share in re.findall(r"([0-9.]+) %", line)]
            for line in terminal.shown().splitlines()
            if re.match(r"\s+\d+  ['\"]", line)
        ]
        terminal.screen.reset()
        terminal.type("/why --lens\r")
        await terminal.until("by the nodes that hold the layers")
        layers = re.findall(r"^ +(\d+) [ *] solo  '", terminal.shown(), re.MULTILINE)
        terminal.type("/bye\r")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
    assert 1 < len(shares) <= 12
    assert layers == [str(number) for number in range(8)]
    for chosen, *others in shares:
        assert 2 <= len(others) <= 4, "top five, less the one that was taken"
        assert chosen >= max(others), "at temperature 0 the likeliest is taken"
        assert math.fsum([chosen, *others]) < 101


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[LocalNode]:
    make_checkpoint(tmp_path / "models" / "toy", "llama", layers=4)
    found_in = {"HEARTHNET_MODELS_DIR": str(tmp_path / "models")}
    with WarmNode("bare", tmp_path / "bare", ("--layers", "none"), found_in) as started:
        started.wait_up()
        yield started


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_run_without_a_prompt_brings_a_model_up_and_opens_the_chat(
    environment: dict[str, str], bare: LocalNode
) -> None:
    known = {key: value for key, value in environment.items() if key != "COLUMNS"}
    screen = known | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    flags = ("--state-dir", str(bare.state_dir), "--max-tokens", "4", "--verbose")
    async with Terminal(screen, "run", "toy", *flags) as terminal:
        await terminal.until("toy is not up here; deploying it")
        await terminal.until("bare: layers 0-3")
        await terminal.until("is ready")
        await terminal.prompt()
        terminal.type("Hello, who are you?\r")
        await terminal.until("total ")
        await terminal.prompt()
        terminal.type("/bye\r")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
    row = (await asyncio.to_thread(bare.get, "/mesh/v1/deployments"))["deployments"][0]
    assert (row["model_id"], row["state"]) == ("toy", "READY")
