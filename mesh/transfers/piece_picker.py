"""Which piece of which tensor is asked of whom. Pure: no clock, no sockets, no disk.

A source is asked for a piece when it has time for one, so a slower one gets less, and what a lost
one had in hand goes to the others. A tensor comes from one source as long as it is small, and so
does every tensor that was wrong once: then whoever gave it is known. The rarest tensors come first,
and a source that should be spared (the hub) is asked only for what nobody else has. At the end,
pieces in the hands of a much slower source are asked of another as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

SPLIT_BYTES = 32 << 20
"""Tensors larger than this may come from several sources at once."""
MAX_IN_HAND = 4
"""Pieces that one source is asked for at a time."""
_AHEAD_S = 2.0
"""A source has no more in hand than it gives in so many seconds, one piece apart."""
_MUCH_SLOWER = 3.0
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes [start, stop) of a tensor."""

    tensor: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stop - self.start


@dataclass(slots=True)
class _Source:
    holds: frozenset[str]
    is_spared: bool
    bytes_per_s: float = 0.0
    at: str = ""
    in_hand: list[Piece] = field(default_factory=list)

    @property
    def has_time(self) -> bool:
        count = len(self.in_hand)
        ahead = sum(piece.size for piece in self.in_hand)
        return count == 0 or (count < MAX_IN_HAND and ahead < self.bytes_per_s * _AHEAD_S)


@dataclass(slots=True)
class _Tensor:
    """`givers` says who gave which piece, by its start; `suspects` the same of an earlier try."""

    name: str
    pieces: tuple[Piece, ...]
    open: list[Piece]
    owner: str | None = None
    is_whole: bool = False
    has_older: bool = False
    givers: dict[int, str] = field(default_factory=dict)
    suspects: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.pieces[-1].stop

    def restart(self) -> None:
        self.open = list(self.pieces)
        self.givers, self.owner, self.has_older = {}, None, False


