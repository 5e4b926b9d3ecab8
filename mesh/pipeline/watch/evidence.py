"""What a hop was asked and answered, kept until another host's answers are compared with it.

A check waits for its judge, and meanwhile the session may go back, end, or be taken over by the
next request. So nothing here asks a hop what is so now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mesh.pipeline.history import History, chunk_rows
from mesh.pipeline.hop import HopSession
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.sanity import Floats, rows_as_floats
from mesh.types import RouteHop
from mesh.wire.messages import WireTensor


@dataclass(slots=True)
class Record:
    """What one hop answered: `outputs` holds the rows from position `start` on.

    `inputs` are the hop's own as long as its session goes on, so they follow its cuts.
    """

    hop: RouteHop
    terms: SessionTerms
    inputs: History
    start: int
    outputs: History = field(default_factory=History)
    shadow: HopSession | None = None
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
        if self.shadow is not None:
            self.shadow.cut(position)

    def end_session(self) -> None:
        """The session ended or rests: who takes it over may cut it without this being told."""
        self.ended = True
        if self.running:
            self.inputs = self.inputs.copy()
        else:
            self.close()

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
    """Positions, what the hop said of them, what the shadow says, and how far they are apart.

    `inputs`: what both were asked, from position 0 on.
    """

    inputs: History
    start: int
    stop: int
    said: Floats
    other: Floats
    excess: float


def pieces(inputs: History, start: int, stop: int) -> Iterator[tuple[int, WireTensor]]:
    """The inputs at positions start..stop-1, each with its position, in pieces to ask for."""
    return inputs.chunks(chunk_rows(inputs.width), start, stop)


def _floats(tensors: Sequence[WireTensor]) -> Floats:
    return np.concatenate([rows_as_floats(tensor) for tensor in tensors])
