"""Recursive `.source`: opening up the function that an operation calls, where it runs.

The job needs names, lines and text to offer the operations inside; the instrumented function itself
stays here.
"""

from __future__ import annotations

from typing import Any

from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import SourceNotAvailable, bind, instrument, make_op
from torch import nn


def drill(
    reporter: Interleaver, sourced: dict[str, Any], base: str, function: Any
) -> dict[str, Any]:
    """Instrument what the operation at `base` calls, once; what the job has to know about it."""
    if isinstance(function, nn.Module):
        return {"kind": "module"}
    if function is bind:
        return {"kind": "bind"}
    entry = sourced.get(base)
    if entry is None:
        try:
            entry = instrument(
                function,
                make_op(lambda: (reporter, base) if reporter.interleaving else (None, None)),
            )
        except SourceNotAvailable as error:
            return {"kind": "none", "why": str(error)[:500]}
        sourced[base] = entry
    compiled = entry[1]
    return {
        "kind": "function",
        "names": list(compiled.names),
        "lines": [[name, line] for name, line in compiled.lines.items()],
        "source": compiled.source,
    }
