"""Guesses the next tokens of a text: from what it said before, or by a smaller model.

An answer that quotes its prompt, or repeats itself, goes on as it did after the same few tokens
before: prompt lookup, as in LLMA (arXiv:2304.04487). Elsewhere a draft model may guess, as in
speculative decoding (arXiv:2211.17192), here always what it finds likeliest. A draft is sent behind
the last token as one step; its tokens count only as far as the sampler chooses the same. How many
are drafted follows from how often guesses were right and from what steps of more rows take, the
guessing included. A second draft may follow while the first is under way: what that gains where
the first holds, and costs where it does not, is measured as well. Knows no hops, no sampler, no
models, no torch and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median_low
from typing import TypeVar

T = TypeVar("T")

MAX_DRAFT = 15
"""With the last token a step of 16 rows: shards take no more before the chunks of a prefill."""

LOOK_BACK = 8192
"""Tokens of a prompt that are looked through: to enter that many takes some milliseconds."""

_SIZES = (1, 3, 7, 15)
"""Drafts have one of these lengths, so that what a step of that many rows takes is soon known."""

_MATCHES = (3, 2)
"""So many tokens must have been there before; the longer match is taken."""

_MODEL = 0
"""Stands for the draft model where the length of a match stands for a lookup."""

_GRAMMAR = 1
"""Stands for what a grammar leaves no choice in."""

_PRIOR, _GAIN = {3: 0.3, 2: 0.3, _MODEL: 0.7, _GRAMMAR: 1.0}, 1 / 8
"""Of guesses thought right before any was seen, and the weight of a new one."""

_EXTRA = 0.1
"""Of a single row's time that another is thought to take before it was measured."""

WORTH = 1.1
"""How many times as fast a step with a draft must promise to be."""

_FRESH, _BEHIND, _LATER = "fresh", "behind", "later"
"""How a step was begun: when the one before was read; before that, behind it; or when it was read
while hops still computed what had been sent behind it for nothing."""

_ENOUGH, _TIMES = 2, 8
"""Steps of a size that must have been timed, and the latest of them that count."""

_AGAIN = 64
"""Steps after which a single row is timed again, and first after which drafts are that were too
slow."""


_SHORTER, _LONGER = 0.6, 0.1
"""Of a step's time that one which was sent behind another is thought to take; and by what the next
is thought to take longer where that was for nothing."""


class Drafter:
    """The drafts of one answer. `drafted` counts tokens sent as guesses, `accepted` right ones.

    For each step, the first of which is the prompt's, `propose`, then `took`, then `add` with the
    tokens that the text really got. A guess is compared also where it was not sent, so that prose
    pays nothing to find out that it does not repeat itself. Where nothing is proposed, a draft
    model may guess as many tokens as `wanted` says; `adopt` has them sent. Where the answer has to
    look like something, `insist` is asked first. Behind a draft that is
    under way goes what `follow` says; if all of that draft was right, and the first token behind
    it, the next step has been proposed by that.
    """

    def __init__(self, prompt: Sequence[int], most: int = MAX_DRAFT, worth: float = WORTH) -> None:
        """At most `most` tokens at a time; with 0 nothing is ever drafted. A step with a draft must
        promise to be `worth` times as fast."""
        self.drafted = self.accepted = 0
        self._most = most
        self._prompt = prompt
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}
        self._right = dict(_PRIOR)
        # What a grammar says costs next to nothing to find, as what the text said does.
        self._costs = {by: cost for cost in [_StepCosts(worth)] for by in (*_MATCHES, _GRAMMAR)}
        self._costs[_MODEL] = _StepCosts(worth)
        self._by = _MATCHES[0]
        self._start = self._period = self._next = 0
        self._guessed: deque[int] = deque()
        self._sent = self._size = 0
        self._begun = _FRESH
        self._is_followed = False

    def propose(self, room: int) -> list[int]:
        """The tokens to send behind the last one, at most `room`; mostly none."""
        most = min(self._most, room)
        if most < 1 or not self._ids:
            return []
        match, start = self._look_up()
        if not match:
            return []
        sent = self._best(match, most)
        self._start, self._period, self._next = start, len(self._ids) - start, 0
        self._guessed, self._by = deque(), match
        self._guess(max(sent, 1))
        self._sent = self._size = sent
        return list(self._guessed)[:sent]

    def insist(self, certain: Sequence[int], room: int) -> list[int]:
        """Of the tokens that will follow the last one in any case, those to send, at most `room`;
        none where that does not pay."""
        most = min(self._most, room, len(certain))
        sent = self._best(_GRAMMAR, most) if most > 0 and self._ids else 0
        if sent:
            self._guessed, self._by = deque(certain[:sent]), _GRAMMAR
            self._sent = self._size = sent
        return [*certain[:sent]]

    def follow(self, room: int) -> list[int]:
        """The tokens to send behind a draft that is under way, at most `room`, where that pays."""
        if room < 1 or not self._sent or self._by in (_MODEL, _GRAMMAR):
            return []
        rows = 1 + self._size
        holds = self._right[self._by] ** (1 + self._sent)
        if not self._costs[self._by].may_follow(rows, holds):
            return []
        self._is_followed = True
        before, count = self._sent, min(rows, room)
        self._guess(count)
        self._sent += count
        self.drafted += count
        return list(self._guessed)[before:]

    def wanted(self, room: int) -> int:
        """How many tokens a draft model should guess now, at most `room`; 0: it does not pay."""
        most = min(self._most, room)
        return self._best(_MODEL, most) if most > 0 and self._ids else 0

    def adopt(self, guess: Sequence[int]) -> None:
        """These are sent as the draft of this step, in the place of what was proposed."""
        self._guessed, self._sent, self._by = deque(guess), len(guess), _MODEL

    def had_no_room(self) -> None:
        """What was sent as guesses came not back: there will be no more of them."""
        self._most = self._sent = 0

    def took(self, rows: int, seconds: float) -> None:
        """The step of `rows` rows came back after so long, since before its draft was made or, if
        it had been sent behind another, since that was read."""
        if not self._ids:
            return  # it was the prompt
        if self._begun == _BEHIND:
            self._costs[self._by].took_behind(rows, seconds)
            return
        self.drafted += rows - 1
        costs = set(self._costs.values()) if rows == 1 else {self._costs[self._by]}
        if self._begun == _LATER:
            for cost in costs:
                cost.took_later(rows, seconds)
        elif not self._is_followed:
            for cost in costs:
                cost.took(rows, seconds)

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        if not self._most:
            return
        if not self._ids:
            for known in self._prompt[-LOOK_BACK:]:
                self._enter(known)
        is_right = True
        for token in tokens:
            is_right = self._compare(token)
            self._enter(token)
        self._begun = (_BEHIND if is_right else _LATER) if self._is_followed else _FRESH
        self._is_followed = False

    # Private

    def _guess(self, count: int) -> None:
        """Guess so many more tokens. Where that runs into the end of the text, it is taken to go
        round."""
        for index in range(self._next, self._next + count):
            self._guessed.append(self._ids[self._start + index % self._period])
        self._next += count

    def _best(self, by: int, most: int) -> int:
        sizes = [size for size in _SIZES if size <= most]
        return self._costs[by].best(self._right[by], sizes)

    def _compare(self, token: int) -> bool:
        if not self._guessed:
            return False
        is_right = self._guessed.popleft() == token
        self._right[self._by] += _GAIN * (is_right - self._right[self._by])
        if is_right and self._sent:
            self.accepted += 1
            self._sent -= 1
        else:
            self._guessed.clear()
            self._sent = 0
        return is_right

    def _enter(self, token: int) -> None:
        for count in _MATCHES:
            if len(self._ids) >= count:
                self._follows[tuple(self._ids[-count:])] = len(self._ids)
        self._ids.append(token)

    def _look_up(self) -> tuple[int, int]:
        """How many of the last tokens were there before, and where what followed begins; the
        latest such place."""
        for count in _MATCHES:
            start = self._follows.get(tuple(self._ids[-count:]))
            if start is not None:
                return count, start
        return 0, 0


