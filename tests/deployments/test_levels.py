"""The seed's minimum time and order of evictions."""

from __future__ import annotations

from datetime import UTC, datetime

from mesh.deployments.levels import Level, Resident, evictions, level_of
from mesh.deployments.wishes import MINIMUM_S
from mesh.types import ShardHealth, ShardMemory

HOUR = 3600.0
SMALL = Resident("small", 10, age_s=HOUR, minimum_s=MINIMUM_S)
LARGE = Resident("large", 40, age_s=2 * HOUR, minimum_s=MINIMUM_S)
YOUNG = Resident("young", 20, age_s=HOUR - 1, minimum_s=MINIMUM_S)
DEDICATED = Resident("dedicated", 5, age_s=9 * HOUR, minimum_s=MINIMUM_S, dedicated=True)
ALL = [LARGE, DEDICATED, YOUNG, SMALL]


def says(memory: ShardMemory | None) -> ShardHealth:
    return ShardHealth(True, datetime.now(UTC), 1.0, 2.0, 0, 0, memory)


def test_a_model_is_hot_as_long_as_any_of_its_layers_is_on_a_device() -> None:
    loaded, freed = says(ShardMemory(weights_mb=10)), says(ShardMemory(headroom_mb=3))
    assert level_of([freed, loaded]) is Level.HOT
    assert level_of([freed, says(None)]) is Level.HOT
    assert level_of([freed, freed]) is Level.WARM
    assert level_of([]) is Level.COLD


def test_the_minimum_deployment_time_is_the_seeds() -> None:
    assert MINIMUM_S == 3600.0


def test_the_smallest_go_first_and_only_those_that_may() -> None:
    assert evictions(10, ALL, dedicated=False) == ("small",)
    assert evictions(11, ALL, dedicated=False) == ("small", "large")
    assert evictions(51, ALL, dedicated=False) == ()
    assert evictions(51, ALL, dedicated=True) == ("small", "young", "large")
    assert evictions(71, ALL, dedicated=True) == (), "a dedicated one never goes"
    assert evictions(0, ALL, dedicated=False) == ()
