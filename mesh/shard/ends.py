"""A model's ends as they are computed with: embedding, final norm and head, on one device.

An asker holds them for itself. A shard with the first or the last layers runs them for askers that
hold none: it embeds the token ids of a session's steps, and answers with the strongest next tokens,
or with rows behind the final norm.
What it computes from, and hands to its layers, has been rounded as for the wire between, so that a
token has the same bits whoever holds the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from mesh.errors import BadRequest, ContextTooLong
from mesh.models.candidates import candidates_of
from mesh.models.coded.gathering import fits_int4
from mesh.models.coded.scheme import is_decoded
from mesh.models.end_names import is_head
from mesh.models.load import Ends, load_ends
from mesh.models.manifest import Manifest
from mesh.models.progress import Progress
from mesh.models.rounded import note_place
from mesh.shard.compiled.formats import Quant
from mesh.shard.device import DTYPES, Choice, choose_quant, plain_dtype, short_dtype_name
from mesh.shard.linear import choose_kernels, kept_dtype
from mesh.types import WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import OpenEnds, OpenNormed, Step, WireTensor
from mesh.wire.token_rows import Rows, ids_from_wire, rows_due, top_layout, top_to_wire

MOST_ROWS = 8
"""The head computes up to so many rows at once."""


class ModelEnds(Protocol):
    """Embedding, final norm and output head."""

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """(1, rows) token ids at positions from `position` to (1, rows, row size)."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, rows, row size) after the last layer to (1, rows, vocab)."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same to (1, rows, hidden) behind the final norm."""


class ComputedEnds:
    """`ModelEnds` on one device in one dtype, whatever the wire's dtype is."""

    def __init__(self, ends: Ends, device: torch.device, dtype: torch.dtype) -> None:
        self._ends = ends
        self._device = device
        self._dtype = dtype
        self.vocab_size = ends.vocab_size
        self.max_positions = ends.max_positions

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        return self._ends.embed(ids.to(self._device), position)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ends.logits(hidden.to(self._device, self._dtype))

    @torch.no_grad()
    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ends.norm(hidden.to(self._device, self._dtype))


@dataclass(frozen=True, slots=True)
class EndsPlan:
    """What of a checkpoint's ends to compute with, and how: `dtype` and `quant` as configured,
    `computed` the dtype that was chosen."""

    manifest: Manifest
    device: torch.device
    dtype: str
    computed: Choice[torch.dtype]
    quant: str
    threads: int
    cache_dir: Path | None


@dataclass(frozen=True, slots=True)
class LoadedEnds:
    """Ends to compute with; `rows` of them, a power of two, the head may compute at once, each with
    the bits that it has alone. `reasons` are for people."""

    ends: ComputedEnds
    rows: int
    weight_bytes: int
    reasons: tuple[str, ...]


def maps_inputs(
    manifest: Manifest, device: torch.device, dtype: str, computed: torch.dtype, quant: str
) -> bool:
    """Whether a table that layers are given something of stays in its file: it is looked up there
    where it is wanted as it is stored."""
    stored = short_dtype_name(manifest.ends_dtype)
    is_kept = kept_dtype(dtype, stored, computed, device) == plain_dtype(stored)
    chosen = choose_quant(quant, device, is_int4=manifest.is_int4).value
    is_kept = is_kept or is_decoded(manifest.ends_dtype)
    return device.type == "cpu" and (is_kept or chosen is not None)


def load_computed(plan: EndsPlan, progress: Progress | None = None) -> LoadedEnds:
    """Load them. Blocks. Raises BadCheckpoint, UnsupportedFamily."""
    manifest, device, dtype = plan.manifest, plan.device, plan.computed
    stored = short_dtype_name(manifest.ends_dtype)
    # On a card the head stays as it is: its kernels for few bits are slow for so many rows.
    quant = _quant(plan) if device.type == "cpu" else None
    if quant is None:
        loaded_as = kept_dtype(plan.dtype, stored, dtype.value, device)
        ends = load_ends(manifest, dtype=loaded_as, device=device, progress=progress)
        halved = loaded_as != dtype.value
        kernels = choose_kernels(ends, dtype.value, device, progress, halved=halved).reason
    else:
        from mesh.shard.compiled.head import compile_head

        dtype = Choice(torch.float32, f"dtype fp32: embedding as stored, {stored}")
        as_stored = DTYPES.get(stored, torch.float32)
        note_place(plan.cache_dir, manifest.weights_sha256, manifest.path)
        ends = load_ends(manifest, dtype=as_stored, device=device, progress=progress, defer=True)
        kernels = compile_head(ends, manifest.weights_sha256, plan.cache_dir, plan.threads, quant)
    computed = ComputedEnds(ends, device, dtype.value)
    rows = rows_at_once(computed, ends.row_form.states)
    return LoadedEnds(computed, rows, ends.bytes_read, (dtype.reason, kernels))


