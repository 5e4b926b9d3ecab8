"""The line of keys at the bottom of a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.widgets import Footer

if TYPE_CHECKING:
    from textual.widgets._footer import FooterKey


class Keys(Footer):
    """Where a line has no room for all names, the keys that change screens go without theirs."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    def compose(self) -> ComposeResult:
        """A key for each binding that is shown."""
        keys = cast("list[FooterKey]", list(super().compose()))
        is_cut = sum(len(f"{key.key_display} {key.description} ") for key in keys) > self.size.width
        for key in keys:
            if is_cut and key.action.startswith("switch_mode"):
                key.tooltip, key.description = key.description, ""
            yield key

    def on_resize(self) -> None:
        """Textual calls it when the line has another length."""
        self.bindings_changed(self.screen)
