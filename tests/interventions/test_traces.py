"""Every kind of trace, on the whole model and over hops of overlapping shards: the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.worlds import Remote, equal, remote, whole

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "qwen3_moe")
GRADIENT_TOLERANCE = 1e-4


@cache
def reference(family: str) -> Parts:
    return Parts(whole(family))


@cache
def spread(family: str, hops: int) -> tuple[Parts, Remote]:
    world = remote(family, hops)
    return Parts(world.model), world


def places() -> list[tuple[str, int]]:
    """Every family over three hops; one of them also over one and two."""
    return [*((family, 3) for family in FAMILIES), ("llama", 1), ("gpt2", 2)]


def compare(run: Callable[[Parts], Any], family: str, hops: int, tolerance: float) -> None:
    with warnings.catch_warnings():
        # What transformers and nnsight say about generation settings is not the subject.
        warnings.simplefilter("ignore")
        expected = run(reference(family))
        found = run(spread(family, hops)[0])
    equal(found, expected, tolerance)


@pytest.mark.parametrize(("family", "hops"), places())
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_machine(name: str, family: str, hops: int) -> None:
    compare(CASES[name], family, hops, 0.0)


@pytest.mark.parametrize(("family", "hops"), places())
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_machine(name: str, family: str, hops: int) -> None:
    compare(GRADIENTS[name], family, hops, GRADIENT_TOLERANCE)
