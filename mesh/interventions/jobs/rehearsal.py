"""A job of no use, done by the warmed parent before any real one is forked from it.

What is loaded, compiled or specialised at first use then is so for every job, and the memory that
this writes to is written once. Leaves nothing behind that a job could tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import torch
from nnsight.intervention.serialization import CustomCloudUnpickler
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from nnsight.tracing.tracer import Tracer, _saves, dec, inc
from torch import nn

_TIMES = 20
"""CPython specialises what ran a few times."""


class _Piece(nn.Module):
    """Something to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(hidden))
        return result


class _Keeping(Backend):  # type: ignore[misc]
    """Has what a client would send, and runs nothing."""

    request = b""

    def __call__(self, tracer: Tracer) -> None:
        self.request = RequestModel.serialize(tracer, compress=True)


def rehearse(pack: Callable[[dict[str, Any]], bytes]) -> None:
    """Send, receive, run and `pack` a trace, as often as it takes to know it by heart."""
    model: Any = nnsight.NNsight(_Piece().requires_grad_(False))
    objects = {f"Module:{envoy.path}": envoy._module for envoy in model.modules()}
    objects["Interleaver"] = model.interleaver
    for _ in range(_TIMES):
        kept = _Keeping()
        with model.trace(torch.ones(1, 2, 4), backend=kept):
            nnsight.save([model.first.output.sum(), model.output])
        tracer = RequestModel.deserialize(kept.request, objects, True, CustomCloudUnpickler)
        inc()
        try:
            tracer.execute(tracer.info.code)
            pack({str(number): value for number, value in enumerate(_saves())})
        finally:
            dec()
