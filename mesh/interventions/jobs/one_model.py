"""Refuses requests about more models than the one that a job has.

nnsight names the parts of a model by their places in it alone, so another model whose parts are
called the same, as a fine-tuned one's are, would be taken for the job's own and give its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight.intervention.envoy import Envoy

from mesh.errors import BadRequest

_fill = Envoy.__setstate__


@contextmanager
def one_model() -> Iterator[None]:
    """Around the reading of a request. Raises BadRequest at its end, for a second model in it."""
    models: set[str] = set()

    def noting(envoy: Envoy, state: dict[str, Any]) -> None:
        _fill(envoy, state)
        if "." not in envoy.path:
            models.add(str(state.get("repo_id") or f"{type(envoy).__name__}(...)"))

    Envoy.__setstate__ = noting
    try:
        yield
    finally:
        Envoy.__setstate__ = _fill
    if len(models) > 1:
        raise BadRequest(
            f"The trace is about several models, {' and '.join(sorted(models))}; a job has one.",
            fix="Trace each in a job of its own, and name what one saved in the other's trace.",
        )
