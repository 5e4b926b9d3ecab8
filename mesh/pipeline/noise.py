"""Noise on what an asker sends into the first layer, against hosts that read the prompt out of it.

What it costs and what it does not hide is in docs/explanation/privacy.md. Knows nothing of hops.
"""

from __future__ import annotations

import secrets

import torch


class RowNoise:
    """Gaussian noise with a standard deviation of `relative` times each row's root mean square.

    Drawn from a generator that nobody else can seed; 0 adds nothing and draws nothing.
    """

    def __init__(self, relative: float) -> None:
        self._relative = relative
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def add(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, rows, hidden) of any float dtype; the same shape and dtype."""
        if not self._relative:
            return hidden
        rows = hidden.float()
        scale = self._relative * rows.square().mean(dim=-1, keepdim=True).sqrt()
        drawn = torch.randn(rows.shape, generator=self._generator).to(rows.device)
        return (rows + scale * drawn).to(hidden.dtype)
