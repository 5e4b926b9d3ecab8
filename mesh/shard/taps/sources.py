"""Recursive `.source`: opening up the function that an operation calls, where it runs.

The job needs names, lines and text to offer the operations inside; the instrumented function itself
stays here.
"""

from __future__ import annotations

from typing import Any

from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import SourceNotAvailable, bind, instrument, make_op
from torch import nn

from mesh.shard.taps.messages import TapSource


def drill(reporter: Interleaver, sourced: dict[str, Any], base: str, function: Any) -> TapSource:
    """Instrument what the operation at `base` calls, once; what the job has to know about it."""
    if isinstance(function, nn.Module):
        return TapSource("module")
    if function is bind:
        return TapSource("bind")
    entry = sourced.get(base)
    if entry is None:
        try:
            entry = instrument(
                function,
                make_op(lambda: (reporter, base) if reporter.interleaving else (None, None)),
            )
        except SourceNotAvailable as error:
            return TapSource("none", why=str(error)[:500])
        sourced[base] = entry
    compiled = entry[1]
    lines = list(compiled.lines.items())
    return TapSource("function", list(compiled.names), lines, compiled.source)
