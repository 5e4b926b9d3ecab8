"""The strongest few of a row."""

from __future__ import annotations

import pytest
import torch

from mesh.models.candidates import candidates_of, strongest_of


@pytest.mark.parametrize("vocab", [1, 5, 64, 300, 512, 5000, 32001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_strongest_and_of_equal_ones_the_lowest(
    vocab: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    even = torch.zeros(vocab)
    for row in (
        torch.randn(vocab, generator=generator).to(dtype),
        even,
        even.index_fill(0, torch.tensor(vocab // 2), 1.0),
    ):
        found = candidates_of(row)
        by_strength = torch.sort(row.float(), descending=True, stable=True)
        assert found.ids.tolist() == by_strength.indices[:64].tolist()
        assert found.logits.tolist() == by_strength.values[:64].tolist()
        assert found.log_total == pytest.approx(float(row.double().logsumexp(0)), abs=1e-6)
        assert found.vocab == vocab
        assert strongest_of(row) == int(row.argmax())