def _quant(plan: EndsPlan) -> Quant | None:
    is_int4 = plan.manifest.is_int4
    quant = choose_quant(plan.quant, plan.device, is_int4=is_int4).value
    head = next((each for each in plan.manifest.ends_weights() if is_head(each.name)), None)
    if quant == "int4" and is_int4 and (head is None or not fits_int4(head)):
        return "int8"  # of the layers nothing is lost, and of the head little
    return quant


def rows_at_once(ends: ModelEnds, states: int) -> int:
    """How many rows the head may compute together, a power of two: with 2, 4, ... `MOST_ROWS` of
    them each has the same bits as alone on this machine."""
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, MOST_ROWS, states, generator=seeded)
    alone: list[torch.Tensor] = []
    equal = 1
    while 2 * equal <= MOST_ROWS:
        size = 2 * equal
        alone += [ends.logits(hidden[:, at : at + 1]) for at in range(len(alone), size)]
        if not torch.equal(ends.logits(hidden[:, :size]), torch.cat(alone, dim=1)):
            break
        equal = size
    return equal


def in_checked_sizes(
    call: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, most: int
) -> torch.Tensor:
    """(rows, vocab) of (1, rows, hidden), in calls of the sizes that `rows_at_once` has checked."""
    found = []
    for part in torch.split(rows, most, dim=1):
        count = part.shape[1]
        size = 1 << (count - 1).bit_length()
        padded = torch.cat([part, part[:, :1].expand(1, size - count, -1)], dim=1)
        found.append(call(padded)[:count])
    return torch.cat(found) if len(found) > 1 else found[0]


class SessionEnds:
    """What one session has of its shard's ends, as its `OpenEnds` asks. Used where steps are
    computed, one call at a time."""

    def __init__(self, loaded: LoadedEnds, request: OpenEnds) -> None:
        self._ends = loaded.ends
        self._at_once = loaded.rows
        self._wire_dtype = WireDtype(request.wire_dtype)
        self.takes_ids = request.ids
        self._count = min(request.candidates, loaded.ends.vocab_size)
        self._rows = request.rows
        self._since = request.since
        self._norms = isinstance(request, OpenNormed)
        self._end = 0
        self._last: torch.Tensor | None = None  # (1, rows, hidden), the rows before `_end`

    def check(self, step: Step) -> None:
        """Raise BadRequest unless the step bears token ids of this model, ContextTooLong where it
        has no embedding of their positions: looked up all the same, some devices fail for good."""
        ids_from_wire(step.tensor, self._ends.vocab_size)
        end, most = step.position + step.tensor.shape[1], self._ends.max_positions
        if most is not None and end > most:
            raise ContextTooLong(
                f"The step ends at position {end}; the model has an embedding of {most}.",
                fix="Shorten the text.",
                param="position",
            )

    def taken(self, step: Step) -> torch.Tensor:
        """(1, rows, hidden): what the step's ids are embedded as."""
        ids = torch.from_numpy(ids_from_wire(step.tensor, self._ends.vocab_size))
        return self._rounded(self._ends.embed(ids[None], step.position))

    def given(self, step: Step, hidden: torch.Tensor) -> WireTensor:
        """What is answered to a step whose layers gave (1, rows, hidden)."""
        if not self._count:
            last = self._ends.norm(self._rounded(hidden)) if self._norms else hidden
            return to_wire(last, self._wire_dtype)
        self._end = step.position + hidden.shape[1]
        due = rows_due(step.position, hidden.shape[1], self._since, self._rows)
        self._last = self._rounded(hidden[:, -due:])
        logits = in_checked_sizes(self._logits, self._last, self._at_once)
        return top_to_wire(strongest(logits, self._count))

    def row(self, position: int) -> torch.Tensor:
        """(vocab,) fp32 at a position of which the last answer has candidates. Raises
        BadRequest."""
        kept = 0 if self._last is None else self._last.shape[1]
        if self._last is None or not self._end - kept <= position < self._end:
            raise BadRequest(
                f"The last step's candidates end before position {self._end}; that of {position} is"
                " not among them.",
                fix="Ask for a row right after its step was answered.",
                param="position",
            )
        at = position - (self._end - kept)
        return self._logits(self._last[:, at : at + 1])[0].float()

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._ends.logits(rows)[0]

    def _rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        return to_torch(to_wire(hidden, self._wire_dtype))


def strongest(logits: torch.Tensor, count: int) -> Rows:
    """The `count` strongest of each row of (rows, vocab), any float dtype."""
    rows = np.empty(len(logits), top_layout(count))
    for said, row in zip(rows, logits, strict=True):
        found = candidates_of(row, count)
        said["total"], said["ids"], said["logits"] = found.log_total, found.ids, found.logits
    return rows
