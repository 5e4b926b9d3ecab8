"""What the feed tells the app: plain frozen data, and the one message type that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.message import Message

from tui.picture import Lost

if TYPE_CHECKING:
    from mesh.client import Client


@dataclass(frozen=True, slots=True)
class Connected:
    """A daemon was found; it is talked to through `client` until it is `Lost`."""

    client: Client


@dataclass(frozen=True, slots=True)
class Arrived:
    """One update: events, how many before them are not kept any more, and what of the status
    changed."""

    events: Sequence[Mapping[str, Any]]
    missed: int
    status: Mapping[str, Any]


class FeedSaid(Message):
    """Carries what the feed tells."""

    def __init__(self, said: Connected | Arrived | Lost) -> None:
        super().__init__()
        self.said = said
