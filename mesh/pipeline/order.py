"""What a harvest's batch is asked for with: plain data, so that the daemon needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class HarvestOrder:
    """One batch as it is asked for; `texts` are cut to `max_tokens` tokens each."""

    run: str
    batch: int
    layer_prefix: str
    pattern: str
    texts: tuple[str, ...]
    max_tokens: int

    def to_fields(self) -> dict[str, Any]:
        """For `from_fields`."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_fields`."""
        return cls(**{**fields, "texts": tuple(fields["texts"])})
