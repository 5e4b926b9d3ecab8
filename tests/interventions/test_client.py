"""An unmodified nnsight client against real nodes: HTTP, queue, jail, hops on other machines."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from nnsight import CONFIG

from mesh.cli.local_node import LocalNode
from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.jobs.test_matrix import ERRORS, FEW, NAMES
from tests.interventions.jobworld import client, tracing_with
from tests.interventions.worlds import checkpoint, equal, whole
from tests.mesh_e2e.conftest import StartNode, start_node  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(900)
HELD = {"attic": "0-1", "kitchen": "1-3", "study": "4-5", "sofa": "none"}


@pytest.fixture(scope="module")
def sofa(start_node: StartNode) -> LocalNode:  # noqa: F811
    """A node without layers that asks three others."""
    model = f"{Path(checkpoint('llama').directory)}=llama"
    nodes = {
        name: start_node(name, "--model", model, "--layers", layers, "--dtype", "fp32")
        for name, layers in HELD.items()
    }
    for node in nodes.values():
        node.wait_ready()
    return nodes["sofa"]


@contextmanager
def remotely(node: LocalNode) -> Iterator[None]:
    """Meanwhile every trace of a client's model is ``remote=True`` at `node`."""
    with pytest.MonkeyPatch.context() as patch, tracing_with(lambda _: {"remote": True}):
        patch.setattr(CONFIG.API, "HOST", node.url)
        patch.setattr(CONFIG.API, "APIKEY", node.record.api_key)
        patch.setattr(CONFIG.APP, "REMOTE_LOGGING", False)
        yield


def differing(node: LocalNode, names: Iterable[str]) -> dict[str, str]:
    """The cases that do not come out as on one machine, and how."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        case = {**CASES, **GRADIENTS}[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = case(Parts(whole("llama")))
        try:
            with remotely(node):
                seen = case(Parts(client("llama")))
            if name in ERRORS:
                assert expected[0] in seen[1]
                assert expected[1] in seen[1]
            else:
                equal(seen, expected, 1e-4 if name in GRADIENTS else 0.0)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            found[name] = f"{type(error).__name__}: {error}"[-1500:]
    return found


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")


@pytest.mark.slow
def test_a_client_gets_the_numbers_of_one_machine(sofa: LocalNode) -> None:
    assert differing(sofa, [*FEW, *ERRORS]) == {}


@pytest.mark.chaos
def test_every_case_through_the_client(sofa: LocalNode) -> None:
    assert differing(sofa, NAMES) == {}
