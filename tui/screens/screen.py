"""What all screens have: the banner, the headline, the keys, and the picture handed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from textual.app import ComposeResult
from textual.css.query import NoMatches
from textual.reactive import var
from textual.screen import Screen

from mesh.errors import MeshError
from tui.picture import Picture
from tui.widgets.banner import Banner
from tui.widgets.drawn import Drawn
from tui.widgets.headline import Headline
from tui.widgets.keys import Keys
from tui.words import clean

if TYPE_CHECKING:
    from mesh.client import Client

_T = TypeVar("_T")


class HasDaemon(Protocol):
    """The app, as far as screens know it."""

    def daemon(self) -> Client:
        """A client of the daemon that is followed. Raises NotRunning."""


class TopScreen(Screen[None]):
    """Hands each picture on to its widgets; dimmed while the daemon is lost."""

    picture: var[Picture] = var(Picture)

    def compose(self) -> ComposeResult:
        """The frame around `body`."""
        yield Banner()
        yield Headline()
        yield from self.body()
        yield Keys()

    def body(self) -> ComposeResult:
        """What is between the headline and the keys."""
        yield from ()

    def took(self, picture: Picture) -> None:
        """For what is no `Drawn`: called with each new picture."""

    def on_mount(self) -> None:
        """Draw what came before the widgets did."""
        self._hand_on(self.picture)

    def watch_picture(self, picture: Picture) -> None:
        """Textual calls it when there is a new picture."""
        if self.is_mounted:
            with suppress(NoMatches):  # it is being taken down, its widgets first
                self._hand_on(picture)

    def _hand_on(self, picture: Picture) -> None:
        self.set_class(picture.lost is not None, "stale")
        self.query_one(Banner).lost = picture.lost
        for drawn in self.query(Drawn):
            drawn.picture = picture
        self.took(picture)

    def daemon(self) -> Client:
        """A client of the daemon that is followed. Raises NotRunning."""
        return cast("HasDaemon", self.app).daemon()

    async def ask(self, question: Callable[[Client], Awaitable[_T]]) -> _T | None:
        """The daemon's answer; None, and a note on the screen, when it refuses or is lost."""
        try:
            return await question(self.daemon())
        except MeshError as error:
            words = clean(f"{error.message} {error.fix or ''}")
            self.notify(words, severity="error", markup=False)
            return None
