"""The levels of a deployment, and who goes where there is no room: the seed's rules, pure.

HOT: its layers are loaded. WARM: a node still offers them, and their weights are off the device;
the files lie mapped or in the page cache, so that the next request loads them from main memory
(`shard_eviction_idle_seconds`). COLD: on disk only, nobody offers them; a request by who may wakes
it. A dedicated deployment never goes down; others not before they have been up for their minimum
time, unless a dedicated one needs the room. `docs/decisions/levels.md` has what of the seed's
levels is whose business here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mesh.types import ShardHealth


class Level(StrEnum):
    """Where a deployment's weights are."""

    HOT = "HOT"
    WARM = "WARM"
    COLD = "COLD"


def level_of(offered: Iterable[ShardHealth]) -> Level:
    """Where the weights of a model are whose shards say this of themselves, by whoever holds them.

    One whose host does not say what memory it takes counts as loaded.
    """
    resident = [each.memory is None or each.memory.weights_mb > 0 for each in offered]
    if not resident:
        return Level.COLD
    return Level.HOT if any(resident) else Level.WARM


@dataclass(frozen=True, slots=True)
class Resident:
    """What a deployment takes on one machine. `age_s` is for how long it has been up there."""

    deployment: str
    mb: int
    age_s: float
    minimum_s: float
    dedicated: bool = False


def may_go(resident: Resident, *, dedicated: bool) -> bool:
    """Whether it may make room for another deployment, which is `dedicated` or not.

    Only for a dedicated one goes what has not been up for its minimum time.
    """
    return not resident.dedicated and (dedicated or resident.age_s >= resident.minimum_s)


def evictions(needed_mb: int, residents: Sequence[Resident], *, dedicated: bool) -> tuple[str, ...]:
    """Who goes so that `needed_mb` get free, the smallest first; nobody when all who may are not
    enough."""
    going: list[str] = []
    for resident in sorted(residents, key=lambda each: (each.mb, each.deployment)):
        if needed_mb <= 0:
            break
        if may_go(resident, dedicated=dedicated):
            going.append(resident.deployment)
            needed_mb -= resident.mb
    return tuple(going) if needed_mb <= 0 else ()
