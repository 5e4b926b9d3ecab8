"""Which device takes which layers: the cheapest contiguous cover, by dynamic programming.

For a given order of the devices the cover is exact: of the first k layers over the first i devices
it keeps the cheapest, as Parallax and prima.cpp do, and a window of the starts that still fit makes
each step constant. Where nothing depends on which layers a device gets, the order does not matter
either; else all orders of a few devices are tried, and of many the likely ones, then their
neighbours within a fixed number of steps. Knows no machine and no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise, permutations

from mesh.models.cuts import ANYWHERE, Cuts
from mesh.types import LayerRange

_ALL_ORDERS = 5
"""Devices of which all orders are tried: 120."""

_MAX_CELLS = 60_000
"""Steps of the search for a better order; each takes about a microsecond."""

_KEPT = 128
"""Seatings that are kept: a plan asks for some again, as for fewer replicas of the same."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A device as a place for layers.

    `hop_ms` is what it costs to use it at all, `layer_ms` and `layer_bytes` what each layer of the
    model would cost and take there, `room_bytes` what there is. `fetch_bytes` are what each would
    take on the disk, `disk_bytes` what there is of that. With a `pin` it takes exactly those
    layers. `key` tells it from others and decides between equals.
    """

    key: tuple[str, str]
    hop_ms: float
    layer_ms: tuple[float, ...]
    layer_bytes: tuple[int, ...]
    room_bytes: int
    fetch_bytes: tuple[int, ...]
    disk_bytes: int
    pin: LayerRange | None = None
    _ms: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _fetched: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fetched", tuple(accumulate(self.fetch_bytes, initial=0)))
        object.__setattr__(self, "_ms", tuple(accumulate(self.layer_ms, initial=0.0)))
        object.__setattr__(self, "_bytes", tuple(accumulate(self.layer_bytes, initial=0)))

    def cost(self, layers: LayerRange) -> float:
        """Milliseconds of a decode step through these layers, the way there included."""
        return self.hop_ms + self._ms[layers.stop] - self._ms[layers.start]

    def has_room_for(self, layers: LayerRange) -> bool:
        """Whether these layers fit, in memory and on the disk."""
        taken = self._bytes[layers.stop] - self._bytes[layers.start]
        fetched = self._fetched[layers.stop] - self._fetched[layers.start]
        return taken <= self.room_bytes and fetched <= self.disk_bytes

    def reach(self, start: int) -> int:
        """Where the layers end that it can take where all before `start` may be others'."""
        if self.pin is not None:
            return self.pin.stop if self.pin.start <= start else start
        in_memory = bisect_right(self._bytes, self._bytes[start] + self.room_bytes)
        on_disk = bisect_right(self._fetched, self._fetched[start] + self.disk_bytes)
        return min(in_memory, on_disk) - 1

    def joined(self, ends: Sequence[int]) -> Seat:
        """The same with the layers between two of these ends as if they were one."""
        pin = self.pin
        if pin is not None:
            pin = LayerRange(ends.index(pin.start), ends.index(pin.stop))
        parts = [slice(*each) for each in pairwise(ends)]
        return replace(
            self,
            layer_ms=tuple(sum(self.layer_ms[part]) for part in parts),
            layer_bytes=tuple(sum(self.layer_bytes[part]) for part in parts),
            fetch_bytes=tuple(sum(self.fetch_bytes[part]) for part in parts),
            pin=pin,
        )

    @property
    def is_even(self) -> bool:
        """Whether all layers are alike to it."""
        if self.pin is not None or len({*self.layer_ms}) > 1 or len({*self.layer_bytes}) > 1:
            return False
        return self._fetched[-1] <= self.disk_bytes or len({*self.fetch_bytes}) == 1

    def extend(self, best: Sequence[float], extra_ms: float) -> tuple[list[float], list[int]]:
        """The costs of covering the first k layers with this seat behind the others, which need
        `best`, and where its own layers then begin; -1 where it is better left out."""
        total, charge = len(best) - 1, self.hop_ms + extra_ms
        if self.pin is not None:
            costs, starts = [float("inf")] * (total + 1), [-1] * (total + 1)
            start, stop = self.pin.start, self.pin.stop
            if stop <= total and self.has_room_for(self.pin):
                costs[stop], starts[stop] = best[start] + self.cost(self.pin) + extra_ms, start
            return costs, starts
        costs, starts = list(best), [-1] * (total + 1)
        ms, taken, room = self._ms, self._bytes, self.room_bytes
        fetched, disk = self._fetched, self.disk_bytes
        window: deque[int] = deque()  # starts that may still be the best, the best one first
        for stop in range(1, total + 1):
            start = stop - 1
            here = best[start] - ms[start]
            while window and best[window[-1]] - ms[window[-1]] > here:
                window.pop()
            window.append(start)
            while window and taken[stop] - taken[window[0]] > room:
                window.popleft()
            while window and fetched[stop] - fetched[window[0]] > disk:
                window.popleft()
            if window:
                cost = best[window[0]] - ms[window[0]] + ms[stop] + charge
                if cost < costs[stop] - 1e-9:
                    costs[stop], starts[stop] = cost, window[0]
        return costs, starts


