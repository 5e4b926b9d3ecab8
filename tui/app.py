"""The app: screens by keys, one worker that follows the feed, its picture given to the screens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from mesh.errors import NotRunning
from tui.commands import Verbs
from tui.feed import follow
from tui.journal import Journal
from tui.messages import Arrived, Connected, FeedSaid
from tui.palette import GREY_ON_DARK, GREY_ON_LIGHT, ON_LIGHT
from tui.picture import Lost, Picture
from tui.screens.overview import OverviewScreen
from tui.screens.screen import TopScreen

if TYPE_CHECKING:
    from mesh.client import Client

RECENT = 50
"""Events that a picture carries."""

_WIDTHS = [(0, "-narrow"), (80, "-wide")]
_HEIGHTS = [(0, "-low"), (18, "-high")]
"""What the style sheet asks for: below these columns and lines, panels beside others give way."""


def _nodes() -> Screen[Any]:
    from tui.screens.nodes import NodesScreen

    return NodesScreen()


def _models() -> Screen[Any]:
    from tui.screens.models import ModelsScreen

    return ModelsScreen()


def _chat() -> Screen[Any]:
    from tui.screens.chat import ChatScreen

    return ChatScreen()


def _doctor() -> Screen[Any]:
    from tui.screens.doctor import DoctorScreen

    return DoctorScreen()


class TopApp(App[None]):
    """`hearthnet top`. `connect` finds the daemon; `verbs` are the command line's with help;
    ages are as of `now_s`."""

    TITLE = "hearthnet"
    CSS_PATH = "tui.tcss"
    COMMANDS = App.COMMANDS | {Verbs}
    ENABLE_COMMAND_PALETTE = True
    DEFAULT_MODE = "overview"
    HORIZONTAL_BREAKPOINTS = _WIDTHS
    VERTICAL_BREAKPOINTS = _HEIGHTS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1,f1", "switch_mode('overview')", "Home"),
        Binding("2,f2", "switch_mode('nodes')", "Nodes"),
        Binding("3,f3", "switch_mode('models')", "Models"),
        Binding("4,f4", "switch_mode('chat')", "Chat"),
        Binding("5,f5", "switch_mode('jobs')", "Jobs"),
        Binding("6,f6", "switch_mode('log')", "Log"),
        Binding("7,f7", "switch_mode('doctor')", "Doctor"),
        Binding("d", "light_or_dark", "Light/dark", show=False),
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("q,ctrl+q", "quit", "Quit", key_display="q", show=False),
    ]

    def __init__(
        self,
        connect: Callable[[], Client],
        verbs: Callable[[], Mapping[str, str]] = dict,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.MODES = {  # type: ignore[misc]  # of this instance: the log shares its journal
            "overview": OverviewScreen,
            "nodes": _nodes,
            "models": _models,
            "chat": _chat,
            "jobs": self._jobs_screen,
            "log": self._log_screen,
            "doctor": _doctor,
        }
        super().__init__()
        if self.no_color:
            self.ansi_theme_dark, self.ansi_theme_light = GREY_ON_DARK, GREY_ON_LIGHT
        else:
            self.ansi_theme_light = ON_LIGHT
        self._verbs = verbs
        self._now_s = now_s
        self.picture = Picture()
        self.journal = Journal()
        self._connect = connect
        self._client: Client | None = None

    def on_mount(self) -> None:
        """Begin to follow."""
        self._follow()

    @cached_property
    def verbs(self) -> dict[str, str]:
        """The command line's verbs, looked up when the palette is first opened."""
        return dict(self._verbs())

    def daemon(self) -> Client:
        """See `HasDaemon`."""
        if self._client is None:
            raise NotRunning("No daemon answers.", fix="Wait, or start one: hearthnet up.")
        return self._client

    # What the feed says

    @work(exclusive=True, group="feed", exit_on_error=False)
    async def _follow(self) -> None:
        await follow(self._connect, lambda said: self.post_message(FeedSaid(said)))

    def on_feed_said(self, message: FeedSaid) -> None:
        """Take it in and show it."""
        match message.said:
            case Connected(client):
                self._client = client
            case Arrived(events, missed, status):
                self.journal.add(events, missed)
                recent = (*self.picture.events, *events)[-RECENT:]
                self.picture = Picture({**self.picture.status, **status}, recent)
            case Lost() as lost:
                self._client = None
                self.picture = Picture(self.picture.status, self.picture.events, lost)
        self._show()

    def on_screen_resume(self) -> None:
        """A screen that comes back gets what it missed."""
        self._show()

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, TopScreen):
                screen.picture = self.picture
        heard = getattr(self.screen, "heard", None)
        if heard is not None:
            heard()

    def _jobs_screen(self) -> Screen[Any]:
        from tui.screens.jobs import JobsScreen

        return JobsScreen(self._now_s)

    def _log_screen(self) -> Screen[Any]:
        from tui.screens.log import LogScreen

        return LogScreen(self.journal)

    # What keys and the palette do

    async def action_switch_mode(self, mode: str) -> None:
        """Go to a screen, which gets the picture at once."""
        await super().action_switch_mode(mode)
        self._show()

    async def show(self, screen: str, action: str) -> None:
        """See `HasVerbs`."""
        await self.action_switch_mode(screen)
        if action:
            await self.screen.run_action(action)

    def hint(self, verb: str) -> None:
        """See `HasVerbs`."""
        self.copy_to_clipboard(f"hearthnet {verb}")
        self.notify(f"Copied. In a terminal: hearthnet {verb}", title=self.verbs[verb][:60])

    def action_light_or_dark(self) -> None:
        """The other theme."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    def action_keys(self) -> None:
        """Show or hide all keys."""
        if self.screen.query("HelpPanel"):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()
