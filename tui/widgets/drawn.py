"""What the widgets that only draw have in common: a picture in, text out, drawn when it differs."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.reactive import var
from textual.widgets import Static

from tui.picture import Picture


class Drawn(Static):
    """Draws `text(picture)`; again when that is another text, or the place another size."""

    IS_AWAY_WHEN_EMPTY: ClassVar[bool] = False
    """Whether no text takes no place."""

    picture: var[Picture] = var(Picture)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._drawn = Text()

    def text(self, picture: Picture, width: int) -> Text:
        """The text for so many columns."""
        raise NotImplementedError

    def watch_picture(self) -> None:
        """Textual calls it when there is a new picture."""
        self._draw()

    def on_resize(self) -> None:
        """Textual calls it when the place has another size."""
        self._draw()

    def _draw(self) -> None:
        if not self.is_attached:
            return
        text = self.text(self.picture, max(20, self.content_size.width or 78))
        if self.IS_AWAY_WHEN_EMPTY:
            self.display = bool(text)
        if text.plain != self._drawn.plain or text.spans != self._drawn.spans:
            self._drawn = text
            self.update(text)