@dataclass(frozen=True, slots=True)
class Seating:
    """Which layers each seat takes, in their order; the seats beside them take none."""

    parts: tuple[tuple[Seat, LayerRange], ...]
    cost_ms: float


def seat(
    seats: Iterable[Seat], total_layers: int, most: int, cuts: Cuts = ANYWHERE
) -> Seating | None:
    """The cheapest seating of all layers on `most` seats or fewer; None where there is none.

    Depends on the seats and their keys alone, not on their order. Every pinned seat is used. No
    pin may be against the `cuts`.
    """
    if cuts.followers:
        groups = cuts.groups(LayerRange(0, total_layers))
        ends = [0, *(group.stop for group in groups)]
        found = seat((each.joined(ends) for each in seats), len(groups), most)
        if found is None:
            return None
        parts = ((s, LayerRange(ends[o.start], ends[o.stop])) for s, o in found.parts)
        return Seating(tuple(parts), found.cost_ms)
    of_use = [each for each in seats if each.pin is not None or layers_within(each)]
    of_use.sort(key=lambda each: (_begins(each), each.key))
    return _seated(tuple(of_use), total_layers, most)


@lru_cache(maxsize=_KEPT)
def _seated(ordered: Sequence[Seat], total_layers: int, most: int) -> Seating | None:
    if not _may_do(ordered, total_layers, most):
        return None
    found = _search(ordered, total_layers, 0.0)
    if found is None or len(found.parts) <= most:
        return found
    # Fewer seats come with a charge for each; the least charge that is enough wastes least.
    low, high = 0.0, max(found.cost_ms, 1.0)
    fewest = _search(ordered, total_layers, high)
    if fewest is None or len(fewest.parts) > most:
        return None
    for _ in range(12):
        middle = (low + high) / 2
        tried = _search(ordered, total_layers, middle)
        if tried is not None and len(tried.parts) <= most:
            fewest, high = tried, middle
        else:
            low = middle
    return fewest


def layers_within(each: Seat) -> int:
    """How many layers in a row fit a seat, at its best place."""
    best, start, taken, fetched = 0, 0, 0, 0
    for stop, size in enumerate(each.layer_bytes, 1):
        taken += size
        fetched += each.fetch_bytes[stop - 1]
        while taken > each.room_bytes or fetched > each.disk_bytes:
            taken -= each.layer_bytes[start]
            fetched -= each.fetch_bytes[start]
            start += 1
        best = max(best, stop - start)
    return best


def _may_do(seats: Sequence[Seat], total: int, most: int) -> bool:
    """False where no order can do: the roomiest `most` seats have too little room at their best
    places, or a layer is left out even where each seat is taken as often as it helps."""
    rooms = sorted((layers_within(each) for each in seats if each.pin is None), reverse=True)
    pinned = [len(each.pin) for each in seats if each.pin is not None]
    if len(pinned) > most or sum(pinned) + sum(rooms[: most - len(pinned)]) < total:
        return False
    covered = 0
    for _ in seats[:most]:
        covered = max(each.reach(covered) for each in seats)
    return covered >= total


