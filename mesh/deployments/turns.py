"""The turns of a loop that is to go on: what fails in one holds up no other, and waits longer each
time. Knows nothing of what is done in them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from mesh.clock import loop_time
from mesh.deployments.phases import wait_s
from mesh.errors import MeshError, as_mesh_error

logger = logging.getLogger(__name__)

MAX_FAILED = 256


class Turns:
    """`take` them by their names. `on_failure` hears the name and the error of each that failed."""

    def __init__(
        self, doing: str, on_failure: Callable[[str, MeshError], None] = lambda name, error: None
    ) -> None:
        self._doing = doing
        self._on_failure = on_failure
        self._failed: dict[str, tuple[int, float]] = {}
        """How often each failed, and when it may be taken again; of the last `MAX_FAILED`."""

    async def take(self, name: str, turn: Callable[[], Awaitable[None]]) -> None:
        """Take this turn, unless it failed and has to wait still. Raises nothing."""
        count, again_at = self._failed.get(name, (0, 0.0))
        if loop_time() < again_at:
            return
        try:
            await as_mesh_error(turn(), f"{self._doing} {name}")
        except MeshError as error:
            logger.warning("%s %s is put off: %s", self._doing, name, error)
            self._failed.pop(name, None)
            self._failed[name] = count + 1, loop_time() + wait_s(count + 1)
            while len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            self._on_failure(name, error)
        else:
            self._failed.pop(name, None)

    def try_again(self) -> None:
        """Whatever failed may be taken now."""
        self._failed.clear()
