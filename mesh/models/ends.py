"""The ends of a model: what turns ids into hidden states, and those of the last layer into logits.

Knows modules and no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mesh.models.anatomy import Anatomy, base_of
from mesh.models.families import Family
from mesh.models.header import TensorEntry
from mesh.models.streams import Streams


class Ends(nn.Module):
    """Embedding, final norm and head of a model: what turns ids into hidden states, and back.

    `bytes_read` counts what was taken from the checkpoint's files.
    """

    def __init__(
        self,
        causal: Any,
        anatomy: Anatomy,
        family: Family,
        bytes_read: int,
        deferred_head: TensorEntry | None = None,
    ) -> None:
        super().__init__()
        self.deferred_head = deferred_head
        """The weight of the head where that has none yet: it is on the meta device."""
        name, base = base_of(causal)
        entry = family.entry
        self.row_form = family.row_form
        self._inputs = base if self.row_form.width else None
        """What makes the inputs of its layers, where they have some."""
        self._streams = _streams_of(base, anatomy, family)
        self.hidden_size: int = family.config.hidden_size
        self.vocab_size: int = family.config.vocab_size
        self.bytes_read = bytes_read
        self._embedding = base.get_submodule(anatomy.embedding)
        self._positions = base.get_submodule(anatomy.positions) if anatomy.positions else None
        scale = entry.embedding_scale
        self._scale = None if scale is None else scale.of(family.config)
        self._asks_head = entry.asks_head
        self._first = base.get_submodule(anatomy.first) if anatomy.first else None
        self._head = next(
            path for path, part in causal.named_modules() if part is causal.get_output_embeddings()
        )
        # The causal model's forward then is: norm, head, and whatever scaling or capping it does.
        self._norm = base.get_submodule(anatomy.norm)
        causal.set_submodule(name, _NormOnly(base, self.norm))
        self._causal = causal

    @property
    def max_positions(self) -> int | None:
        """How many positions have an embedding of their own; None where they need none."""
        return None if self._positions is None else len(_table(self._positions))

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head: nn.Module = self._causal.get_submodule(self._head)
        return head

    def widen(self) -> None:
        """Compute what goes to the head in fp32."""
        self._norm.float()
        if self._streams is not None:
            self._streams.widen()

    def replace_head(self, head: nn.Module) -> None:
        """Have this one compute the logits."""
        parent, _, name = self._head.rpartition(".")
        setattr(self._causal.get_submodule(parent), name, head)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Token ids (1, rows) that stand at `position`.. as what the first layer is given
        (1, rows, `row_form.size`)."""
        hidden: torch.Tensor = self._embedding(ids)
        states = hidden if self._streams is None else self._streams.spread(hidden)
        if self._inputs is not None:
            token = self._inputs.get_per_layer_inputs(ids)
            inputs = self._inputs.project_per_layer_inputs(hidden, token)
            return torch.cat((states, inputs.flatten(-2).to(hidden.dtype)), -1)
        if self._streams is not None:
            return states
        if self._scale is not None:
            hidden = hidden * self._scale
        if self._first is not None:
            hidden = self._first(hidden)
        if self._positions is not None:
            hidden = hidden + _table(self._positions)[position : position + ids.shape[1]]
        return hidden

    @torch.no_grad()
    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """What the last layer gave, (1, rows, at least `row_form.states`), as one hidden state
        each, behind the final norm."""
        states = rows[..., : self.row_form.states]
        found: torch.Tensor = (
            self._norm(states) if self._streams is None else self._streams.gathered(states)
        )
        return found

    @torch.no_grad()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The same as logits (1, rows, vocab)."""
        if self._asks_head:  # and does nothing else
            found: torch.Tensor = self.head(self.norm(rows)).float()
            return found
        logits: torch.Tensor = self._causal(inputs_embeds=rows, use_cache=False).logits
        return logits


def _streams_of(base: Any, anatomy: Anatomy, family: Family) -> Streams | None:
    form, parts = family.row_form, family.entry.streams
    if parts is None or form.streams == 1:
        return None
    return Streams(base, form, parts, anatomy.layers, anatomy.norm)


def _table(positions: Any) -> torch.Tensor:
    """A row for each position; some begin behind others, which were for padding once."""
    table: torch.Tensor = positions.weights if hasattr(positions, "weights") else positions.weight
    return table[getattr(positions, "offset", 0) :]


@dataclass
class _NormOutput(BaseModelOutputWithPast):  # type: ignore[misc] # transformers is untyped
    """What causal models of any kind expect of their base model."""

    router_logits: Any = None
    cache_params: Any = None
    cross_attentions: Any = None
    shared_kv_states: Any = None


class _NormOnly(nn.Module):
    """Stands for the base model in a causal model whose layers have already run elsewhere."""

    def __init__(self, base: Any, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        # Some have the head's scale from there.
        vars(self).update({name: n for name, n in vars(base).items() if isinstance(n, float)})
        self._norm = norm

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _NormOutput:
        return _NormOutput(last_hidden_state=self._norm(inputs_embeds))
