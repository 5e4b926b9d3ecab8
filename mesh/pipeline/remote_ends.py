"""What the hops of a route run of a model's ends, for an asker that holds none of them.

The hop with layer 0 takes token ids, the one with the last layer answers with candidates; what goes
in and comes out of all others is as ever. Plain data: knows no sessions and no links.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mesh.models.candidates import CANDIDATES
from mesh.types import HIDDEN_DTYPES, LayerRange, ShardDescriptor
from mesh.wire.messages import MAX_HEAD_ROWS, Open, OpenEnds, OpenNormed, WireTensor
from mesh.wire.token_rows import behind_blanks, rows_due, top_layout

_BYTES = frozenset({"int8"})


@dataclass(frozen=True, slots=True)
class RemoteEnds:
    """For a model of so many layers, such a width and such a vocabulary.

    Rows before position `since` are none that a token is chosen behind; behind it as many of a
    step's last rows as `rows` says are. Without `candidates` the last hop gives hidden states,
    behind the final norm if `normed`. Others have `inputs_size` numbers behind them, see
    `AskerModel`.
    """

    total_layers: int
    hidden_size: int
    vocab_size: int
    candidates: int = CANDIDATES
    rows: int = 1
    since: int = 0
    normed: bool = False
    inputs_size: int = 0

    def opening(self, request: Open, layers: LayerRange) -> Open:
        """What asks a hop for a session on `layers`."""
        ids, count, normed = layers.start == 0, self._count(layers), self._norms(layers)
        if not (ids or count or normed):
            return request
        common = {each.name: getattr(request, each.name) for each in fields(request)}
        rows, since = (self.rows, self.since) if count else (0, 0)
        kind = OpenNormed if normed else OpenEnds
        return kind(**common, ids=ids, candidates=count, rows=rows, since=since)

    def is_served_by(self, shard: ShardDescriptor, layers: LayerRange) -> bool:
        """Whether a shard can do what its part of a route takes."""
        if layers.start == 0 and not shard.embeds:
            return False
        return (shard.head or not self._count(layers)) and (shard.norms or not self._norms(layers))

    def gives_candidates(self, layers: LayerRange) -> bool:
        """Whether the hop on these layers answers with candidates."""
        return self._count(layers) > 0

    def bears_hidden(self, layers: LayerRange) -> bool:
        """Whether the hop on these layers answers with what its last layer gave."""
        return not (self._count(layers) or self._norms(layers))

    def fits(self, layers: LayerRange, position: int, rows: int, tensor: WireTensor) -> bool:
        """Whether a hop's answer to a step of `rows` from `position` on has shape and dtype."""
        count = self._count(layers)
        if not count:
            size = self.hidden_size + (0 if self._norms(layers) else self.inputs_size)
            return tensor.shape == (1, rows, size) and tensor.dtype in HIDDEN_DTYPES
        due = rows_due(position, rows, self.since, self.rows)
        return tensor.shape == (1, due, top_layout(count).itemsize) and tensor.dtype in _BYTES

    def aligned(self, layers: LayerRange, rows: int, tensor: WireTensor) -> WireTensor:
        """An answer that `fits`, with a row for each of the step's."""
        return behind_blanks(tensor, rows) if self._count(layers) else tensor

    def of_all_rows(self) -> RemoteEnds:
        """The same with candidates of as many rows as a host gives."""
        return replace(self, rows=MAX_HEAD_ROWS)

    def _norms(self, layers: LayerRange) -> bool:
        return self.normed and layers.stop == self.total_layers

    def _count(self, layers: LayerRange) -> int:
        at_the_end = layers.stop == self.total_layers
        return min(self.candidates, self.vocab_size) if at_the_end else 0
