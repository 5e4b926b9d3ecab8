"""Mixers that keep a running state, as a few torch operators over the states of `StateCache`.

What reads weights is computed for the rows of all sessions at once, the states of each by
themselves. They have the form that transformers' modules give them, which may compute the next
step. Rows of up to `SHORT_ROWS` go through them one after the other: each has the bits that it has
alone. More are a prompt, and are computed in chunks (https://arxiv.org/abs/2412.06464, section
3.3), with their sums in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mesh.shard.attention import SHORT_ROWS
from mesh.shard.compiled.parts import DeltaNet, NotCompilable, ShortConvolution, StateSpace
from mesh.shard.compiled.recurrences import UNIT_EPSILON, Convolution, Recurrence
from mesh.shard.lean_parts import LeanGate, lean_product, of_each
from mesh.shard.states import StateCache

_CHUNK = 32
"""Rows of a prompt whose states are computed at once: 64 take as long, 16 a quarter more."""


class LeanRecurrence(nn.Module):
    """Of layer `index` of the span. See `Recurrence`."""

    def __init__(self, mixer: Recurrence, index: int) -> None:
        super().__init__()
        self.index = index
        self.gate = LeanGate(mixer.gate)
        self._project = lean_product(mixer.projections)
        self._output = lean_product((mixer.output,))
        self.convolution = _LeanConvolution(mixer.convolution, index)

    def run(self, x: torch.Tensor, sessions: Sequence[StateCache]) -> torch.Tensor:
        """(rows, hidden) normalised, as many of each session -> (rows, hidden)."""
        y, gates = self._mixed(x, sessions)
        return self._output(self.gate.run(y, gates).to(x.dtype))

    def _mixed(
        self, x: torch.Tensor, sessions: Sequence[StateCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out of the states, (rows, attended) fp32, and the gate's numbers."""
        raise NotImplementedError


def lean_recurrence(mixer: Recurrence, index: int) -> LeanRecurrence:
    """That of layer `index` of the span. Raises NotCompilable for one that is not computed."""
    if isinstance(mixer, ShortConvolution):
        return _LeanShortConvolution(mixer, index)
    if isinstance(mixer, StateSpace):
        return _LeanStateSpace(mixer, index)
    if isinstance(mixer, DeltaNet):
        return _LeanDeltaNet(mixer, index)
    raise NotCompilable("its running states are of another kind")


class _LeanConvolution(nn.Module):
    """See `Convolution`."""

    def __init__(self, convolution: Convolution, index: int) -> None:
        super().__init__()
        self._index = index
        self.taps = convolution.taps[:, 0].t().contiguous()  # (width, channels)
        self.bias = convolution.bias

    def run(self, x: torch.Tensor, sessions: Sequence[StateCache]) -> torch.Tensor:
        """(rows, channels), as many of each session -> the same in fp32."""
        width, channels = self.taps.shape
        rows = len(x) // len(sessions)
        inputs = []
        for own, cache in zip(torch.split(x, rows), sessions, strict=True):
            before = cache.before("conv", self._index)
            past = x.new_zeros(width, channels) if before is None else before[0].t()
            behind = torch.cat((past, own))
            cache.become("conv", self._index, behind[-width:].clone().t()[None])
            inputs.append(behind[1:])
        wide = torch.stack(inputs).float()  # (sessions, width - 1 + rows, channels)
        y = wide[:, :rows] * self.taps[0]
        for number in range(1, width):
            y.addcmul_(wide[:, number : number + rows], self.taps[number])
        y = y if self.bias is None else y.add_(self.bias)
        return y.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What rows read of states and write to them, all fp32: queries and keys (rows, heads, key
    width), values (rows, heads, width), and (rows, heads) logarithms of what is left of a state
    and, where what it has under a key already is subtracted, which part of the rest is written."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor | None

    def split(self, count: int) -> list[_Rows]:
        """Each `count` rows."""
        if len(self.values) == count:
            return [self]
        numbers = self.queries, self.keys, self.values, self.decays
        each = [torch.split(of_all, count) for of_all in numbers]
        rates = [None] * len(each[0]) if self.rates is None else torch.split(self.rates, count)
        return [_Rows(*parts) for parts in zip(*each, rates, strict=True)]


