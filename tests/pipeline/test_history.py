"""The asker's copy of a hop's inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.pipeline.history import History, rows_of, slice_rows
from mesh.wire.messages import WireTensor

HIDDEN = 3


def rows(start: int, count: int, dtype: str = "fp16") -> WireTensor:
    """Rows whose bytes say which position they are."""
    size = 2 if dtype != "fp32" else 4
    data = b"".join(
        bytes([position % 256]) * (size * HIDDEN) for position in range(start, start + count)
    )
    return WireTensor(dtype, (1, count, HIDDEN), data)


def positions(history: History, max_rows: int = 1000) -> list[int]:
    found = []
    for position, tensor in history.chunks(max_rows):
        size = len(tensor.data) // rows_of(tensor)
        assert rows_of(tensor) <= max_rows
        assert position == len(found)
        found += [bytes(tensor.data)[index * size] for index in range(rows_of(tensor))]
    return found


def test_slices_share_bytes() -> None:
    tensor = rows(0, 5)
    part = slice_rows(tensor, 1, 3)
    assert part.shape == (1, 2, HIDDEN)
    assert bytes(part.data) == bytes([1] * 6 + [2] * 6)
    assert slice_rows(tensor, 0, 5) is tensor


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["fp16", "fp32"])), max_size=12),
    st.lists(st.integers(0, 100), max_size=3),
    st.integers(1, 20),
)
def test_what_went_in_comes_out_whatever_was_cut(
    pieces: list[tuple[int, str]], cuts: list[int], max_rows: int
) -> None:
    history = History()
    expected: list[int] = []
    for count, dtype in pieces:
        history.append(rows(len(expected), count, dtype))
        expected += [len(expected) + index for index in range(count)]
    for cut in cuts:
        history.cut(cut)
        del expected[cut:]
    assert history.length == len(expected)
    assert positions(history, max_rows) == expected
    assert history.size_bytes == sum(len(tensor.data) for _, tensor in history.chunks(1))


def test_single_steps_are_joined_for_a_replay() -> None:
    history = History()
    history.append(rows(0, 4))
    for position in range(4, 12):
        history.append(rows(position, 1))
    assert [rows_of(tensor) for _, tensor in history.chunks(8)] == [8, 4]


def test_where_long_steps_have_other_bits_a_replay_joins_short_ones_to_no_longer_ones() -> None:
    history = History()
    at = 0
    for count in (8, 6, *[1] * 7, 3, 5, 1, 1, 4):
        history.append(rows(at, count))
        at += count
    pieces = list(history.chunks(8, joined=4))
    assert [rows_of(tensor) for _, tensor in pieces] == [8, 6, 4, 3, 3, 5, 2, 4]
    assert [position for position, _ in pieces] == [0, 8, 14, 18, 21, 24, 29, 31]
