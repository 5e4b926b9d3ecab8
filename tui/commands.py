"""The command palette: every verb of the command line, and what this app does itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

HERE: dict[str, tuple[str, str]] = {
    "status": ("overview", ""),
    "peers": ("nodes", ""),
    "members": ("nodes", ""),
    "invite": ("nodes", "invite"),
    "models": ("models", ""),
    "deploy": ("models", "deploy"),
    "scale": ("models", "scale"),
    "evict": ("models", "evict"),
    "list": ("models", ""),
    "chat": ("chat", ""),
    "run": ("chat", ""),
    "queue": ("jobs", ""),
    "kill": ("jobs", "kill"),
    "log": ("log", ""),
    "doctor": ("doctor", ""),
}
"""Verbs that a screen here does: the screen, and its action."""


class HasVerbs(Protocol):
    """The app, as far as the palette knows it."""

    @property
    def verbs(self) -> dict[str, str]:
        """Every verb of the command line with its help."""

    async def show(self, screen: str, action: str) -> None:
        """Go to a screen and run one of its actions."""

    def hint(self, verb: str) -> None:
        """Say how a verb is run in a terminal."""


class Verbs(Provider):
    """Offers each verb; those that only a terminal does are shown as what to type there."""

    async def discover(self) -> Hits:
        """All of them."""
        for name, words, act in self._all():
            yield DiscoveryHit(name, act, help=words)

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for name, words, act in self._all():
            score = matcher.match(f"{name} {words}")
            if score > 0:
                yield Hit(score, matcher.highlight(name), act, help=words)

    def _all(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        app = cast("HasVerbs", self.app)
        for verb, words in app.verbs.items():
            if verb in HERE:
                yield verb, words, partial(app.show, *HERE[verb])
            else:
                yield f"{verb} (in a terminal)", words, partial(app.hint, verb)