class _StepCosts:
    """What steps took, by their number of rows; medians, because one slow step says nothing."""

    def __init__(self, worth: float) -> None:
        self._worth = worth
        self._took: dict[int, deque[float]] = {}
        self._behind: dict[int, deque[float]] = {}
        self._later: deque[float] = deque(maxlen=_TIMES)
        self._asked = 0
        self._refused, self._patience = 0, _AGAIN
        self._drafts = 0

    def took(self, rows: int, seconds: float) -> None:
        self._took.setdefault(rows, deque(maxlen=_TIMES)).append(seconds)

    def took_behind(self, rows: int, seconds: float) -> None:
        """A step that was sent behind another, since that was read."""
        self._behind.setdefault(rows, deque(maxlen=_TIMES)).append(seconds)

    def took_later(self, rows: int, seconds: float) -> None:
        """A step that may have had to wait for what was sent for nothing."""
        if (usual := self._median(rows)) is not None:
            self._later.append(seconds - usual)

    def may_follow(self, rows: int, holds: float) -> bool:
        """Whether as many rows should be sent behind a step of `rows`, which with probability
        `holds` are not for nothing."""
        self._drafts += 1
        if self._drafts % _AGAIN == 0:
            self._behind.clear()  # it may have been a busy moment
            self._later.clear()
            return False  # and this one is timed by itself
        usual = self._median(rows)
        if usual is None:
            return False
        behind = _median(self._behind.get(rows, ()), usual * _SHORTER)
        longer = _median(self._later, usual * _LONGER)
        return self._worth * (holds * behind + (1 - holds) * (usual + longer)) < usual

    def best(self, right: float, sizes: Sequence[int]) -> int:
        """How many of `sizes` to draft when so large a share of guesses is `right`; 0: none."""
        self._asked += 1
        if self._asked % _AGAIN == 0 or self._median(1) is None:
            return 0  # what a single row takes changes with the length of the text
        best = self._best(right, sizes, is_measured=True)
        if not best and self._best(right, sizes, is_measured=False):
            self._refused += 1
            if self._refused >= self._patience:  # it may have been a busy moment
                self._took = {1: self._took[1]}
                self._refused, self._patience = 0, 2 * self._patience
        return best

    def _best(self, right: float, sizes: Sequence[int], *, is_measured: bool) -> int:
        single, cost, extra = self._median(1), 1.0, _EXTRA
        best, promise = 0, self._worth
        for size in sizes:
            took = self._median(1 + size) if is_measured else None
            if took and single:
                cost = max(cost, took / single)
                extra = (cost - 1.0) / size / 2  # more rows share more: half as much for another
            else:
                cost = max(cost, 1.0 + extra * size)
            tokens = sum(right**count for count in range(size + 1))
            if tokens / cost > promise:
                best, promise = size, tokens / cost
        return best

    def _median(self, rows: int) -> float | None:
        """Seconds of a step of so many rows; None while too few were timed."""
        return _median(self._took.get(rows, ()), None)


def _median(times: Collection[float], default: T) -> float | T:
    return median_low(times) if len(times) >= _ENOUGH else default
