"""Daemons for end-to-end tests: real processes on loopback, in a hearth of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode
from mesh.paths import StatePaths
from tests.warm.daemons import WarmNode

StartNode = Callable[..., LocalNode]


@pytest.fixture(scope="module")
def start_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNode]:
    """Starts daemons that the module's tests share; ends them all."""
    with starter(tmp_path_factory.mktemp("nodes")) as start:
        yield start


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts daemons for one test alone; ends them all."""
    with starter(tmp_path) as start:
        yield start


@contextmanager
def starter(root: Path) -> Iterator[StartNode]:
    """Starts daemons of one hearth that nobody else's tests see."""
    nodes: list[LocalNode] = []
    with ExitStack() as stack:

        def start(name: str, *flags: str, environment: dict[str, str] | None = None) -> LocalNode:
            """The first node founds the hearth, the others join it before they start."""
            variables = {
                "OMP_NUM_THREADS": "1",
                "HEARTHNET_MODELS_DIR": str(root / name / "models"),
                **(environment or {}),
            }
            node = WarmNode(name, root / name, ("--threads", "1", *flags), variables)
            if nodes and not StatePaths(node.state_dir).hearth.exists():
                nodes[0].wait_up()
                node.join(nodes[0])
            nodes.append(node)
            return stack.enter_context(node)

        yield start