def _search(ordered: Sequence[Seat], total: int, extra_ms: float) -> Seating | None:
    """The best seating over the orders that are tried."""
    if all(each.is_even for each in ordered):
        return _along(ordered, total, extra_ms)
    if len(ordered) <= _ALL_ORDERS:
        return _best(_along(order, total, extra_ms) for order in permutations(ordered))
    cells, best_order, best = _MAX_CELLS, list(ordered), None
    for order in _likely(ordered, total):
        found = _along(order, total, extra_ms)
        cells -= len(order) * total
        if found is not None and (best is None or found.cost_ms < best.cost_ms - 1e-9):
            best_order, best = list(order), found
    for order in _neighbours(best_order, best):
        if (cells := cells - len(order) * total) < 0:
            break
        found = _along(order, total, extra_ms)
        best = _best(each for each in (best, found))
    return best


def _best(found: Iterable[Seating | None]) -> Seating | None:
    """The cheapest; of equals the first."""
    best: Seating | None = None
    for each in found:
        if each is not None and (best is None or each.cost_ms < best.cost_ms - 1e-9):
            best = each
    return best


def _along(order: Sequence[Seat], total: int, extra_ms: float) -> Seating | None:
    """The cheapest seating in this order."""
    costs = [0.0] + [float("inf")] * total
    starts: list[list[int]] = []
    for each in order:
        costs, begun = each.extend(costs, extra_ms)
        starts.append(begun)
    if costs[total] == float("inf"):
        return None
    parts: list[tuple[Seat, LayerRange]] = []
    stop = total
    for each, begun in zip(reversed(order), reversed(starts), strict=True):
        if begun[stop] >= 0:
            parts.append((each, LayerRange(begun[stop], stop)))
            stop = begun[stop]
    return Seating(tuple(reversed(parts)), costs[total])


def _begins(each: Seat) -> float:
    """Where the layers are that a seat has to take, or takes at the least cost; free ones last."""
    if each.pin is not None:
        return each.pin.start
    least = min(each.layer_ms)
    return float("inf") if least == max(each.layer_ms) else each.layer_ms.index(least)


def _likely(ordered: Sequence[Seat], total: int) -> Iterator[Sequence[Seat]]:
    """Orders worth trying: pinned seats and those with a preference where they want to be, the
    others dealt into the gaps between pins, quick ones first, roomy ones first, or as they are."""
    yield ordered
    pinned = [each for each in ordered if each.pin is not None]
    rest = [each for each in ordered if each.pin is None]
    keen = [each for each in rest if _begins(each) < total]
    free = [each for each in rest if _begins(each) >= total]
    yield [*free, *sorted([*pinned, *keen], key=_begins)]
    by_speed = sorted(rest, key=lambda each: (sum(each.layer_ms), each.key))
    by_room = sorted(rest, key=lambda each: (-each.room_bytes, each.key))
    for line in (by_speed, by_room, by_speed[::-1]):
        yield _dealt(pinned, line, total)


def _dealt(pinned: Sequence[Seat], free: Sequence[Seat], total: int) -> list[Seat]:
    order: list[Seat] = []
    waiting, covered = deque(free), 0
    for each in pinned:
        assert each.pin is not None  # noqa: S101 - those are the pinned ones
        while waiting and covered < each.pin.start:
            covered += layers_within(waiting[0])
            order.append(waiting.popleft())
        order.append(each)
        covered = each.pin.stop
    return [*order, *waiting]


def _neighbours(order: list[Seat], best: Seating | None) -> Iterator[list[Seat]]:
    """The orders in which one seat stands elsewhere, those of used seats first."""
    used = {each.key for each, _ in best.parts} if best is not None else set()
    for moved in sorted(range(len(order)), key=lambda i: (order[i].key not in used, i)):
        for place in range(len(order)):
            if place != moved:
                others = order[:moved] + order[moved + 1 :]
                yield [*others[:place], order[moved], *others[place:]]
