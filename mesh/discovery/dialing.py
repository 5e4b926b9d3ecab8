"""Trying to reach the nodes that were announced or named, patiently. Knows no message but the dial.

One task per target: it dials while nothing links this node to the target, waits while something
does. Failures back off with jitter, so that a rebooted household does not dial in step.

Endpoints are hearsay. A round tries the one that worked last and a few others in turn, so that
forged ones cost time and displace none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from mesh.clock import backoff_s, jittered_s, set_within
from mesh.errors import BadValue
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId, is_port

_AT_ONCE = 8
_A_ROUND = 4
_jitter = random.SystemRandom()


class DialResult(Enum):
    """How one dial ended, as far as the next one is concerned."""

    LINKED = "linked"
    FAILED = "failed"  # try again soon, then less and less often
    REFUSED = "refused"  # no use before somebody changes something there


@dataclass(frozen=True, slots=True)
class DialSettings:
    """Seconds. Waits grow from `first_s` to `most_s` by doubling, each cut by up to a half."""

    first_s: float = 0.5
    most_s: float = 30.0
    refused_s: float = 60.0
    yield_s: float = 0.5
    timeout_s: float = 5.0


@dataclass(slots=True)
class Target:
    """Somebody to dial.

    `endpoints` are in the order of their turns. `pinned` is who must answer; None for a static
    peer, which is whoever answers there. `node_id` is who did, or who should. `is_watched`: there
    is a link, and its end would be news.
    """

    key: str
    endpoints: tuple[str, ...]
    pinned: NodeId | None = None
    node_id: NodeId | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_watched: bool = False
    task: asyncio.Task[None] | None = None


class Dialer:
    """Owns the dial tasks. `dial` tries one endpoint; `is_linked` says whether it is needed."""

    def __init__(
        self,
        dial: Callable[[Target, str], Awaitable[DialResult]],
        is_linked: Callable[[NodeId], bool],
        *,
        own_id: NodeId,
        settings: DialSettings,
    ) -> None:
        self._dial = dial
        self._is_linked = is_linked
        self.own_id = own_id
        self._settings = settings
        self._targets: dict[str, Target] = {}
        # One for each member that was ever reached, also while nothing announces it.
        self._worked: dict[str, str] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def targets(self) -> list[Target]:
        """Everybody who is dialled or waited for."""
        return list(self._targets.values())

    def add(self, key: str, endpoints: tuple[str, ...], pinned: NodeId | None = None) -> None:
        """Dial from now on, until `discard`; new endpoints of a known key are tried at once."""
        target = self._targets.get(key)
        if target is None:
            target = Target(key, endpoints, pinned, pinned)
            self._targets[key] = target
            target.task = spawn(self._keep_linked(target), f"dial {key}")
        elif set(target.endpoints) != set(endpoints):
            known = [endpoint for endpoint in target.endpoints if endpoint in endpoints]
            target.endpoints = tuple(dict.fromkeys([*known, *endpoints]))
            target.wake.set()

    def discard(self, key: str) -> None:
        """Stop dialling; a link that is up stays."""
        target = self._targets.pop(key, None)
        if target is not None and target.task is not None:
            target.task.cancel()

    def lost(self, node_id: NodeId) -> list[str]:
        """The link to a node is gone: whoever waits behind it dials again; their keys.

        Not whoever waits between two dials: a link that breaks as soon as it is up would cut short
        the very wait that it causes.
        """
        waiting = [
            target
            for target in self._targets.values()
            if target.node_id == node_id and target.is_watched
        ]
        for target in waiting:
            target.wake.set()
        return [target.key for target in waiting]

    def retry(self) -> None:
        """Something has changed that may let dials succeed: whoever waits tries now."""
        for target in self._targets.values():
            target.wake.set()

    async def stop(self) -> None:
        """End all dialling."""
        tasks = [target.task for target in self._targets.values() if target.task is not None]
        self._targets.clear()
        await end(tasks)

    async def _keep_linked(self, target: Target) -> None:
        settings = self._settings
        failures = 0
        if target.node_id is not None and target.node_id < self.own_id:
            # Both see each other at the same moment; the link that the smaller id opens would win.
            await self._pause(target, settings.yield_s)
        while True:
            if self._linked(target):
                target.is_watched = True
                await self._pause(target, settings.most_s)
                target.is_watched = False
                if self._linked(target):
                    failures = 0  # it held for a while
                    continue
            elif await self._try_endpoints(target) is DialResult.REFUSED:
                await self._pause(target, jittered_s(settings.refused_s, _jitter))
                continue
            elif self._linked(target):
                continue
            failures += 1
            wait_s = backoff_s(failures, settings.first_s, settings.most_s)
            await self._pause(target, jittered_s(wait_s, _jitter))

    def _linked(self, target: Target) -> bool:
        return target.node_id is not None and self._is_linked(target.node_id)

    async def _try_endpoints(self, target: Target) -> DialResult:
        result = DialResult.FAILED
        for endpoint in self._next_round(target):
            async with self._slots:  # one dial each: a silent address delays its own target most
                result = await self._dial(target, endpoint)
            if result is DialResult.LINKED:
                self._worked[target.key] = endpoint
                break
        return result

    def _next_round(self, target: Target) -> list[str]:
        worked = self._worked.get(target.key)
        turns = [endpoint for endpoint in target.endpoints if endpoint != worked][:_A_ROUND]
        waiting = [endpoint for endpoint in target.endpoints if endpoint not in turns]
        target.endpoints = (*waiting, *turns)
        return turns if worked is None else [worked, *turns]

    async def _pause(self, target: Target, seconds: float) -> None:
        if await set_within(target.wake, seconds):
            target.wake.clear()


def parse_endpoint(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT``; raises BadValue with the parameter ``peer``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not is_port(port):
        raise BadValue(
            f"{text!r} is not HOST:PORT.", fix="For example 192.168.1.5:7700.", param="peer"
        )
    return host, int(port)
