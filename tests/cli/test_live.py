"""The lines that may still change, on a screen that is read back."""

from __future__ import annotations

import io

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.live import LiveMarkdown, Tail

COLUMNS, ROWS = 20, 6


class Screen:
    """A small terminal, and all that was written to it."""

    def __init__(self) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000, ratio=0.001)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.Stream(self.screen)
        self._out = io.StringIO()
        self.tail = Tail(self._out)
        self.written = ""

    def lines(self) -> list[str]:
        """What stands there, from the first line that ever did."""
        news = self._out.getvalue()[len(self.written) :]
        self._stream.feed(news)
        self.written += news
        top = ["".join(line[x].data for x in range(COLUMNS)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*top, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


@pytest.fixture(autouse=True)
def _size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(ROWS))


PICTURES = st.lists(st.lists(st.text("ab", max_size=3), max_size=ROWS - 1), max_size=6)


@given(PICTURES)
def test_the_screen_is_what_was_shown_last(pictures: list[list[str]]) -> None:
    screen = Screen()
    for picture in pictures:
        screen.tail.show(picture)
        expected = list(picture)
        while expected and not expected[-1]:
            expected.pop()
        assert screen.lines() == expected
    screen.tail.clear()
    assert screen.lines() == []
    screen.tail.show(["x"])
    screen.tail.leave()
    screen.tail.show(["y"])
    assert screen.lines() == ["x", "y"]


def test_what_has_left_the_screen_is_not_written_again() -> None:
    screen = Screen()
    before = [f"line {number}" for number in range(20)]
    screen.tail.show(before)
    assert screen.lines() == before
    after = [f"other {number}" for number in range(22)]
    screen.tail.show(after)
    seen = 20 - ROWS + 1
    assert screen.lines() == before[:seen] + after[seen:]


def test_a_line_more_costs_a_line() -> None:
    screen = Screen()
    lines: list[str] = []
    for number in range(300):
        lines.append(f"line {number}")
        screen.tail.show(list(lines))
        screen.tail.show([*lines[:-1], lines[-1] + " more"])
        lines[-1] += " more"
    assert screen.lines() == lines
    assert len(screen.written) < 2 * sum(len(line) + 1 for line in lines)


async def test_no_way_of_writing_a_character_acts_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of an answer that has no such character itself: in a link, by its number."""
    live = LiveMarkdown()
    live.text("<mailto:%1B%5D52;c;eA==%1B%5C@b> &#8238;backwards")
    live.end()
    shown = capsys.readouterr().out
    assert "52;c;eA==" in shown
    assert "backwards" in shown
    assert "\x1b]" not in shown
    assert "\u202e" not in shown
