"""That nobody who serves a model's layers gives a session on them now."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mesh.errors import Busy, CacheFull, NoRoute

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
