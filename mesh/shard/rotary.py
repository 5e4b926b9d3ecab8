"""The rotary tables of a span, whichever way its family has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.selfcheck import rope_types

_PROBED = 16


class Rotary:
    """Those of one span, by their names: the empty one where all layers have the same."""

    def __init__(self, module: Any, names: Iterable[str]) -> None:
        """Raises NotCompilable where they depend on how long a session is."""
        if rope_types(module.config) & {"dynamic", "longrope"}:
            raise NotCompilable("its rotary embedding depends on how long a session is")
        named = "rotary_emb" if hasattr(module, "rotary_emb") else "pos_emb"
        self._of: Any = getattr(module, named, None)
        like = next(module.parameters())
        positions = torch.arange(_PROBED, device=like.device)[None]
        self._is_doubled = {name: self._says_twice(like, positions, name) for name in set(names)}

    def halves(
        self, like: torch.Tensor, positions: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of these (sessions, rows) `positions`, (sessions, rows, half of the
        numbers that turn). Most families say them in the dtype of `like`."""
        cos, sin = self._both(like, positions, name)
        if not self._is_doubled[name]:
            return cos, sin
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    def _says_twice(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> bool:
        cos, _ = self._both(like, positions, name)
        half = cos.shape[-1] // 2
        return torch.equal(cos[..., :half], cos[..., half:])

    def _both(
        self, like: torch.Tensor, positions: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._of(like, positions, *((name,) if name else ()))
        if isinstance(both, torch.Tensor):  # of complex numbers, as DeepSeek 2 has them
            return both.real, both.imag
        cos, sin = both
        return cos, sin
