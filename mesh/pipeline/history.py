"""What went into a hop, kept at the asker so that a lost hop can be rebuilt by replaying it.

Inputs are kept in their wire form: nothing is converted, neither when they are stored nor when they
are sent again. One row is one position; rows are contiguous from 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh.wire.messages import WireTensor
from mesh.wire.tensors import ITEMSIZE

CHUNK_ROWS = 128
"""Rows of one prefill chunk: enough for an efficient matrix product, few enough to overlap hops."""

CHUNK_BYTES = 1 << 20
"""A chunk fits one frame, so that it need not be cut and put together again."""


def chunk_rows(row_size: int) -> int:
    """How many rows of a prefill, or of a replay, travel together."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * row_size)))


def rows_of(tensor: WireTensor) -> int:
    """How many positions an activation tensor (1, rows, hidden) holds."""
    return tensor.shape[1]


def slice_rows(tensor: WireTensor, start: int, stop: int) -> WireTensor:
    """Rows [start, stop) of an activation tensor (1, rows, hidden), sharing its bytes."""
    if start == 0 and stop == tensor.shape[1]:
        return tensor
    hidden = tensor.shape[2]
    row_bytes = hidden * ITEMSIZE[tensor.dtype]
    data = memoryview(tensor.data)[start * row_bytes : stop * row_bytes]
    return WireTensor(tensor.dtype, (1, stop - start, hidden), data)


class History:
    """The inputs of one hop for positions 0..`length`-1, in order."""

    def __init__(self) -> None:
        self._entries: list[WireTensor] = []
        self.length = 0
        self.size_bytes = 0

    def append(self, tensor: WireTensor) -> None:
        """Add the rows that follow `length`."""
        self._entries.append(tensor)
        self.length += rows_of(tensor)
        self.size_bytes += len(tensor.data)

    def cut(self, position: int) -> None:
        """Forget every row from `position` on."""
        while self._entries and self.length > position:
            last = self._entries.pop()
            self.size_bytes -= len(last.data)
            self.length -= rows_of(last)
            if self.length < position:
                self.append(slice_rows(last, 0, position - self.length))

    def copy(self) -> History:
        """These rows, whatever is added or cut here later; their bytes are shared."""
        same = History()
        same._entries = list(self._entries)
        same.length, same.size_bytes = self.length, self.size_bytes
        return same

    @property
    def width(self) -> int:
        """Values per row; 1 while there is none."""
        return self._entries[0].shape[2] if self._entries else 1

    def window(self, start: int, stop: int) -> list[WireTensor]:
        """The rows start..stop-1, as far as there are such, in pieces as they came."""
        pieces: list[WireTensor] = []
        position = self.length
        for entry in reversed(self._entries):  # what is asked for is mostly at the end
            end, position = position, position - rows_of(entry)
            if position < stop and end > start:
                low, high = max(start, position), min(stop, end)
                pieces.append(slice_rows(entry, low - position, high - position))
            if position <= start:
                break
        return pieces[::-1]

    def chunks(
        self, max_rows: int, first: int = 0, stop: int | None = None, *, joined: int | None = None
    ) -> Iterator[tuple[int, WireTensor]]:
        """(position, tensor) pieces of at most `max_rows` rows that rebuild rows first..stop-1.

        Decode steps left one row each; they are joined, so that a replay is one prefill and not as
        many steps again: to pieces of at most `joined` rows (None: `max_rows`), and nothing is
        joined to one that came with more.
        """
        most = max_rows if joined is None else min(joined, max_rows)
        position = first
        waiting: list[WireTensor] = []
        count = 0
        for entry in self.window(first, self.length if stop is None else stop):
            for start in range(0, rows_of(entry), max_rows):
                piece = slice_rows(entry, start, min(start + max_rows, rows_of(entry)))
                fits = count + rows_of(piece) <= most
                if waiting and not (fits and waiting[0].dtype == piece.dtype):
                    yield position, _join(waiting, count)
                    position, waiting, count = position + count, [], 0
                waiting.append(piece)
                count += rows_of(piece)
        if waiting:
            yield position, _join(waiting, count)


def _join(pieces: list[WireTensor], rows: int) -> WireTensor:
    if len(pieces) == 1:
        return pieces[0]
    data = b"".join(piece.data for piece in pieces)
    return WireTensor(pieces[0].dtype, (1, rows, pieces[0].shape[2]), data)
