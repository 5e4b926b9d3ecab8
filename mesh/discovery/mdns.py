"""Finding the other nodes of the local network by multicast DNS.

Announces this node on the chosen interfaces, keeps a bounded table of what others announce, drops
those that say goodbye or stop answering. Knows nothing of links, keys or trust: what it reports is
a hint. Without working multicast it says so once, and keeps trying; nothing else stops.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.clock import set_by
from mesh.discovery.announcement import Announcement, from_record, is_instance
from mesh.discovery.events import Warned
from mesh.discovery.interfaces import InterfaceChoice
from mesh.discovery.multicast import Multicast, joinable
from mesh.processes.tasks import end, spawn

logger = logging.getLogger(__name__)

MAX_INSTANCES = 256
_RESOLVE_AT_ONCE = 16
_FAILURES_TO_FORGET = 3
_LOG_EVERY_S = 60.0
_LOOKS_APART_S = 2.0
"""Links of one moment are lost together."""


@dataclass(frozen=True, slots=True)
class MdnsSettings:
    """How often and how long, in seconds.

    `ttl_s` is how long others believe our records unasked; `refresh_s` how often we look at theirs
    again: a node that vanished silently is gone after `ttl_s + refresh_s` and a resolve's timeout.
    """

    ttl_s: int = 60
    refresh_s: float = 20.0
    resolve_timeout_s: float = 3.0
    hear_self_s: float = 5.0


@dataclass(slots=True)
class _Row:
    """One announced instance; `announcement` is None until resolved and while it is silent."""

    announcement: Announcement | None = None
    failures: int = 0


class Mdns:
    """Announces one node and browses for the others; `announcements` is the table."""

    def __init__(
        self,
        choose: Callable[[], Sequence[InterfaceChoice]],
        settings: MdnsSettings | None = None,
    ) -> None:
        """`choose` is asked again at every refresh, in a thread: a laptop changes networks."""
        self._choose = choose
        self._settings = settings or MdnsSettings()
        self._on_change: Callable[[], None] = lambda: None
        self._on_warning: Callable[[Warned], None] = lambda warning: None
        self._rows: dict[str, _Row] = {}
        self._unresolved: set[str] = set()
        self._choices: list[InterfaceChoice] | None = None
        self._multicast: Multicast | None = None
        self._own: Announcement | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._refreshed_at = self._refresh_at = float("-inf")
        self._resolving = 0
        self._heard_self = False
        self._ignored = 0
        self._logged_at = -_LOG_EVERY_S

    async def start(
        self,
        own: Announcement,
        on_change: Callable[[], None],
        on_warning: Callable[[Warned], None],
    ) -> None:
        """Announce `own` (its addresses are filled in here) and browse until `stop`.

        Never fails for want of multicast: that is a warning with the code ``no_multicast``.
        """
        self._own, self._on_change, self._on_warning = own, on_change, on_warning
        await self._follow_interfaces()
        self._refreshed_at = asyncio.get_running_loop().time()
        self._refresh_at = self._refreshed_at + self._settings.refresh_s
        self._task = spawn(self._run(), "mdns")

    def look_again(self) -> None:
        """A link is lost: look now whether this machine's addresses or others' are others."""
        soonest = max(self._refreshed_at + _LOOKS_APART_S, asyncio.get_running_loop().time())
        self._refresh_at = min(self._refresh_at, soonest)
        self._wake.set()

    async def stop(self) -> None:
        """Say goodbye; safe without `start`."""
        await end([self._task])
        self._task = None
        await self._close()

    async def announce(self, shards: str) -> None:
        """Change the summary of shards that others see."""
        await self._say(shards=shards)

    async def announce_window(self, port: int | None) -> None:
        """Say where an invitation can be taken up; None when it no longer can."""
        await self._say(pairing=port)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses this node announces; empty while it cannot."""
        return self._own.addresses if self._own is not None else ()

    def announcements(self) -> list[Announcement]:
        """The instances that answer now, of every hearth; never this run of this node."""
        return [row.announcement for row in self._rows.values() if row.announcement is not None]

    async def _say(self, **changes: Any) -> None:
        before = self._own
        if before is None or (changed := replace(before, **changes)) == before:
            return
        self._own = changed
        if self._multicast is not None:
            await self._multicast.update(changed)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        hear_until = now() + self._settings.hear_self_s
        async with asyncio.TaskGroup() as resolving:
            while True:
                await self._sleep_until(min(self._refresh_at, hear_until))
                if now() >= hear_until:
                    hear_until = float("inf")
                    self._warn_if_deaf()
                if now() >= self._refresh_at:
                    self._refreshed_at = now()
                    self._refresh_at = self._refreshed_at + self._settings.refresh_s
                    await self._follow_interfaces()
                    self._refresh()
                self._resolve_some(resolving)

    async def _sleep_until(self, deadline: float) -> None:
        if await set_by(self._wake, deadline):
            self._wake.clear()

    async def _follow_interfaces(self) -> None:
        """Open, or open again when the machine's addresses are others than last time."""
        choices = list(await asyncio.to_thread(self._choose))
        changed = choices != self._choices
        if not changed and (self._multicast is not None or not choices):
            return
        await self._close()
        self._choices = choices
        reasons = await self._open(choices)
        if reasons and changed:
            self._warn("; ".join(reasons))

    async def _open(self, choices: Sequence[InterfaceChoice]) -> list[str]:
        """Announce and browse where it is possible; why it is not elsewhere."""
        if self._own is None or not choices:
            return ["this machine has no network interface to use"]
        refused = {choice: joinable(str(choice.address)) for choice in choices}
        reasons = [f"{c.name} ({c.address}): {why}" for c, why in refused.items() if why]
        addresses = tuple(str(choice.address) for choice, why in refused.items() if why is None)
        if addresses:
            own = self._own = replace(self._own, addresses=addresses)
            try:
                multicast = await Multicast.open(
                    addresses, own, self._on_state, ttl_s=self._settings.ttl_s
                )
            except OSError as error:
                reasons.append(error.strerror or str(error))
            else:
                self._multicast = multicast
                if self._own != own:  # somebody had something else to say meanwhile
                    await multicast.update(self._own)
        return reasons

    def _on_state(self, instance: str, alive: bool) -> None:
        if self._own is not None and instance == self._own.instance:
            self._heard_self = self._heard_self or alive
        elif not alive:
            self._unresolved.discard(instance)
            row = self._rows.pop(instance, None)
            if row is not None and row.announcement is not None:
                self._on_change()
        elif self._admit(instance):
            self._unresolved.add(instance)
            self._wake.set()

    def _admit(self, instance: str) -> bool:
        """Whether there is a row for the instance now.

        A full table gives up silent rows and those of other hearths before it refuses one.
        """
        if instance in self._rows:
            return True
        if not is_instance(instance):
            self._ignore(f"{instance[:80]!r} is not one of ours")
            return False
        if len(self._rows) >= MAX_INSTANCES:
            victim = next((name for name, row in self._rows.items() if self._expendable(row)), None)
            if victim is None:
                self._ignore(f"there are {MAX_INSTANCES} announced nodes already")
                return False
            del self._rows[victim]
            self._unresolved.discard(victim)
        self._rows[instance] = _Row()
        return True

    def _expendable(self, row: _Row) -> bool:
        if row.announcement is None:
            return row.failures > 0
        return self._own is not None and row.announcement.hearth != self._own.hearth

    def _refresh(self) -> None:
        """Ask everybody again, and give those a chance for whom there was no room."""
        if self._multicast is None:
            return
        for instance, row in list(self._rows.items()):
            if row.failures >= _FAILURES_TO_FORGET:
                del self._rows[instance]
        known = [name for name in self._multicast.instances() if name not in self._rows]
        own = self._own.instance if self._own else ""
        for instance in random.sample(known, len(known)):
            if len(self._rows) >= MAX_INSTANCES:
                break
            if instance != own and is_instance(instance):
                self._rows[instance] = _Row()
        self._unresolved.update(self._rows)

    def _resolve_some(self, group: asyncio.TaskGroup) -> None:
        if self._multicast is None:
            return
        while self._unresolved and self._resolving < _RESOLVE_AT_ONCE:
            instance = self._unresolved.pop()
            self._resolving += 1
            group.create_task(self._resolve(self._multicast, instance), name="mdns resolve")

    async def _resolve(self, multicast: Multicast, instance: str) -> None:
        try:
            record = await multicast.resolve(instance, self._settings.resolve_timeout_s)
        finally:
            self._resolving -= 1
            self._wake.set()
        row = self._rows.get(instance)
        if row is None:
            return  # it said goodbye meanwhile
        before, row.announcement = row.announcement, None
        if record is None:
            row.failures += 1
        else:
            try:
                row.announcement = from_record(instance, *record, self._choices or [])
                row.failures = 0
            except ValueError as error:
                row.failures += 1
                self._ignore(f"{instance[:80]!r}: {error}")
        if row.announcement != before:
            self._on_change()

    async def _close(self) -> None:
        multicast, self._multicast = self._multicast, None
        if multicast is None:
            return
        try:
            await multicast.close()
        except (OSError, TimeoutError) as error:
            logger.warning("mdns: could not say goodbye: error=%r", error)

    def _warn_if_deaf(self) -> None:
        if self._multicast is not None and not self._heard_self:
            self._warn("this node does not hear its own announcements; a firewall may drop them")

    def _warn(self, reason: str) -> None:
        own = self._own
        address = f"{own.addresses[0]}:{own.port}" if own and own.addresses else "HOST:PORT"
        self._on_warning(
            Warned(
                code="no_multicast",
                message=f"Multicast DNS does not work: {reason}. Nodes may not find each other.",
                fix="Name one node on the other: hearthnet up --peer HOST:PORT"
                f" (this node is --peer {address}).",
            )
        )

    def _ignore(self, reason: str) -> None:
        """One line a minute at most, whatever the network sends."""
        self._ignored += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("mdns: ignored records: count=%d last=%s", self._ignored, reason)
            self._ignored = 0
