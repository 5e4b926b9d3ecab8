"""The hops of one generation in a row, and the activations on their way through them.

An answer of one station goes straight to the next, in the link's own callback and in its wire form:
no task wakes up in between, nothing is converted. Only what leaves the last station wakes the
generation loop. Chunks of a prefill follow each other through the stations by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mesh.errors import MeshError, PipelineStalled
from mesh.health.sanity import corrupt
from mesh.pipeline.history import slice_rows
from mesh.pipeline.lines import Lines
from mesh.pipeline.opening import Patience
from mesh.pipeline.overseer import Overseer
from mesh.pipeline.station import Station
from mesh.pipeline.terms import SessionTerms
from mesh.routing.cover import ShardKey, key_of
from mesh.types import RouteHop
from mesh.wire.messages import WireTensor

T = TypeVar("T")


class HopLost(Exception):
    """`hop` failed; the chain's station number `index` waits for a replacement."""

    def __init__(self, index: int, hop: RouteHop, error: MeshError) -> None:
        super().__init__(str(error))
        self.index = index
        self.hop = hop
        self.error = error


class Chain:
    """Feeds hidden states in at the front and gives the last row out at the end.

    `widened` counts tensors that overflowed the wire dtype and travelled wider.
    """

    def __init__(
        self, lines: Lines, terms: SessionTerms, overseer: Overseer, patience: Patience
    ) -> None:
        self.terms = terms
        self._overseer = overseer
        self.widened = 0
        self.stations: list[Station] = []
        self._lines = lines
        self._patience = patience
        self._last_row: WireTensor | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._target = 0
        self._served: dict[ShardKey, RouteHop] = {}
        self._liars: dict[ShardKey, MeshError] = {}

    @property
    def is_misled(self) -> bool:
        """Whether a hop's cache was computed from what a liar before it said."""
        return self._misled_by() is not None

    def distrust(self, liar: ShardKey, error: MeshError) -> None:
        """A shard lied: use none of its answers any more, nor what was computed from them."""
        if liar not in self._served:
            return
        self._liars[liar] = error
        for station in self.stations:
            if key_of(station.hop.shard) == liar:
                station.fail(error)
        self._wake()

    async def open(self, hops: Sequence[RouteHop]) -> None:
        """Open a session on every hop at once. Raises HopLost for the first that refuses."""
        self.stations = await self._stations(hops)
        self._note_served(hops)

    async def replace(
        self, index: int, hops: Sequence[RouteHop], max_rows: int, *, count: int = 1
    ) -> None:
        """Put `hops` in the place of `count` stations from `index` on and replay their inputs.

        The others keep their caches. Raises HopLost when a replacement refuses or dies while it is
        opened; the old stations then stay in place, so that this can be tried again.
        """
        self.terms = self.terms.with_room(self.stations[0].history.length)
        try:
            fresh = await self._stations(hops)
        except HopLost as lost:
            raise HopLost(index, lost.hop, lost.error) from lost
        old = self.stations[index : index + count]
        for station in old:
            station.close()
        if count == len(self.stations):
            self._served.clear()  # every cache is rebuilt from the asker's own inputs
        self.stations[index : index + count] = fresh
        self._note_served(hops)
        # The first takes the inputs; only the last knows what the next hop has already seen. What
        # lies between is rebuilt from what the first returns.
        fresh[0].history = old[0].history
        fresh[-1].delivered = old[-1].delivered
        fresh[0].replay(max_rows)

    def feed(self, tensor: WireTensor) -> None:
        """The next rows (1, rows, hidden) for the first hop."""
        self._count_widened(tensor)
        self.stations[0].accept(tensor)

    async def output(self, position: int) -> WireTensor:
        """Wait until every row before `position` has left the last hop; that row (1, 1, hidden).

        Raises:
            HopLost: a station failed before that. Replace it and wait again.
        """
        while self.stations[-1].delivered < position:
            self._raise_lost()
            self._target = position
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        row = self._last_row
        if row is None:
            raise PipelineStalled("nothing was fed into the pipeline.", fix="Report this as a bug.")
        return slice_rows(row, row.shape[1] - 1, row.shape[1])

    def require_trust(self) -> None:
        """Raise HopLost when a liar had a part in what the caches hold."""
        self._refuse_liars(list(self._served.values()))

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, in every hop."""
        for station in self.stations:
            station.cut(position)

    def park(self) -> None:
        """Keep the caches, give the streams back. Raises LinkLost."""
        for station in self.stations:
            station.park()

    async def resume(self, reserve: int, limit: int) -> None:
        """Take the streams again, with room as in `SessionTerms`. Raises HopLost for the first hop
        that has none or forgot."""
        # Also for whoever replaces a hop.
        self.terms = replace(self.terms, reserve=reserve, limit=limit)
        for station in self.stations:
            station.terms = self.terms
        await self._all(
            [station.resume(self._patience) for station in self.stations],
            [station.hop for station in self.stations],
        )

    async def seal(self, timeout_s: float) -> list[dict[str, Any]]:
        """End the harvest on every hop; each file with its node. Raises HopLost."""
        hops = [station.hop for station in self.stations]
        sealed = await self._all([station.seal(timeout_s) for station in self.stations], hops)
        return [
            {"node": hop.shard.host, "node_name": hop.shard.node_name, **file}
            for hop, files in zip(hops, sealed, strict=True)
            for file in files
        ]

    def close(self) -> None:
        """Free every hop's session."""
        for station in self.stations:
            station.close()

    # Private

    async def _stations(self, hops: Sequence[RouteHop]) -> list[Station]:
        # Before anything is awaited: whoever picks a route meanwhile has to know of these.
        claims = [self._overseer.claim(hop) for hop in hops]
        places = [(hop.shard.host, hop.shard.endpoint) for hop in hops]
        try:
            lines = await self._all([self._lines.line(*place) for place in places], hops)
        except BaseException:
            for claim in claims:
                claim.release()
            raise
        stations = [
            Station(hop, line, claim, self.terms, self._output, self._lost, self._overseer)
            for hop, line, claim in zip(hops, lines, claims, strict=True)
        ]
        try:
            await self._all([s.open(self._patience) for s in stations], hops)
            self._refuse_liars(hops)
        except BaseException:
            for station in stations:
                station.close()
            raise
        return stations

    async def _all(
        self, calls: Sequence[Coroutine[Any, Any, T]], hops: Sequence[RouteHop]
    ) -> list[T]:
        """All at once; HopLost for the first in order that failed, after all have ended."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        done: list[T] = []
        for index, (hop, result) in enumerate(zip(hops, results, strict=True)):
            if isinstance(result, MeshError):
                self._overseer.failed(hop, result)
                raise HopLost(index, hop, result)
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def _output(self, station: Station, tensor: WireTensor) -> None:
        self._count_widened(tensor)
        index = self.stations.index(station)
        if index + 1 < len(self.stations):
            self.stations[index + 1].accept(tensor)
            return
        self._last_row = tensor
        if self._waiter is not None and station.delivered >= self._target:
            self._wake()

    def _count_widened(self, tensor: WireTensor) -> None:
        if tensor.dtype != self.terms.wire_dtype:
            self.widened += 1

    def _lost(self, station: Station) -> None:
        if station.error is not None:
            self._overseer.failed(station.hop, station.error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _refuse_liars(self, hops: Sequence[RouteHop]) -> None:
        for index, hop in enumerate(hops):
            if not self._overseer.trusts(key_of(hop.shard)):
                what = "a wrong answer to somebody else meanwhile"
                raise HopLost(index, hop, corrupt(hop.shard.node_name, what))

    def _note_served(self, hops: Sequence[RouteHop]) -> None:
        for hop in hops:
            known = self._served.get(key_of(hop.shard))
            if known is None or hop.layers.stop < known.layers.stop:
                self._served[key_of(hop.shard)] = hop

    def _misled_by(self) -> RouteHop | None:
        # Behind the last hop there is no cache, only tokens that were said already.
        end = self.stations[-1].hop.layers.stop
        lies = (self._served[key] for key in self._liars if key in self._served)
        return next((hop for hop in lies if hop.layers.stop < end), None)

    def _raise_lost(self) -> None:
        liar = self._misled_by() if self._liars else None
        if liar is not None:
            raise HopLost(0, liar, self._liars[key_of(liar.shard)])
        for index, station in enumerate(self.stations):
            if station.error is not None:
                raise HopLost(index, station.hop, station.error)
