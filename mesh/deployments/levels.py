"""The levels of a deployment, and what has to go where there is no room: the seed's rules, pure.

HOT: its layers are loaded. WARM: a node still offers them, and their weights are off the device;
the files lie mapped or in the page cache, so that the next request loads them from main memory
(`shard_eviction_idle_seconds`). COLD: on disk only, nobody offers them; a request by who may wakes
it. A dedicated deployment never goes down; others not before they have been up for their minimum
time, unless a dedicated one needs the room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

CACHE_SHARE = 0.9
"""So much of a machine's memory may hold what is off the device."""


class Level(StrEnum):
    """Where a deployment's weights are."""

    HOT = "HOT"
    WARM = "WARM"
    COLD = "COLD"


class CandidateLevel(IntEnum):
    """How well a machine suits a deployment; the lowest is taken."""

    DEPLOYED = 0
    """It runs there already."""
    CACHED_AND_FREE = 1
    """Its weights are in main memory there, and the device has room."""
    FREE = 2
    """The device has room."""
    CACHED_AND_FULL = 3
    """Its weights are in main memory there, and others have to go from the device."""
    FULL = 4
    """Others have to go from the device."""
    CANT_ACCOMMODATE = 5
    """It would not fit if all went that may."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What a deployment takes on one machine. `age_s` is for how long it has been up there."""

    deployment: str
    mb: int
    age_s: float
    minimum_s: float
    dedicated: bool = False


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a deployment would take on one machine; whether it is there already, or cached."""

    deployment: str
    mb: int
    dedicated: bool = False
    is_deployed: bool = False
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine for a newcomer, and who has to go there, in that order."""

    level: CandidateLevel
    evictions: tuple[str, ...] = ()


def candidate(
    newcomer: Newcomer, free_mb: int, total_mb: int, residents: Sequence[Resident]
) -> Candidate:
    """How well a machine with so much memory free suits."""
    if newcomer.is_deployed:
        return Candidate(CandidateLevel.DEPLOYED)
    if newcomer.mb <= free_mb:
        is_cached = newcomer.is_cached
        return Candidate(CandidateLevel.CACHED_AND_FREE if is_cached else CandidateLevel.FREE)
    going = evictions(newcomer.mb - free_mb, residents, dedicated=newcomer.dedicated)
    if newcomer.mb > total_mb or not going:
        return Candidate(CandidateLevel.CANT_ACCOMMODATE)
    full = CandidateLevel.CACHED_AND_FULL if newcomer.is_cached else CandidateLevel.FULL
    return Candidate(full, going)


def evictions(needed_mb: int, residents: Sequence[Resident], *, dedicated: bool) -> tuple[str, ...]:
    """Who goes so that `needed_mb` get free, the smallest first; nobody when that is not enough.

    Only for a `dedicated` newcomer one goes that has not been up for its minimum time.
    """
    going: list[str] = []
    for resident in sorted(residents, key=lambda each: (each.mb, each.deployment)):
        if needed_mb <= 0:
            break
        if resident.dedicated or (not dedicated and resident.age_s < resident.minimum_s):
            continue
        going.append(resident.deployment)
        needed_mb -= resident.mb
    return tuple(going) if needed_mb <= 0 else ()


def best(candidates: Mapping[str, Candidate]) -> str | None:
    """The machine to take: of the lowest level, the fewest evictions, the lowest id; None when none
    can accommodate it. The seed draws lots among equals, which two planners would do differently.
    """
    able = [
        (each.level, len(each.evictions), name)
        for name, each in candidates.items()
        if each.level is not CandidateLevel.CANT_ACCOMMODATE
    ]
    return min(able)[2] if able else None


def is_cacheable(mb: int, host_mb: int, cached_mb: int) -> bool:
    """Whether what leaves the device stays in main memory, beside what is cached there already."""
    return cached_mb + mb <= host_mb * CACHE_SHARE


@dataclass(frozen=True, slots=True)
class Delta:
    """What a change of levels takes, in the order in which it is done: what frees memory first."""

    delete: tuple[str, ...]
    cache: tuple[str, ...]
    from_cache: tuple[str, ...]
    create: tuple[str, ...]


def delta(now: Mapping[str, Level], wanted: Mapping[str, Level]) -> Delta:
    """The steps from the levels of now to those wanted; what is not named is COLD."""
    names: Collection[str] = sorted({*now, *wanted})
    steps = {name: (now.get(name, Level.COLD), wanted.get(name, Level.COLD)) for name in names}

    def those(*moves: tuple[Level, Level]) -> tuple[str, ...]:
        return tuple(name for name, move in steps.items() if move in moves)

    return Delta(
        delete=those((Level.HOT, Level.COLD), (Level.WARM, Level.COLD)),
        cache=those((Level.HOT, Level.WARM)),
        from_cache=those((Level.WARM, Level.HOT)),
        create=those((Level.COLD, Level.HOT)),
    )
