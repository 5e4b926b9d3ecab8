"""What a hop answered, kept until it has been compared with what another host says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mesh.health.sanity import Floats, rows_as_floats
from mesh.pipeline.history import History
from mesh.pipeline.recovery import chunk_rows
from mesh.pipeline.shadow import Shadow
from mesh.pipeline.station import Station
from mesh.wire.messages import WireTensor


@dataclass(slots=True)
class Record:
    """What one station answered: `outputs` holds the rows from position `start` on."""

    station: Station
    start: int
    outputs: History = field(default_factory=History)
    shadow: Shadow | None = None
    greeted: bool = False
    running: bool = False
    rewound: bool = False
    ended: bool = False

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.outputs.length

    def cut(self, position: int) -> None:
        """Forget the rows from `position` on."""
        self.outputs.cut(max(0, position - self.start))
        self.start = min(self.start, position)
        self.rewound = True
        if self.shadow is not None and not self.running:
            self.shadow.length = min(self.shadow.length, position)

    def rows(self, start: int, stop: int) -> Floats:
        """(rows, hidden) answered at positions start..stop-1."""
        return _floats(self.outputs.window(start - self.start, stop - self.start))

    def close(self) -> None:
        """Give the other host's session back."""
        if self.shadow is not None:
            self.shadow.close()
            self.shadow = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Positions, what the hop said of them, what the shadow says, and how far they are apart."""

    start: int
    stop: int
    said: Floats
    other: Floats
    excess: float


def pieces(station: Station, start: int, stop: int) -> list[tuple[int, WireTensor]]:
    """The station's inputs at positions start..stop-1 as they are now."""
    rows = chunk_rows(station.history.width)
    return list(station.history.chunks(rows, start, stop))


def _floats(tensors: Sequence[WireTensor]) -> Floats:
    return np.concatenate([rows_as_floats(tensor) for tensor in tensors])
