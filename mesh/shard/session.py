"""The sessions of a link, chat's and jobs', behind one interface.

A session is admitted, opened, fed and closed alike, whoever it is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from mesh.errors import BadRequest, MeshError, SessionGone
from mesh.types import LayerRange, Principal

if TYPE_CHECKING:
    import torch

    from mesh.shard.scheduler import Reply
    from mesh.wire.messages import Blob, Step


class Session(ABC):
    """One session, from its admission until it is `closed`."""

    purpose: ClassVar[str]
    """As the link of an asker calls it in its tokens and in `status`."""

    def __init__(self, number: int, owner: Principal, layers: LayerRange) -> None:
        self.number = number
        self.owner = owner
        self.layers = layers
        self.max_tokens = 0
        """Positions it has room for now; 0 where that is not told."""
        self.closed = False
        self.on_end: Callable[[MeshError], None] = lambda error: None
        """Called when the shard ends the session by itself, with the reason."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it can compute; until then `opened` is to be awaited."""

    @property
    def is_loading(self) -> bool:
        """Whether its asker is to be told that the weights have to be read first."""
        return False

    @abstractmethod
    async def opened(self) -> None:
        """Wait until it can compute. Raises MeshError, and is closed then."""

    @abstractmethod
    def submit(self, message: Step | Blob, reply: Reply) -> None:
        """Take the next message; `reply` gets what is answered, on the event loop, perhaps right
        now. Raises MeshError for what is refused; the session is then as before."""

    def park(self) -> None:
        """Give its stream back. Raises BadRequest where there is none."""
        raise _not_for_jobs("parked")

    def resume(self, max_tokens: int) -> None:
        """Take a stream again, with room for `max_tokens` positions in all. Raises MeshError."""
        raise _not_for_jobs("resumed")

    async def seal(self) -> list[dict[str, Any]]:
        """End what it records: what is said of each file. Raises MeshError."""
        raise _not_for_jobs("sealed")

    async def copy_prefix(self, source: Session, positions: int) -> int:
        """Begin as `source` does: how many of its first `positions` this holds then.

        Raises MeshError; it is as before then, or closed.
        """
        raise _not_for_jobs("begun as another")

    async def row(self, position: int) -> torch.Tensor:
        """All logits (vocab,), fp32, of a row that the last step was answered with candidates of.

        Raises MeshError.
        """
        raise _not_for_jobs("asked for a row")

    @abstractmethod
    def close(self) -> None:
        """Free it, right after what is being computed for it if there is something."""


def gone() -> SessionGone:
    """The error for a session that is not here (any more)."""
    return SessionGone(
        "The shard does not hold this session.", fix="Open a new one and replay the inputs."
    )


def _not_for_jobs(verb: str) -> BadRequest:
    return BadRequest(f"A job's session is not {verb}.", fix="Close it, or keep it open.")
