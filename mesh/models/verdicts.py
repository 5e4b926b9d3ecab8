"""What was found out about a kind of model once, by a trial that takes seconds, and is kept.

Knows neither what is tried nor what follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mesh.models.hashing import read_cached, write_json_atomically


@dataclass(frozen=True, slots=True)
class _Verdict:
    """As it is written down; an empty `reason` means that nothing is against it."""

    key: str
    reason: str


def settled_once(
    settled: dict[str, str], key: str, file: Path | None, decide: Callable[[], str]
) -> str:
    """What is against the thing of that key, as `settled` or `file` have it from before.

    Otherwise what `decide` says, which is kept in both. Raises what `decide` does, and keeps
    nothing then.
    """
    if key not in settled:
        known = read_cached(file, _Verdict) if file else None
        settled[key] = known.reason if known else decide()
        if file and not known:
            write_json_atomically(file, {"key": key, "reason": settled[key]})
    return settled[key]


def hash_of(code: Iterable[Path]) -> str:
    """For a key: changes with these files, so that no verdict outlives what it was given for."""
    digest = hashlib.sha256()
    for file in code:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
