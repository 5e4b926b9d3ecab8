"""An unmodified client whose job loses a machine half-way: real daemons, `kill -9`."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.schema.response import ResponseModel

from mesh.cli.local_node import LocalNode
from tests.interventions.cases import PROMPT, Parts
from tests.interventions.households import House, move_in, remotely
from tests.interventions.jobworld import client
from tests.interventions.worlds import equal, whole
from tests.mesh_e2e.conftest import starter

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

HOUSE = House({"sofa": "0-2", "left": "3-5", "right": "3-5"}, "sofa", ("sofa", "left"))


def trace(parts: Parts) -> dict[str, Any]:
    """Stands still for a while in the middle of the second hop."""
    with parts.model.trace(PROMPT):
        early = parts.layers[1].output.save()
        middle = parts.layers[4].output.save()
        print("half way")
        import time

        time.sleep(1)
        late = parts.layers[5].output.save()
        logits = parts.model.output.logits.save()
    return {"early": early, "middle": middle, "late": late, "logits": logits}


def lines(told: list[ResponseModel]) -> list[str]:
    said = [str(each.description) for each in told if each.status.value == "LOG"]
    return "\n".join(said).split("\n")


def route(told: list[ResponseModel]) -> list[str]:
    hops: list[str] = told[-1].meta["hops"]
    return hops


def kill_half_way(doomed: LocalNode, told: list[ResponseModel]) -> None:
    deadline = time.monotonic() + 120
    while "half way" not in lines(told):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    doomed.kill()


def test_a_job_whose_hop_dies_is_run_again_over_its_twin(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trace(Parts(whole("llama")))
    nodes: dict[str, LocalNode] = {}
    with starter(tmp_path) as start:

        def start_and_know(name: str, *flags: str, **more: Any) -> LocalNode:
            nodes[name] = start(name, *flags, **more)
            return nodes[name]

        sofa = move_in(start_and_know, HOUSE, ["llama"])
        with remotely(sofa) as told:
            equal(trace(Parts(client("llama"))), expected, 0.0)
        assert lines(told) == ["half way"]
        asked, serving = route(told)
        assert asked == "sofa"
        spared, serving = serving, "left" if serving == "right" else "right"  # they take turns
        with remotely(sofa) as told:
            killing = threading.Thread(
                target=kill_half_way, args=(nodes[serving], told), name="kill"
            )
            killing.start()
            equal(trace(Parts(client("llama"))), expected, 0.0)
            killing.join()
        first, lost, second = lines(told)
        assert (first, second) == ("half way", "half way")
        assert lost.startswith(f"({serving}, which ran layers 3-5, was lost")
        assert route(told) == ["sofa", spared]
