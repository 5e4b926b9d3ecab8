"""Stop strings: nothing of them is ever shown, nothing else is ever lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.pipeline.completion import StopStrings


def test_a_stop_string_across_pieces_is_cut_out() -> None:
    stops = StopStrings(["END"])
    assert [stops.push(piece) for piece in ("abc E", "N", "D and more")] == ["abc ", "", ""]
    assert stops.hit == "END"
    assert stops.push("later") == ""


def test_what_only_looked_like_one_is_shown_later() -> None:
    stops = StopStrings(["END"])
    assert stops.push("E") == ""
    assert stops.push("x") == "Ex"
    assert stops.push("EN") == ""
    assert stops.flush() == "EN"


def test_the_earliest_of_several_wins() -> None:
    stops = StopStrings(["bc", "c"])
    assert stops.push("abcd") == "a"
    assert stops.hit == "bc"


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
)
def test_shown_text_is_the_text_before_the_first_stop(
    pieces: list[str], strings: list[str]
) -> None:
    stops = StopStrings(strings)
    shown = "".join(stops.push(piece) for piece in pieces)
    whole = "".join(pieces)
    cuts = [whole.find(string) for string in strings if string in whole]
    if stops.hit is None:
        assert not cuts
        assert shown + stops.flush() == whole
    else:
        assert whole.startswith(shown + stops.hit)
        assert not any(string in shown for string in strings)
