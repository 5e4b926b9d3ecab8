"""One hop of one generation, seen from the asker: its session, its inputs, its answers.

A station counts two things apart: how many positions went in (`history.length`) and how many came
out and were handed on (`delivered`). A replacement starts with the old counts and an empty cache;
it is sent the history again, and what it answers is cut to what the next hop has not seen. Replay,
a repeated answer and an undisturbed step are then the same code path.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh.errors import (
    BadFrame,
    Busy,
    CacheFull,
    LinkLost,
    MeshError,
    PipelineStalled,
    SessionGone,
    from_dict,
)
from mesh.pipeline.claims import Claim
from mesh.pipeline.history import History, slice_rows
from mesh.pipeline.lines import Line
from mesh.pipeline.opening import Opening, Patience
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.timings import StepTimings
from mesh.types import HopTiming, RouteHop
from mesh.wire.messages import (
    Close,
    Failure,
    Loading,
    Message,
    Opened,
    Park,
    Result,
    Resume,
    Seal,
    Sealed,
    Step,
    WireTensor,
)

if TYPE_CHECKING:
    from mesh.pipeline.overseer import Overseer

logger = logging.getLogger(__name__)

_FLOATS = frozenset({"fp16", "bf16", "fp32"})

STEPS_UNDER_WAY = 6
"""Steps of one session a hop is sent before it answers the first; a shard refuses more than 8."""


@dataclass(frozen=True, slots=True)
class _Pending:
    position: int
    shape: tuple[int, ...]
    sent_at: float

    @property
    def rows(self) -> int:
        return self.shape[1]


class Station:
    """Sends steps to one hop and hands its answers on, in order.

    `on_output(station, tensor)` gets new rows only; `on_lost(station)` is called once when the hop
    has failed, with the reason in `error`.
    """

    def __init__(
        self,
        hop: RouteHop,
        line: Line,
        claim: Claim,
        terms: SessionTerms,
        on_output: Callable[[Station, WireTensor], None],
        on_lost: Callable[[Station], None],
        overseer: Overseer,
    ) -> None:
        self.hop = hop
        self.history = History()
        self.delivered = 0
        self.error: MeshError | None = None
        self._line = line
        self._claim = claim
        self.terms = terms
        self._on_output = on_output
        self._on_lost = on_lost
        self._overseer = overseer
        self._session = line.register(self)
        self._opening: Opening | None = None
        self._steps = 0
        self._parked = False
        self._resting = False
        self._woken_at: float | None = None
        self._active_at = 0.0
        self._pending: dict[int, _Pending] = {}
        self._backlog: deque[tuple[int, WireTensor]] = deque()
        self._answered_at = 0.0
        self._timings = StepTimings()

    # Life

    async def open(self, patience: Patience) -> None:
        """Ask for the session. Raises what the hop answers, LinkLost, PipelineStalled."""
        await self._ask(self.terms.opening(self._session, self.hop.layers), patience)

    def park(self) -> None:
        """Keep the cache, give the stream back until `resume`."""
        self._parked = True
        if not self._resting or self._woken_at is not None:  # one may be on its way back to us
            self._give_back()

    async def resume(self, patience: Patience) -> None:
        """Take a stream again, with the room that `terms` say.

        Raises what `open` does, and SessionGone when the hop was lost meanwhile, or still owes an
        answer: that could be one to what is about to be cut.
        """
        self._require_alive()
        if self._pending or self._backlog:
            raise SessionGone(
                f"{self.hop.shard.node_name} has not answered what came before.",
                fix="Open a new session and replay the inputs.",
            )
        # Whatever comes of the asking, the hop may hold a stream for this from here on.
        self._parked = self._resting = False
        self._claim.renew()
        await self._ask([Resume(self._session, self.terms.room(self.history.length))], patience)

    async def seal(self, timeout_s: float) -> list[dict[str, Any]]:
        """End the harvest; what the hop says of each file. Raises as `resume` does."""
        self._require_alive()
        answer = await self._ask([Seal(self._session)], Patience(timeout_s))
        return answer.files if isinstance(answer, Sealed) else []

    def close(self) -> None:
        """Free the session on the hop, if it can still be told."""
        self._claim.release()
        self._overseer.closed(self)
        self._line.unregister(self._session)
        self._owe_nothing()
        if self._opening is not None:
            self._opening.cancel()
        if not self._line.is_closed:
            self._line.send(Close(self._session))

    # Data

    def accept(self, tensor: WireTensor) -> None:
        """The next rows of input: remember them and send them on their way."""
        position = self.history.length
        self.history.append(tensor)
        if self.error is None:
            self._send(position, tensor)

    def replay(self, max_rows: int) -> None:
        """Send the whole history again, to a fresh session, in pieces of at most `max_rows`."""
        for position, tensor in self.history.chunks(max_rows):
            if self.error is not None:
                return
            self._send(position, tensor)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; the next step makes the hop do the same."""
        self.history.cut(position)
        self.delivered = min(self.delivered, position)
        self._overseer.cut(self, position)

    # What the rest of the pipeline asks

    @property
    def waiting_since(self) -> float | None:
        """The loop's time since which an answer is owed: when the oldest unanswered step was sent,
        or the last answer came if that was later. None when nothing is owed."""
        oldest = next(iter(self._pending.values()), None)
        return self._woken_at if oldest is None else max(oldest.sent_at, self._answered_at)

    @property
    def waiting_rows(self) -> int:
        """How many rows the oldest unanswered step has; 1 when none is."""
        oldest = next(iter(self._pending.values()), None)
        return 1 if oldest is None else oldest.rows

    @property
    def answers(self) -> int:
        """How many steps the hop has answered in this session."""
        return self._timings.count

    @property
    def is_draining(self) -> bool:
        """Whether the host is about to stop and the session should move."""
        return self._line.is_draining and self.error is None

    def timing(self) -> HopTiming:
        """Percentiles over the latest steps, in milliseconds."""
        return self._timings.of(self.hop)

    def take_latencies(self) -> list[float]:
        """Milliseconds of the steps since the last call."""
        return self._timings.take()

    def fail(self, error: MeshError) -> None:
        """Take the hop as lost from now on; reported once."""
        if self.error is not None:
            return
        self.error = error
        self._owe_nothing()
        self._claim.release()
        if self._opening is not None and not self._opening.is_settled:
            self._opening.fail(error)
        else:
            self._on_lost(self)

    # SessionReceiver

    def message(self, message: Message) -> None:
        """An answer of the hop."""
        if isinstance(message, Result):
            self._result(message)
        elif isinstance(message, Opened | Sealed):
            if self._opening is not None:
                self._opening.answer(message)
            elif self._woken_at is not None:
                self._awake()
        elif isinstance(message, Loading):
            if self._opening is not None:
                self._opening.loading()
        elif isinstance(message, Failure):
            self.fail(from_dict(message.error))

    def lost(self, error: MeshError) -> None:
        """The link is gone."""
        self.fail(error)

    def rest(self, before: float) -> None:
        """Give the stream back for a pause; the next step takes it again by itself."""
        is_busy = self._pending or self._opening is not None or self.error is not None
        is_idle = not is_busy and not self._resting and self._active_at <= before
        if is_idle and not self._line.is_closed:
            self._give_back()

    # Private

    def _require_alive(self) -> None:
        if self.error is not None:  # told to the overseer when it happened
            raise SessionGone(
                f"{self.hop.shard.node_name} lost the session while it rested: {self.error}",
                fix="Open a new one and replay the inputs.",
            ) from self.error

    def _owe_nothing(self) -> None:
        """No answer is waited for any more."""
        self._pending.clear()
        self._backlog.clear()
        self._claim.owes(0)
        self._woken_at = None

    async def _ask(self, question: Sequence[Message], patience: Patience) -> Opened | Sealed:
        try:
            return await self._ask_once(question, patience)
        except (Busy, CacheFull):
            if not await self._overseer.make_room(self.hop):
                raise
            self.error = None
            self._claim.renew()
            return await self._ask_once(question, patience)

    async def _ask_once(self, question: Sequence[Message], patience: Patience) -> Opened | Sealed:
        opening = self._opening = Opening(patience)
        try:
            self._line.ask(question)
            return await opening.wait()
        except TimeoutError:
            raise PipelineStalled(
                f"{self.hop.shard.node_name} did not open {self.hop.shard.shard_id} "
                f"within {opening.limit_s:g} s.",
                fix="Another shard is tried; see `hearthnet peers` for its state.",
            ) from None
        finally:
            self._opening = None
            self._active_at = asyncio.get_running_loop().time()

    def _give_back(self) -> None:
        self._resting, self._woken_at = True, None
        self._claim.release()
        self._overseer.closed(self)
        self._line.send(Park(self._session))

    def _wake(self) -> None:
        """Take a stream again; the steps that wait for it follow."""
        self._woken_at = asyncio.get_running_loop().time()
        self._claim.renew()
        try:
            self._line.ask([Resume(self._session, self.terms.room(self.history.length))])
        except LinkLost as error:
            self.fail(error)

    def _awake(self) -> None:
        self._resting, self._woken_at = False, None
        waiting, self._backlog = self._backlog, deque()
        for position, tensor in waiting:
            self._send(position, tensor)

    def _send(self, position: int, tensor: WireTensor) -> None:
        self._claim.owes(len(self._pending) + len(self._backlog) + 1)
        if self._resting or len(self._pending) >= STEPS_UNDER_WAY:
            self._backlog.append((position, tensor))
            # What an earlier hop answers after the end of a generation takes no stream for itself.
            if self._resting and not self._parked and self._woken_at is None:
                self._wake()
            return
        self._steps += 1
        now = self._active_at = asyncio.get_running_loop().time()
        self._pending[self._steps] = _Pending(position, tensor.shape, now)
        try:
            self._line.send(Step(self._session, self._steps, position, tensor))
        except LinkLost as error:
            self.fail(error)

    def _result(self, result: Result) -> None:
        pending = self._pending.pop(result.step, None)
        if pending is None or self.error is not None:
            return  # the answer to a step of before a cut, or of a hop already given up
        now = asyncio.get_running_loop().time()
        fault = self._fault(result.tensor, pending, now)
        if fault is not None:
            self.fail(fault)
            return
        self._answered_at = self._active_at = now
        self._claim.owes(len(self._pending) + len(self._backlog))
        if self._backlog:
            self._send(*self._backlog.popleft())
        self._timings.add((now - pending.sent_at) * 1e3, result.compute_us / 1e3)
        end = pending.position + pending.rows
        fresh = end - self.delivered
        if fresh <= 0:
            return
        if fresh > pending.rows:
            self.fail(BadFrame("answers arrived out of order.", fix="Another shard is tried."))
            return
        self.delivered = end
        self._on_output(self, slice_rows(result.tensor, pending.rows - fresh, pending.rows))

    def _fault(self, tensor: WireTensor, pending: _Pending, now: float) -> MeshError | None:
        """What is wrong with an answer; None when it may be handed on."""
        if not is_activations(tensor, pending.shape):
            return self._overseer.corrupted(
                self.hop,
                f"{tensor.dtype} of shape {tensor.shape} where {pending.shape} was expected",
            )
        elapsed_s = now - max(pending.sent_at, self._answered_at)
        return self._overseer.answered(self, pending.position, tensor, elapsed_s)


def is_activations(tensor: WireTensor, shape: tuple[int, ...]) -> bool:
    """Whether a hop's answer has the shape and one of the dtypes of hidden states."""
    return tensor.shape == shape and tensor.dtype in _FLOATS
