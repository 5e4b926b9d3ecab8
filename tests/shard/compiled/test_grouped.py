"""Attention that reads a key once for all queries that share it, where that changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh.shard.compiled import lone_rows
from mesh.shard.compiled.parts import Attention
from tests.shard.compiled.spans import GROUPED, compiled

SHARED = Attention(
    (), torch.nn.Identity(), 14, 2, 64, 0.125, 0.0, None, "", None, None, norm_whole=False
)


@pytest.fixture
def _looked_at_anew() -> Iterator[None]:
    lone_rows._is_alike.cache_clear()
    yield
    lone_rows._is_alike.cache_clear()


@pytest.mark.parametrize("family", GROUPED)
def test_where_many_queries_share_a_key_kernels_say_so(family: str) -> None:
    assert compiled("int8", family).kernels.endswith("+int8+grouped")


def test_few_queries_to_a_key_and_windows_are_computed_as_ever() -> None:
    assert "grouped" not in compiled("int8", "llama").kernels
    assert lone_rows.is_grouped(SHARED)
    assert not lone_rows.is_grouped(replace(SHARED, kv_heads=7))
    assert not lone_rows.is_grouped(replace(SHARED, window=128))


@pytest.mark.usefixtures("_looked_at_anew")
def test_where_a_row_alone_has_other_bits_nothing_is_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it would be with kernels that add up a row alone in another order."""
    attended = lone_rows._attended

    def otherwise(session: Any, rows: torch.Tensor, at: int, kept: torch.Tensor) -> torch.Tensor:
        found = attended(session, rows, at, kept)
        if rows.shape[1] == 1:
            found[0, 0, 0] = torch.nextafter(found[0, 0, 0], torch.tensor(9.0))
        return found

    monkeypatch.setattr(lone_rows, "_attended", otherwise)
    assert not lone_rows.is_grouped(SHARED)
    assert "grouped" not in compiled("int8", GROUPED[0]).kernels