class PiecePicker:
    """What is left to fetch, and who is at what."""

    def __init__(self, wanted: Mapping[str, tuple[list[Piece], list[Piece]]]) -> None:
        """By tensor, in the order in which they are wanted: all its pieces, and those left."""
        self._waiting = {
            name: _Tensor(name, tuple(pieces), list(left), has_older=len(left) < len(pieces))
            for name, (pieces, left) in wanted.items()
        }
        self._sources: dict[str, _Source] = {}
        self._of_peers: frozenset[str] = frozenset()
        self.liars: set[str] = set()
        """Sources that gave what it was not; they are not asked again."""

    @property
    def left_bytes(self) -> int:
        """Bytes that have not arrived yet, or were wrong."""
        in_hand = {piece for source in self._sources.values() for piece in source.in_hand}
        left = sum(piece.size for tensor in self._waiting.values() for piece in tensor.open)
        return left + sum(piece.size for piece in in_hand if self._is_wanted(piece))

    @property
    def is_done(self) -> bool:
        """Whether every tensor was found right."""
        return not self._waiting

    def lacking(self) -> list[str]:
        """The tensors that are left and that nobody has who is not to be spared."""
        return [name for name in self._waiting if name not in self._of_peers]

    def unheld(self) -> list[str]:
        """The tensors that are left and that no source has."""
        return [
            name
            for name in self._waiting
            if not any(name in source.holds for source in self._sources.values())
        ]

    def join(self, source: str, holds: Iterable[str], *, is_spared: bool = False) -> None:
        """A source has these tensors now; one that lied is not let in again."""
        if source in self.liars:
            return
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(frozenset(holds), is_spared)
        else:
            known.holds = frozenset(holds)
        self._sort()

    def leave(self, source: str) -> None:
        """A source is gone: what it had in hand is open again."""
        known = self._sources.pop(source, None)
        for piece in known.in_hand if known is not None else ():
            self._reopen(piece)
        for tensor in self._waiting.values():
            if tensor.owner == source:
                tensor.owner = None
        self._sort()

    def next(self, source: str) -> Piece | None:
        """What to ask of it now; None when it has enough to do, or there is nothing for it."""
        own = self._sources.get(source)
        if own is None or not own.has_time:
            return None
        tensor = self._choose(source, own)
        if tensor is None:
            piece = self._take_over(source, own)
        else:
            piece = tensor.open.pop(0)
            tensor.owner = tensor.owner or source
            own.at = tensor.name
        if piece is not None:
            own.in_hand.append(piece)
        return piece

    def arrived(self, source: str, piece: Piece, seconds: float) -> bool:
        """It came, after so long; False when it is here already, from elsewhere."""
        own = self._sources.get(source)
        if own is not None and piece in own.in_hand:
            # While it had several in hand each took the time of all: what counts is the sum.
            rate = piece.size * len(own.in_hand) / max(seconds, 1e-6)
            own.in_hand.remove(piece)
            before = own.bytes_per_s or rate
            own.bytes_per_s = before + _WEIGHT * (rate - before)
        tensor = self._waiting.get(piece.tensor)
        if tensor is None or piece.start in tensor.givers:
            return False
        if tensor.is_whole and tensor.owner not in (None, source):
            return False
        if piece in tensor.open:  # it left after it was asked, and had it given all the same
            tensor.open.remove(piece)
        tensor.givers[piece.start] = source
        return True

    def right(self, name: str, differing: Iterable[int] = ()) -> set[str]:
        """The tensor is complete; the starts of pieces that were others in an earlier, wrong try.

        Who gave those lied, and is named once.
        """
        tensor = self._waiting.pop(name, None)
        if tensor is None:
            return set()
        lied = {tensor.suspects[start] for start in differing if start in tensor.suspects}
        return self._expel(lied)

    def wrong(self, name: str) -> set[str]:
        """All pieces came, and are not the tensor. Who lied, when only one can have.

        Otherwise it is asked anew, of one source alone.
        """
        tensor = self._waiting[name]
        givers = set(tensor.givers.values())
        if len(givers) == 1 and not tensor.has_older:
            lied = self._expel(givers)
        else:
            lied = set()
            tensor.suspects = dict(tensor.givers)
        tensor.is_whole = True
        tensor.restart()
        return lied

    # Private

    def _sort(self) -> None:
        """Put first what fewest have, so that nobody is waited for alone at the end."""
        holders = Counter(chain.from_iterable(source.holds for source in self._sources.values()))
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: holders[item[0]]))
        of_peers = [source.holds for source in self._sources.values() if not source.is_spared]
        self._of_peers = frozenset().union(*of_peers)

    def _choose(self, source: str, own: _Source) -> _Tensor | None:
        at = self._waiting.get(own.at)
        if at is not None and at.open and at.owner == source:
            return at
        shared: _Tensor | None = None
        for name, tensor in self._waiting.items():
            if not tensor.open or name not in own.holds:
                continue
            if own.is_spared and name in self._of_peers:
                continue
            if tensor.owner in (None, source):
                return tensor
            if shared is None and not tensor.is_whole and tensor.size > SPLIT_BYTES:
                shared = tensor
        return shared

    def _take_over(self, source: str, own: _Source) -> Piece | None:
        """A piece that a much slower one has in hand, and that this one would have given sooner."""
        for name, other in self._sources.items():
            if name == source or own.bytes_per_s <= _MUCH_SLOWER * other.bytes_per_s:
                continue
            for piece in other.in_hand:
                tensor = self._waiting.get(piece.tensor)
                if tensor is None or tensor.is_whole or not self._is_wanted(piece):
                    continue
                if piece.tensor in own.holds and len(self._hands(piece)) == 1:
                    return piece
        return None

    def _hands(self, piece: Piece) -> list[str]:
        return [name for name, source in self._sources.items() if piece in source.in_hand]

    def _reopen(self, piece: Piece) -> None:
        tensor = self._waiting.get(piece.tensor)
        if tensor is not None and self._is_wanted(piece) and not self._hands(piece):
            tensor.open.append(piece)
            tensor.open.sort(key=lambda each: each.start)

    def _is_wanted(self, piece: Piece) -> bool:
        """Whether it is neither here nor to be asked for."""
        tensor = self._waiting.get(piece.tensor)
        return tensor is not None and piece.start not in tensor.givers and piece not in tensor.open

    def _expel(self, lied: set[str]) -> set[str]:
        news = lied - self.liars
        self.liars |= lied
        for source in lied:
            self.leave(source)
        return news