class _LeanDeltaNet(LeanRecurrence):
    """See `DeltaNet`."""

    def __init__(self, mixer: DeltaNet, index: int) -> None:
        super().__init__(mixer, index)
        self._of = mixer
        self._rates = lean_product(mixer.rates)
        self.steps, self.decay = mixer.steps, mixer.decay

    def _mixed(
        self, x: torch.Tensor, sessions: Sequence[StateCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of = self._of
        keys = of.key_heads * of.key_width
        projected, rates = self._project(x), self._rates(x).float()
        if of.is_interleaved:
            widths = [keys, keys, of.attended, of.attended]
            projected = _by_kind(projected, of.key_heads, widths)
            rates = _by_kind(rates, of.key_heads, [of.heads] * 2)
        mixed, gates = torch.split(projected, [of.mixed, of.attended], -1)
        written, passed = torch.split(rates, of.heads, -1)
        mixed = F.silu(self.convolution.run(mixed, sessions), inplace=True)
        q, k, v = torch.split(mixed, [keys, keys, of.attended], -1)
        rows = _Rows(
            self._unit_heads(q).mul_(of.key_width**-0.5),
            self._unit_heads(k),
            v.reshape(-1, of.heads, of.width),
            self.decay * of_each(passed + self.steps, F.softplus),
            of_each(written, torch.sigmoid),
        )
        return _through_states(rows, sessions, self.index).flatten(1), gates

    def _unit_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Each head of queries or keys one long, as often as values share it."""
        x = x.reshape(-1, self._of.key_heads, self._of.key_width)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPSILON)
        return x.repeat_interleave(self._of.heads // self._of.key_heads, 1)


class _LeanShortConvolution(LeanRecurrence):
    """See `ShortConvolution`."""

    def __init__(self, mixer: ShortConvolution, index: int) -> None:
        super().__init__(mixer, index)
        self._width = mixer.width

    def _mixed(
        self, x: torch.Tensor, sessions: Sequence[StateCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, gates, second = torch.split(self._project(x), self._width, -1)
        return self.convolution.run(first * second, sessions), gates


class _LeanStateSpace(LeanRecurrence):
    """See `StateSpace`."""

    def __init__(self, mixer: StateSpace, index: int) -> None:
        super().__init__(mixer, index)
        self._of = mixer
        self.steps, self.decay, self.passed = mixer.steps, mixer.decay, mixer.passed[:, None]

    def _mixed(
        self, x: torch.Tensor, sessions: Sequence[StateCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of = self._of
        parts = [of.attended, of.mixed, of.heads]
        gates, mixed, steps = torch.split(self._project(x), parts, -1)
        mixed = F.silu(self.convolution.run(mixed, sessions), inplace=True)
        keys = of.groups * of.key_width
        values, written, read = torch.split(mixed, [of.attended, keys, keys], -1)
        steps = of_each(steps.float() + self.steps, F.softplus)
        values = values.reshape(-1, of.heads, of.width)
        rows = _Rows(
            self._spread(read),
            self._spread(written),
            values * steps[..., None],
            self.decay * steps,
            None,
        )
        y = _through_states(rows, sessions, self.index, is_turned=True)
        return y.addcmul_(values, self.passed).flatten(1), gates

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """What is the same in a group for each head of it."""
        x = x.reshape(-1, self._of.groups, self._of.key_width)
        return x.repeat_interleave(self._of.heads // self._of.groups, 1)


def _by_kind(x: torch.Tensor, heads: int, widths: Sequence[int]) -> torch.Tensor:
    """(rows, numbers), of which each head had its share of `widths` beside the others', with what
    is of one kind together."""
    each = torch.split(x.view(len(x), heads, -1), [width // heads for width in widths], -1)
    return torch.cat([part.flatten(1) for part in each], 1)


def _through_states(
    rows: _Rows, sessions: Sequence[StateCache], index: int, *, is_turned: bool = False
) -> torch.Tensor:
    """(rows, heads, width), and the states of layer `index` have become what rows make of them.
    Where they are turned, a cache has them (1, heads, width, key width)."""
    found = []
    count = len(rows.values) // len(sessions)
    for own, cache in zip(rows.split(count), sessions, strict=True):
        before = cache.before("recurrent", index)
        if before is None:
            (_, heads, keys), width = own.keys.shape, own.values.shape[2]
            shape = (heads, width, keys) if is_turned else (heads, keys, width)
            before = own.values.new_zeros(shape)[None]
        compute = _one_by_one if count <= SHORT_ROWS else _in_chunks
        y, state = compute(own, before[0].mT if is_turned else before[0])
        cache.become("recurrent", index, (state.mT if is_turned else state)[None])
        found.append(y)
    return found[0] if len(found) == 1 else torch.cat(found)


def _one_by_one(rows: _Rows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, heads, width) of a `state` (heads, key width, width), and what it becomes."""
    queries, keys, values = (each[:, :, None] for each in (rows.queries, rows.keys, rows.values))
    decays = of_each(rows.decays, torch.exp)[..., None, None]
    rates = None if rows.rates is None else rows.rates[..., None, None]
    found = []
    for i in range(len(values)):
        state = state.mul_(decays[i]) if i else state * decays[i]
        new = values[i]
        if rates is not None:
            new = (new - torch.bmm(keys[i], state)).mul_(rates[i])
        state.addcmul_(keys[i].transpose(1, 2), new)
        found.append(torch.bmm(queries[i], state))
    return torch.stack(found).squeeze(2), state


def _in_chunks(rows: _Rows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_one_by_one`: what rows of a chunk write under each other's keys is found by solving for
    it, and the state changes once for all of them."""
    found = []
    for own in rows.split(_CHUNK):
        queries, keys, new = (each.transpose(0, 1) for each in (own.queries, own.keys, own.values))
        left = own.decays.t().cumsum(1)  # (heads, rows) since the chunk began
        since, last = left.exp()[..., None], left[:, -1:]
        # From each row to each before it; above the diagonal those would be infinite.
        between = (left[:, :, None] - left[:, None]).tril_().exp_().tril_()
        count = keys.shape[1]
        both = torch.cat((keys, queries), 1)
        meeting, seen = torch.bmm(both, keys.transpose(1, 2)), torch.bmm(both, state)
        if own.rates is not None:
            rates = own.rates.t()[..., None]
            system = (meeting[:, :count] * between).mul_(rates)
            new = torch.addcmul(new, since, seen[:, :count], value=-1).mul_(rates)
            new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
        among = meeting[:, count:] * between
        y = torch.bmm(among, new).addcmul_(seen[:, count:], since)
        late = keys * (last - left).exp()[..., None]
        state = torch.bmm(late.transpose(1, 2), new).addcmul_(state, last.exp()[..., None])
        found.append(y.transpose(0, 1))
    return torch.cat(found), state
