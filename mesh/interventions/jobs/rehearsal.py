"""A trace of no use, run over hops that do nothing, before there is a real one.

Done by the warmed parent: what is loaded, compiled or specialised at first use then is so for every
job. Done once more by a job's process that waits for its payload: the memory that a trace writes to
is then this process's own, which otherwise costs half as much as the trace itself. Leaves nothing
behind that a job could tell: the model is taken over anew afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend

from mesh.shard.taps.codec import EncodedKind
from mesh.shard.taps.messages import TapDone, TapSpan, read_request, to_bytes

if TYPE_CHECKING:
    from nnsight.modeling.transformers import TransformersModel
    from nnsight.tracing.tracer import Tracer

TIMES = 20
"""CPython specialises what ran a few times."""

ENOUGH_S = 1.0
"""Computing that the rehearsals of a parent may take. A pass through a large head takes
seconds, and gains nothing from being specialised."""


class NoLayers:
    """A channel to hops that give back what goes into their layers."""

    def call(self, hop: int, message: bytes) -> bytes:
        """See `mesh.interventions.channel.SpanChannel`."""
        request, _ = read_request(message)
        assert isinstance(request, TapSpan)  # noqa: S101 - a rehearsal asks for nothing else
        _, (hidden, _) = request.value
        known = [*hidden[:-1], None]
        value = [EncodedKind.TUPLE, [known, [EncodedKind.LIST, []], [EncodedKind.DICT, []]]]
        return to_bytes(TapDone(visits=(0, []), value=value), [])


class _Keeping(Backend):  # type: ignore[misc]
    """Has what a client would send, and runs nothing."""

    request = b""

    def __call__(self, tracer: Tracer) -> None:
        self.request = RequestModel.serialize(tracer, compress=True)


def written(model: TransformersModel) -> bytes:
    """A request of no use for this model, compressed."""
    kept = _Keeping()
    with model.trace("Nobody asked.", backend=kept):
        seen = model.output.save()  # noqa: F841 - what the answer holds
    return kept.request


def rehearsed(
    run: Callable[[], None],
    enough_s: float = ENOUGH_S,
    computed_s: Callable[[], float] = time.process_time,
) -> bool:
    """Call `run` `TIMES` times, or until that took `enough_s` of computing. Whether it was quick:
    False where each job that rehearses once more would lose more than it gains."""
    begun_s = computed_s()
    for _ in range(TIMES):
        run()
        if computed_s() - begun_s >= enough_s:
            return False
    return True
