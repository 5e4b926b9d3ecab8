"""Three machines of unequal memory, none of which could hold the model: it comes up, and stays up.

Each node lives in a control group with a limit of its own, as in a machine with so much memory.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.processes.headroom import oom_kills
from tests.cgroups import joining, limited_group
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import (
    MODEL,
    answer,
    held,
    peers,
    placed,
    ready,
    restart_at_once,
    row,
    rows,
    until,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(580)]

LIMITS_MB = {"attic": 1300, "kitchen": 1150, "study": 1000}
"""Some 300 MB of which a node takes that holds nothing."""
LAYERS = 16


@dataclass
class SmallNode(LocalNode):
    """A node that lives in a control group."""

    group: Path = Path()

    def launch(
        self, command: list[str], environment: dict[str, str], tether: int, log: int
    ) -> subprocess.Popen[bytes]:
        """See `LocalNode`."""
        return super().launch(joining(self.group, *command), environment, tether, log)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """In fp32, so that ids are to be the same wherever it is cut; 700 MB of layers."""
    directory = tmp_path / "models" / MODEL
    return make_checkpoint(directory, "llama", layers=LAYERS, hidden=1024, intermediate_size=2816)


@pytest.fixture
def house(checkpoint: Path, tmp_path: Path) -> Iterator[dict[str, SmallNode]]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "HEARTHNET_MODELS_DIR": str(checkpoint.parent),
        "HEARTHNET_DEPLOYMENTS__REPLAN_SECONDS": "30",
        # Its cache is set aside whole: with so many positions no two have room for all layers.
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__KV_TOKENS": "13312",
    }
    with ExitStack() as stack:
        nodes = {}
        for name, limit_mb in LIMITS_MB.items():
            group = stack.enter_context(limited_group(limit_mb, name))
            flags = ("--threads", "1", "--layers", "none")
            nodes[name] = SmallNode(name, tmp_path / name, flags, environment, group=group)
        start_hearth(list(nodes.values()), stack)
        for node in nodes.values():
            node.wait_up()
        for node in nodes.values():
            until(lambda node=node: len(peers(node)) == len(nodes) - 1, "they see each other")
        yield nodes


def test_a_model_too_large_for_each_comes_up_over_all_and_stays_as_wished(
    house: dict[str, SmallNode], checkpoint: Path
) -> None:
    attic, kitchen, study = house.values()
    more = ("--raw", "--max-tokens", "8", "--ignore-eos", "--json")
    ran = hearthnet("run", MODEL, "The kettle", *more, node=study)
    assert ran.returncode == 0, ran.stderr
    prompt = AutoTokenizer.from_pretrained(checkpoint).encode("The kettle")
    facts = json.loads(ran.stdout)["hearthnet"]
    assert facts["token_ids"] == hugging_face(checkpoint, prompt, 8)[0]
    assert {hop["node"] for hop in facts["route"]} == set(house)
    ready(*house.values())
    expected = answer(attic)

    # One dies and returns.
    before = placed(attic)
    lost = house[before[0][1]]
    lost.kill()
    until(lambda: row(next(n for n in house.values() if n is not lost))["missing"], "a gap is seen")
    lost.start()
    lost.wait_up()
    ready(*house.values())
    assert placed(attic) == before
    assert answer(lost) == expected

    # What they have no room for is refused, and nothing is done about it.
    more_often = hearthnet("scale", MODEL, "3", node=kitchen)
    assert more_often.returncode == 5, more_often
    assert "--replicas" in more_often.stderr or "--nodes" in more_often.stderr, more_often.stderr
    assert placed(kitchen) == before
    assert answer(study) == expected

    restart_at_once(*house.values())
    assert answer(study) == expected

    assert hearthnet("evict", MODEL, node=attic).returncode == 0
    for node in house.values():
        until(lambda node=node: not held(node) and not rows(node), "it is gone", node)
        assert node.process is not None
        assert oom_kills(Path(f"/proc/{node.process.pid}")) == 0
