"""The seed's numbers and order of levels."""

from __future__ import annotations

from mesh.deployments.levels import (
    Candidate,
    CandidateLevel,
    Delta,
    Level,
    Newcomer,
    Resident,
    best,
    candidate,
    delta,
    evictions,
    is_cacheable,
)
from mesh.deployments.wishes import MINIMUM_S

HOUR = 3600.0
SMALL = Resident("small", 10, age_s=HOUR, minimum_s=MINIMUM_S)
LARGE = Resident("large", 40, age_s=2 * HOUR, minimum_s=MINIMUM_S)
YOUNG = Resident("young", 20, age_s=HOUR - 1, minimum_s=MINIMUM_S)
DEDICATED = Resident("dedicated", 5, age_s=9 * HOUR, minimum_s=MINIMUM_S, dedicated=True)
ALL = [LARGE, DEDICATED, YOUNG, SMALL]


def test_the_minimum_deployment_time_is_the_seeds() -> None:
    assert MINIMUM_S == 3600.0


def test_the_smallest_go_first_and_only_those_that_may() -> None:
    assert evictions(10, ALL, dedicated=False) == ("small",)
    assert evictions(11, ALL, dedicated=False) == ("small", "large")
    assert evictions(51, ALL, dedicated=False) == ()
    assert evictions(51, ALL, dedicated=True) == ("small", "young", "large")
    assert evictions(71, ALL, dedicated=True) == (), "a dedicated one never goes"
    assert evictions(0, ALL, dedicated=False) == ()


def test_candidate_levels_0_to_5() -> None:
    def level(free_mb: int, total_mb: int = 100, **more: bool) -> CandidateLevel:
        return candidate(Newcomer("new", 50, **more), free_mb, total_mb, ALL).level

    assert level(0, is_deployed=True) == 0
    assert level(50, is_cached=True) == 1
    assert level(50) == 2
    assert level(0, is_cached=True) == 3
    assert level(0) == 4
    assert level(0, total_mb=49) == 5
    assert candidate(Newcomer("new", 90), 0, 100, ALL) == Candidate(CandidateLevel(5))
    assert candidate(Newcomer("new", 50), 5, 100, ALL).evictions == ("small", "large")


def test_the_lowest_level_is_taken_and_two_planners_take_the_same() -> None:
    free, full = Candidate(CandidateLevel.FREE), Candidate(CandidateLevel.FULL, ("small",))
    cannot = Candidate(CandidateLevel.CANT_ACCOMMODATE)
    assert best({"a": full, "b": free, "c": free}) == "b"
    assert best({"c": free, "b": free, "a": cannot}) == "b"
    assert best({"a": Candidate(CandidateLevel.FULL, ("x", "y")), "b": full}) == "b"
    assert best({"a": cannot}) is None


def test_nine_tenths_of_a_machine_may_be_cache() -> None:
    assert is_cacheable(90, 100, 0)
    assert not is_cacheable(91, 100, 0)
    assert not is_cacheable(41, 100, 50)


def test_the_order_is_delete_cache_from_cache_create() -> None:
    now = {"a": Level.HOT, "b": Level.HOT, "c": Level.WARM, "e": Level.WARM, "f": Level.HOT}
    wanted = {"b": Level.WARM, "c": Level.HOT, "d": Level.HOT, "f": Level.HOT}
    steps = delta(now, wanted)
    assert steps == Delta(delete=("a", "e"), cache=("b",), from_cache=("c",), create=("d",))
    assert Delta.__slots__ == ("delete", "cache", "from_cache", "create")
