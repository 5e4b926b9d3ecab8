"""Guesses the next tokens of a text: from what it said before, or by a smaller model.

An answer that quotes its prompt, or repeats itself, goes on as it did after the same few tokens
before: prompt lookup, as in LLMA (arXiv:2304.04487). Elsewhere a draft model may guess, as in
speculative decoding (arXiv:2211.17192), here always what it finds likeliest. A draft is sent behind
the last token as one step; its tokens count only as far as the sampler chooses the same. How many
are drafted follows from how often guesses were right and from what steps of more rows take, the
guessing included. Knows no hops, no sampler, no models, no torch and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

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

_PRIOR, _GAIN = {3: 0.3, 2: 0.3, _MODEL: 0.7}, 1 / 8
"""Of guesses thought right before any was seen, and the weight of a new one."""

_EXTRA = 0.1
"""Of a single row's time that another is thought to take before it was measured."""

WORTH = 1.1
"""How many times as fast a step with a draft must promise to be."""

_ENOUGH, _TIMES = 2, 8
"""Steps of a size that must have been timed, and the latest of them that count."""

_AGAIN = 64
"""Steps after which a single row is timed again, and first after which drafts are that were too
slow."""


class Drafter:
    """The drafts of one answer. `drafted` counts tokens sent as guesses, `accepted` right ones.

    For each step, the first of which is the prompt's, `propose`, then `took`, then `add` with the
    tokens that the text really got. A guess is compared also where it was not sent, so that prose
    pays nothing to find out that it does not repeat itself. Where nothing is proposed, a draft
    model may guess as many tokens as `wanted` says; `adopt` has them sent.
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
        self._paces = {count: pace for pace in [_Pace(worth)] for count in _MATCHES}
        self._paces[_MODEL] = _Pace(worth)
        self._by = _MATCHES[0]
        self._guessed: deque[int] = deque()
        self._sent = 0

    def propose(self, room: int) -> list[int]:
        """The tokens to send behind the last one, at most `room`; mostly none."""
        most = min(self._most, room)
        if most < 1 or not self._ids:
            return []
        match, start = self._look_up()
        if not match:
            return []
        sent = self._best(match, most)
        # What follows may run into the end: then the text is taken to go round.
        period = len(self._ids) - start
        guess = [self._ids[start + index % period] for index in range(max(sent, 1))]
        self._guessed, self._sent, self._by = deque(guess), sent, match
        return guess[:sent]

    def wanted(self, room: int) -> int:
        """How many tokens a draft model should guess now, at most `room`; 0: it does not pay."""
        most = min(self._most, room)
        return self._best(_MODEL, most) if most > 0 and self._ids else 0

    def adopt(self, guess: Sequence[int]) -> None:
        """These are sent as the draft of this step, in the place of what was proposed."""
        self._guessed, self._sent, self._by = deque(guess), len(guess), _MODEL

    def took(self, rows: int, seconds: float) -> None:
        """The step of `rows` rows came back after so long, since before its draft was made. Fewer
        rows than were sent mean that there was no room for the draft; then there will be no
        more."""
        if rows <= self._sent:
            self._most = self._sent = 0
            return
        if self._ids:  # else it was the prompt
            for pace in set(self._paces.values()) if rows == 1 else {self._paces[self._by]}:
                pace.took(rows, seconds)
            self.drafted += self._sent

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        if not self._most:
            return
        if not self._ids:
            for known in self._prompt[-LOOK_BACK:]:
                self._enter(known)
        for token in tokens:
            self._compare(token)
            self._enter(token)

    # Private

    def _best(self, by: int, most: int) -> int:
        sizes = [size for size in _SIZES if size <= most]
        return self._paces[by].best(self._right[by], sizes)

    def _compare(self, token: int) -> None:
        if not self._guessed:
            return
        is_right = self._guessed.popleft() == token
        self._right[self._by] += _GAIN * (is_right - self._right[self._by])
        if is_right and self._sent:
            self.accepted += 1
            self._sent -= 1
        else:
            self._guessed.clear()
            self._sent = 0

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


class _Pace:
    """What steps took, by their number of rows; medians, because one slow step says nothing."""

    def __init__(self, worth: float) -> None:
        self._worth = worth
        self._took: dict[int, deque[float]] = {}
        self._asked = 0
        self._refused, self._patience = 0, _AGAIN

    def took(self, rows: int, seconds: float) -> None:
        self._took.setdefault(rows, deque(maxlen=_TIMES)).append(seconds)

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
        times = self._took.get(rows, ())
        return median_low(times) if len(times) >= _ENOUGH else None
