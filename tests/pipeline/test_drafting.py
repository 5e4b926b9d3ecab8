"""Guessing the next tokens from what a text said before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mesh.pipeline.drafting import MAX_DRAFT, WORTH, Drafter

SINGLE_S = 0.010

Cost = Callable[[int], float]


def flat(rows: int) -> float:
    """What steps take where the network is what takes time."""
    return SINGLE_S + 0.0001 * rows


def by_row(rows: int) -> float:
    """What they take where every row is computed alone."""
    return SINGLE_S * rows


def for_nothing(rows: int) -> float:
    """What the next step takes longer where hops compute alike, one after the other: nothing."""
    return 0.0


class Read:
    """A text that is read by a drafter as a generation would; `sent` has each step's draft.

    Where `behind` is given, drafts may follow each other: a step of so many rows takes that long
    where the one before it held; where not, the next one takes `late` longer.
    """

    def __init__(
        self,
        prompt: list[int],
        answer: list[int],
        cost: Cost,
        most: int = 15,
        *,
        behind: Cost | None = None,
        late: Cost = for_nothing,
        worth: float = WORTH,
    ) -> None:
        self.drafter = Drafter(prompt, most, worth)
        self.sent: list[list[int]] = []
        self.seconds = 0.0
        self.followed = self.held = 0
        assert self.drafter.propose(len(answer)) == []
        self.drafter.took(1, 1.0)
        self.drafter.add(answer[:1])
        at, late_s, on_its_way = 1, 0.0, list[int]()
        while at < len(answer):
            if on_its_way and behind is not None:
                draft, seconds = on_its_way[1:], behind(len(on_its_way))
            else:
                draft = self.drafter.propose(len(answer) - at - 1)
                seconds = cost(1 + len(draft)) + late_s
            room = len(answer) - at - 1 - len(draft)
            on_its_way = self.drafter.follow(room) if behind is not None else []
            assert len(on_its_way) <= room
            self.followed += bool(on_its_way)
            self.sent.append(draft)
            self.seconds += seconds
            self.drafter.took(1 + len(draft), seconds)
            right = 0
            while right < len(draft) and draft[right] == answer[at + right]:
                right += 1
            self.drafter.add(answer[at : at + right + 1])
            at += right + 1
            holds = right == len(draft) and on_its_way[:1] == answer[at - 1 : at]
            late_s = 0.0 if holds or not on_its_way else late(len(on_its_way))
            if holds:
                self.held += 1
            else:
                on_its_way = []

    @property
    def longest(self) -> int:
        return max(map(len, self.sent))


def test_a_text_that_goes_round_is_drafted_at_full_length() -> None:
    """Also where one round is shorter than the draft."""
    read = Read([9, 8, 7], [1, 2, 3, 4, 5] * 60, flat)
    assert read.longest == MAX_DRAFT
    assert read.drafter.accepted > 200
    assert read.seconds < 0.35 * 300 * SINGLE_S


def test_an_answer_that_quotes_its_prompt_is_drafted() -> None:
    prompt = [(7 * i * i + 3) % 997 for i in range(400)]
    read = Read(prompt, prompt[100:300], flat)
    assert read.drafter.accepted > 120


def test_what_was_never_said_is_not_guessed() -> None:
    read = Read([1, 2, 3], list(range(10, 400)), flat)
    assert read.longest == 0
    assert (read.drafter.drafted, read.drafter.accepted) == (0, 0)


def test_the_longer_match_is_taken_and_of_several_the_latest() -> None:
    drafter = Drafter([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3, 60, 9, 2, 3, 70, 1, 2], 1)
    drafter.took(1, 1.0)
    drafter.add([3])
    for _ in range(3):
        drafter.took(1, SINGLE_S)
    assert drafter.propose(5) == [60]


def test_there_is_no_draft_beyond_the_end_of_the_answer() -> None:
    read = Read([], [1, 2, 3] * 20, flat)
    assert sum(1 + len(draft) for draft in read.sent) >= 59
    assert all(len(draft) < 59 for draft in read.sent)
    assert Drafter([1, 2] * 9).propose(0) == []


def test_text_that_goes_on_otherwise_each_time_costs_next_to_nothing() -> None:
    """Every pair of tokens comes back, and never with the same token behind it."""
    answer = [token for last in range(10, 200) for token in (1, 2, last)]
    read = Read([], answer, by_row)
    assert read.seconds < 1.03 * (len(answer) - 1) * SINGLE_S


@pytest.mark.parametrize("right", [True, False])
def test_where_each_row_costs_as_much_drafts_end(right: bool) -> None:
    answer = [1, 2, 3, 4] * 100 if right else [1, 2, 3, 4, 1, 2, 3, 5, 6] * 100
    read = Read([], answer, by_row)
    assert read.seconds < 1.05 * (len(answer) - 1) * SINGLE_S
    assert sum(map(bool, read.sent)) < 0.1 * len(answer)


def test_costs_are_measured_again_after_a_busy_moment() -> None:
    steps = 0

    def busy_first(rows: int) -> float:
        nonlocal steps
        steps += 1
        return flat(rows) * (rows if steps < 60 else 1)

    read = Read([], [1, 2, 3, 4] * 200, busy_first)
    assert not any(read.sent[30:60])
    assert read.drafter.accepted > 300


def test_a_step_that_came_back_without_its_draft_was_the_last_with_one() -> None:
    drafter = Drafter([1, 2, 3] * 9)
    drafter.took(1, 1.0)
    drafter.add([1])
    for token in (2, 3):
        assert drafter.propose(20) == []
        drafter.took(1, SINGLE_S)
        drafter.add([token])
    assert drafter.propose(1) == [1]
    counted = drafter.drafted
    drafter.had_no_room()
    drafter.took(1, SINGLE_S)
    drafter.add([1])  # the guess was right, but nobody had room for it
    assert drafter.drafted == counted
    assert drafter.propose(20) == []


def test_with_none_allowed_nothing_is_drafted() -> None:
    assert Read([], [1, 2] * 40, flat, most=0).longest == 0


def half(rows: int) -> float:
    """What a step takes behind another where two hops take as long as each other."""
    return flat(rows) / 2


ROUND = [1, 2, 3, 4, 5] * 120
CHANGING = [token for last in range(10, 100) for token in (*range(1, 9), last)]
"""A text of which one token in nine is another each time."""


def test_drafts_follow_each_other_where_two_hops_share_the_work() -> None:
    alone, together = Read([], ROUND, flat), Read([], ROUND, flat, behind=half)
    assert together.held > 0.8 * together.followed > 0
    assert together.seconds < 0.75 * alone.seconds
    assert together.drafter.accepted >= alone.drafter.accepted


def test_what_was_on_its_way_for_nothing_is_counted_as_drafted() -> None:
    read = Read([], CHANGING, flat, behind=half)
    rows = sum(1 + len(draft) for draft in read.sent)
    assert read.drafter.drafted - read.drafter.accepted >= rows - len(CHANGING)


@pytest.mark.parametrize("text", [ROUND, CHANGING])
def test_no_draft_follows_another_where_one_hop_computes_both(text: list[int]) -> None:
    """What follows takes as long as alone then, and what was for nothing delays the next."""
    alone, single = Read([], text, flat), Read([], text, flat, behind=flat, late=flat)
    assert single.seconds < 1.05 * alone.seconds
    assert single.followed < 0.2 * len(single.sent)


def test_text_that_breaks_off_each_time_is_not_slowed_down_by_what_follows() -> None:
    alone, late = Read([], CHANGING, flat), Read([], CHANGING, flat, behind=half, late=half)
    assert late.seconds < 1.05 * alone.seconds


def test_where_no_gain_is_asked_for_nearly_every_draft_is_followed() -> None:
    read = Read([], CHANGING, flat, behind=flat, late=flat, worth=0.0)
    assert read.followed > 0.8 * sum(map(bool, read.sent))


def test_a_draft_model_is_not_asked_for_what_follows() -> None:
    drafter = Drafter([1, 2, 3] * 9)
    drafter.took(1, 1.0)
    drafter.add([7])
    for token in (8, 9):
        drafter.took(1, SINGLE_S)
        drafter.add([token])
    assert drafter.wanted(20)
    drafter.adopt([5, 6])
    assert drafter.follow(20) == []


@pytest.mark.parametrize(("cost", "sent"), [(flat, 7), (by_row, 0)])
def test_what_has_to_follow_is_sent_as_far_as_that_pays(cost: Cost, sent: int) -> None:
    certain = list(range(50, 61))
    drafter = Drafter([1, 2, 3], MAX_DRAFT)
    assert drafter.insist(certain, 99) == []  # behind the prompt
    drafter.took(1, 1.0)
    drafter.add([4])
    drafts = []
    for _ in range(14):
        draft = drafter.insist(certain, 99)
        assert draft == certain[: len(draft)]
        assert drafter.follow(99) == []
        drafter.took(1 + len(draft), cost(1 + len(draft)))
        drafter.add(certain[: 1 + len(draft)])
        drafts.append(len(draft))
    assert drafts[:2] == [0, 0]  # what a single row takes has to be known
    assert drafts[-1] == sent
    assert drafter.accepted == drafter.drafted == sum(drafts)
    assert drafter.insist(certain[:2], 99) == certain[: min(sent, 1)]
    assert drafter.insist(certain, 0) == []
