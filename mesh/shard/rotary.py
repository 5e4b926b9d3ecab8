"""The rotary tables of a span, whichever way its family has them.

Where short texts are turned otherwise than long ones (`mesh.models.rope.short_positions`), a
session is of one of the two from its beginning on. Modules of transformers go by the largest
position that they are given: with one more than a text has they say the tables of long texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from mesh.models.rope import rope_types, short_positions
from mesh.shard.compiled.parts import NotCompilable

_PROBED = 16


class Rotary:
    """Those of one span, by their names: the empty one where all layers have the same."""

    def __init__(self, module: Any, names: Iterable[str]) -> None:
        """Raises NotCompilable where they differ between any two lengths of sessions."""
        if "dynamic" in rope_types(module.config):
            raise NotCompilable("its rotary embedding depends on how long a session is")
        named = "rotary_emb" if hasattr(module, "rotary_emb") else "pos_emb"
        self._of: Any = getattr(module, named, None)
        self.short = short_positions(module.config)
        # Some norms have no weights, and those of products are packed.
        device = next(chain(module.parameters(), module.buffers())).device
        like = torch.empty(0, device=device)
        positions = torch.arange(_PROBED, device=device)[None]
        self._once = {name: self._said_once(like, positions, name) for name in set(names)}

    def halves(
        self,
        like: torch.Tensor,
        positions: torch.Tensor,  # (sessions, rows)
        name: str,
        are_long: Sequence[bool] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of these positions, (sessions, rows, half of the numbers that turn);
        `are_long` says which sessions are of long texts, where any are. Most families say them in
        the dtype of `like`."""
        cos, sin = self._of_lengths(like, positions, name, are_long)
        once = self._once[name]
        return cos[..., once], sin[..., once]

    def _of_lengths(
        self, like: torch.Tensor, positions: torch.Tensor, name: str, are_long: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not any(are_long):
            return self._both(like, positions, name)
        cos, sin = (each[:, :-1] for each in self._both(like, beyond(positions, self.short), name))
        if all(are_long):
            return cos, sin
        chosen = torch.tensor(are_long, device=positions.device)[:, None, None]
        short = self._both(like, positions.clamp(max=self.short - 1), name)
        return torch.where(chosen, cos, short[0]), torch.where(chosen, sin, short[1])

    def _said_once(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> slice:
        """Which of what is said is not said before: one half of it, every other, or all."""
        cos, _ = self._both(like, positions, name)
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):
            return slice(half)
        if torch.equal(cos[..., ::2], cos[..., 1::2]):
            return slice(None, None, 2)
        return slice(None)

    def _both(
        self, like: torch.Tensor, positions: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._of(like, positions, *((name,) if name else ()))
        if isinstance(both, torch.Tensor):  # of complex numbers, as DeepSeek 2 has them
            return both.real, both.imag
        cos, sin = both
        return cos, sin


def beyond(positions: torch.Tensor, short: int) -> torch.Tensor:
    """(sessions, rows + 1) of (sessions, rows): the last is none that a short text has."""
    return nn.functional.pad(positions, (0, 1), value=short)


class ModuleRopes:
    """The rotary embeddings among the modules of a span, told of the session whose turn it is."""

    def __init__(self, module: nn.Module) -> None:
        types = rope_types(module.config)
        self._short = short_positions(module.config)
        self.are_apart = bool(self._short) or "dynamic" in types
        """Whether a forward may have rows of one session alone."""
        ropes: list[Any] = [part for part in module.modules() if hasattr(part, "original_inv_freq")]
        # These remember the longest sequence they saw, of whichever session.
        self._growing = ropes if "dynamic" in types else []
        self._is_long = False
        for rope in ropes if self._short else []:
            rope.register_forward_pre_hook(self._before, with_kwargs=True)
            rope.register_forward_hook(self._behind)

    @contextmanager
    def of(self, cache: Any) -> Iterator[None]:
        """For one forward of the session, or sessions, of `cache`."""
        for rope in self._growing:
            rope.inv_freq = rope.original_inv_freq
            rope.max_seq_len_cached = rope.original_max_seq_len
        self._is_long = bool(self._short) and not cache.short
        try:
            yield
        finally:
            self._is_long = False

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._is_long:
            return None
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": beyond(kwargs["position_ids"], self._short)}
        like, positions, *others = args
        return (like, beyond(positions, self._short), *others), kwargs

    def _behind(self, _: nn.Module, __: Any, both: Any) -> Any:
        return tuple(each[:, :-1] for each in both) if self._is_long else None
