"""An unmodified nnsight client against real nodes: HTTP, queue, jail, hops on other machines."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from mesh.cli.local_node import LocalNode
from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.households import HOUSES, Chatting, move_in, remotely, undisturbed
from tests.interventions.jobs.test_matrix import ERRORS, FAMILIES, FEW, NAMES
from tests.interventions.jobworld import client
from tests.interventions.worlds import equal, whole
from tests.mesh_e2e.conftest import StartNode, start_node, starter  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(1800)
EACH, BESIDE_CHAT = 8, 3
"""How many kinds of trace each family runs over each number of hops; and again beside a chat."""


@pytest.fixture(scope="module")
def sofa(start_node: StartNode) -> LocalNode:  # noqa: F811
    """A node without layers that asks three others."""
    return move_in(start_node, HOUSES[3], ["llama"])


def some(family: str, hops: int) -> list[str]:
    """A part of all kinds of traces, another one for each family and number of hops."""
    first = EACH * (FAMILIES.index(family) * len(HOUSES) + hops - 1)
    return [NAMES[(first + more) % len(NAMES)] for more in range(EACH)]


def differing(
    node: LocalNode, names: Iterable[str], family: str = "llama", hops: int = 3
) -> dict[str, str]:
    """The cases that do not come out as on one machine over this many hops, and how."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        case = {**CASES, **GRADIENTS}[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = case(Parts(whole(family)))
        try:
            with remotely(node) as told:
                seen = case(Parts(client(family)))
            if name in ERRORS:
                assert expected[0] in seen[1]
                assert expected[1] in seen[1]
                continue
            equal(seen, expected, 1e-4 if name in GRADIENTS else 0.0)
            routes = [each.meta["hops"] for each in told if each.status.value == "COMPLETED"]
            assert routes
            assert all(tuple(route) == HOUSES[hops].route for route in routes), routes
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            found[name] = f"{type(error).__name__}: {error}"[-1500:]
    return found


@pytest.mark.slow
def test_a_client_gets_the_numbers_of_one_machine(sofa: LocalNode) -> None:
    assert differing(sofa, [*FEW, *ERRORS]) == {}


@pytest.mark.chaos
def test_every_case_through_the_client(sofa: LocalNode) -> None:
    assert differing(sofa, NAMES) == {}


def test_the_matrix_through_the_client_is_large() -> None:
    matrix = {
        (name, family, hops)
        for family in FAMILIES
        for hops in HOUSES
        for name in some(family, hops)
    }
    assert len(matrix) >= 120
    assert {name for name, _, _ in matrix} == set(NAMES)
    assert all(len(house.route) == hops for hops, house in HOUSES.items())
    assert len(FAMILIES) * len(HOUSES) * BESIDE_CHAT >= 40


@pytest.mark.chaos
@pytest.mark.parametrize("hops", HOUSES)
def test_the_matrix_through_the_client(hops: int, tmp_path: Path) -> None:
    with starter(tmp_path) as start:
        node = move_in(start, HOUSES[hops], FAMILIES)
        for family in FAMILIES:
            assert differing(node, some(family, hops), family, hops) == {}, family
        for family in FAMILIES:
            expected, talk = undisturbed(family), Chatting(node, family)
            with talk.meanwhile():
                found = differing(node, some(family, hops)[:BESIDE_CHAT], family, hops)
            assert found == {}, family
            assert talk.answers == [expected] * len(talk.answers), family
