"""A table that is filled again and again without its cursor jumping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text
from textual.widgets import DataTable

Row = Sequence[str | Text]
LEAST = 12
"""Cells that a shortened column keeps."""


class Table(DataTable[Text]):
    """Rows have keys; cells that are the same are left alone. Texts are shown as they are: textual
    would take what is in brackets for markup, and names come from other machines.

    Where not all columns have room, the one that it `shortens` gives way, down to `LEAST` cells.
    """

    def __init__(self, *columns: str, shortens: str | None = None, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False)
        self._names = columns
        self._shortened = None if shortens is None else columns.index(shortens)
        self._told: Mapping[str, Row] = {}
        self._rows: dict[str, list[Text]] = {}

    def on_mount(self) -> None:
        """Make the columns."""
        for name in self._names:
            self.add_column(name, key=name)

    def on_resize(self) -> None:
        """Textual calls it when the place has another size."""
        self.fill(self._told)

    @property
    def chosen(self) -> str | None:
        """The key of the row that the cursor is on."""
        keys = list(self._rows)
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    def fill(self, told: Mapping[str, Row]) -> None:
        """Show these rows, in their order; the cursor stays on its row."""
        self._told = told
        rows = {key: [_as_text(cell) for cell in row] for key, row in told.items()}
        self._fit(list(rows.values()))
        if list(rows) != list(self._rows):
            chosen = self.chosen
            self.clear()
            for key, row in rows.items():
                self.add_row(*row, key=key)
            if chosen is not None and chosen in rows:
                self.move_cursor(row=list(rows).index(chosen), animate=False)
        else:
            for key, row in rows.items():
                for name, cell, before in zip(self._names, row, self._rows[key], strict=True):
                    if cell != before:
                        self.update_cell(key, name, cell, update_width=True)
        self._rows = rows

    def _fit(self, rows: Sequence[list[Text]]) -> None:
        """Shorten what may be shortened to what the other columns leave."""
        at = self._shortened
        if at is None or not rows:
            return
        columns = zip(self._names, zip(*rows, strict=True), strict=True)
        wide = [max(cell_len(name), *(c.cell_len for c in cells)) for name, cells in columns]
        spaces = 2 * self.cell_padding * len(wide)
        others = sum(wide) - wide[at] + spaces + self.scrollbar_size_vertical
        for row in rows:
            row[at] = row[at].copy()
            row[at].truncate(max(LEAST, self.size.width - others), overflow="ellipsis")


def _as_text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
