"""That nobody who serves a model's layers gives a session on them now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mesh.errors import (
    BadSteering,
    Busy,
    CacheFull,
    ContextTooLong,
    DiskFull,
    MeshError,
    NoRoute,
    from_dict,
)

if TYPE_CHECKING:
    from mesh.pipeline.route import HopLost

_FULL = (Busy, CacheFull)
"""What a shard refuses a session with that it may give the next moment."""


class RouteRefused(NoRoute):
    """No route, after some shards refused; `all_full`: each of them because it is full."""

    def __init__(self, nobody: NoRoute, refused: Collection[HopLost]) -> None:
        self.said = "".join(
            f" {lost.hop.shard.node_name}: {lost.error.message}" for lost in refused
        )
        self.all_full = all(isinstance(lost.error, _FULL) for lost in refused)
        super().__init__(nobody.message + self.said, fix=nobody.fix)


def why_nobody(nobody: NoRoute, refused: Sequence[HopLost]) -> MeshError:
    """What to say where nobody is left: the last one's refusal if other shards would not help but
    another request or setting, else that there is no route."""
    if all(isinstance(lost.error, ContextTooLong) for lost in refused):
        return refused[-1].error
    if all(isinstance(lost.error, DiskFull) for lost in refused):
        return named(refused[-1])
    return edits_refused(refused) or RouteRefused(nobody, refused)


def edits_refused(refused: Iterable[HopLost]) -> BadSteering | None:
    """What one of them says against the request's edits. A second one is asked, as any would refuse
    edits that are bad."""
    return next((lost.error for lost in refused if isinstance(lost.error, BadSteering)), None)


def named(lost: HopLost) -> MeshError:
    """The error with the node's name before it, where something has to be done."""
    message = f"{lost.hop.shard.node_name}: {lost.error.message}"
    return from_dict({**lost.error.to_dict(), "message": message})
