"""The shard processes of a node with several devices, one each, as its other parts use them.

A shard is on one of them, and what is asked of it by name goes there. A node with one device uses
that one's `ShardSupervisor` itself, which this stands in for. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from mesh.errors import MeshError
from mesh.shard.commands import Health, ShardRequest
from mesh.shard.local_shard import LocalShard
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import ShardId

T = TypeVar("T")


class SeveralDevices:
    """Has what `ShardSupervisor` has, of all `processes` together."""

    def __init__(self, processes: Mapping[str, ShardSupervisor]) -> None:
        """`processes` by the names of their devices, the one to use first before the others."""
        self.processes = processes

    # What they hold

    @property
    def wanted(self) -> dict[ShardId, ShardRequest]:
        """What is to be served."""
        return _joined(each.wanted for each in self._each)

    @property
    def shards(self) -> dict[ShardId, LocalShard]:
        """What is here of that."""
        return _joined(each.shards for each in self._each)

    @property
    def private(self) -> dict[ShardId, LocalShard]:
        """What was loaded for this node alone."""
        return _joined(each.private for each in self._each)

    @property
    def private_serving(self) -> dict[ShardId, LocalShard]:
        """Of that, what may be used now."""
        return _joined(each.private_serving for each in self._each)

    @property
    def serving(self) -> list[LocalShard]:
        """What may be offered now."""
        return [shard for each in self._each for shard in each.serving]

    @property
    def failed(self) -> dict[ShardId, MeshError]:
        """Why wanted ones are not here."""
        return _joined(each.failed for each in self._each)

    @property
    def reasons(self) -> tuple[str, ...]:
        """How the devices were chosen."""
        return tuple(reason for each in self._each for reason in each.reasons)

    @property
    def health(self) -> Health:
        """How they do, with the memory of the first device that is known."""
        said = [each.health for each in self._each]
        return Health(
            tuple(chain.from_iterable(each.shards for each in said)),
            sum(each.rss_mb for each in said),
            list(chain.from_iterable(each.sessions for each in said)),
            list(chain.from_iterable(each.accounts for each in said)),
            next((each.memory for each in said if each.memory is not None), None),
        )

    @property
    def is_to_run(self) -> bool:
        """Whether any of them is."""
        return any(each.is_to_run for each in self._each)

    def knows(self, name: ShardId) -> bool:
        """Whether a wanted shard has loaded or failed."""
        return any(each.knows(name) for each in self._each if name in each.wanted)

    # What they are asked for

    async def ensure(self, request: ShardRequest) -> LocalShard:
        """See `ShardSupervisor.ensure`: where it is, or on the device with the most room."""
        process = self._of(request.shard_id) or self._roomiest()
        return await process.ensure(request)

    async def serve(self, request: ShardRequest, device: str) -> LocalShard:
        """See `ShardSupervisor.serve`: where it is, or on this device, '' for any."""
        named = self.processes.get(device)
        process = self._of(request.shard_id) or named or self._roomiest()
        return await process.serve(request)

    async def drop(self, name: ShardId, grace_s: float) -> int:
        """See `ShardSupervisor.drop`."""
        process = self._of(name)
        return 0 if process is None else await process.drop(name, grace_s)

    async def drain(self, grace_s: float) -> None:
        """End all processes; see `ShardSupervisor.drain`."""
        await asyncio.gather(*(each.drain(grace_s) for each in self._each))

    def distrust(self, name: ShardId, error: MeshError) -> None:
        """Load it anew, if it is here."""
        if (process := self._of(name)) is not None:
            process.distrust(name, error)

    def try_again(self) -> None:
        """Load what did not load, whatever happened when that was tried."""
        for each in self._each:
            each.try_again()

    def pause(self, paused: bool) -> None:
        """Ask whoever has a session here to move it elsewhere; False takes that back."""
        for each in self._each:
            each.pause(paused)

    def revoke_tokens(self, token_ids: Sequence[str]) -> None:
        """Exactly these tokens are revoked."""
        for each in self._each:
            each.revoke_tokens(token_ids)

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those whose links are trusted from now on."""
        for each in self._each:
            each.trust(members)

    # Private

    @property
    def _each(self) -> list[ShardSupervisor]:
        return list(self.processes.values())

    def _of(self, name: ShardId) -> ShardSupervisor | None:
        return next((each for each in self._each if each.has(name)), None)

    def _roomiest(self) -> ShardSupervisor:
        """The one with the most room, of those that say what they have; else the first."""
        free = [0 if (said := each.health.memory) is None else said.free_mb for each in self._each]
        return self._each[free.index(max(free))]


def _joined(parts: Iterable[Mapping[ShardId, T]]) -> dict[ShardId, T]:
    return dict(chain.from_iterable(part.items() for part in parts))


ShardHost = ShardSupervisor | SeveralDevices
"""What serves a node's shards."""
