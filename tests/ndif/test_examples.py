"""The scripts of `examples/`: over three nodes, and alone for comparison; one as a user runs it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode, start_hearth
from tests.ndif import client
from tests.warm.daemons import WarmNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SPANS = {"attic": "0-2", "barn": "3-5", "cellar": "6-7"}
EXACT = 1e-5
GRADIENTS = 1e-4


@pytest.fixture(scope="module")
def laptops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """Three nodes, a third of the built-in model each; the first one is asked."""
    root = tmp_path_factory.mktemp("laptops")
    variables = {
        "OMP_NUM_THREADS": "1",
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ACTIVATION_DTYPE": "fp32",
    }
    nodes = [
        WarmNode(
            name, root / name, ("--threads", "1", "--dtype", "fp32", "--layers", span), variables
        )
        for name, span in SPANS.items()
    ]
    with ExitStack() as stack:
        start_hearth(nodes, stack)
        nodes[0].wait_ready()
        yield nodes[0]


def as_a_user(script: str, host: str) -> Any:
    """The script in a process of its own, with nothing but the host to go by."""
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{script}.py"), "--json"],
        env={**kept, "NDIF_HOST": host}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture
def run(
    laptops: LocalNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Run a script in this process, which has everything imported already."""
    client.configure(monkeypatch, HOST=laptops.url)
    monkeypatch.syspath_prepend(EXAMPLES)

    def call(script: str, *flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", [script, "--json", *flags])
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_logit_lens(laptops: LocalNode, run: Callable[..., Any]) -> None:
    spread = as_a_user("logit_lens", laptops.url)
    alone = run("logit_lens", "--local")
    assert [row["words"] for row in spread] == [row["words"] for row in alone]
    for row, here in zip(spread, alone, strict=True):
        assert row["chances"] == pytest.approx(here["chances"], abs=EXACT)
    assert spread[-1]["words"][0] == " she"


def test_activation_patching(run: Callable[..., Any]) -> None:
    spread = run("activation_patching")
    alone = run("activation_patching", "--local")
    for row, here in zip(spread["recovered"], alone["recovered"], strict=True):
        assert row == pytest.approx(here, abs=1e-4)
    assert spread["recovered"][0][-1] > 0.8, "the first layer has read it off the words before"
    assert spread["recovered"][-1][-1] == pytest.approx(1, abs=1e-4)


def test_attribution_patching(run: Callable[..., Any]) -> None:
    spread = run("attribution_patching")
    alone = run("attribution_patching", "--local")
    for row, here in zip(spread["estimate"], alone["estimate"], strict=True):
        assert row == pytest.approx(here, abs=GRADIENTS)
    assert max(zip(spread["estimate"][0], spread["words"], strict=True))[1] == " and"
