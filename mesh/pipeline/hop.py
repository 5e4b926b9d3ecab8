"""A session on one hop, from the asker's side: what it says, what it is owed, what it answers.

Does no I/O: what a session says goes out through its link, which queues it, and what the shard
answers comes in by `message`. `HopSession` is one for everybody who asks: spot checks use it as it
is, jobs with their own opening. `GenerationHop` remembers its inputs, so that it can be replayed on
another shard, and hands its answers on: chat, harvest and probes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from mesh.errors import (
    BadFrame,
    BadSteering,
    Busy,
    CacheFull,
    LinkLost,
    MeshError,
    NoRoute,
    PipelineStalled,
    SessionGone,
    from_peer,
)
from mesh.pipeline.claims import Claim
from mesh.pipeline.history import History, rows_of, slice_rows
from mesh.pipeline.links import HopLink
from mesh.pipeline.step_times import TimedSteps
from mesh.pipeline.terms import SessionTerms
from mesh.routing.cover import key_of
from mesh.types import LayerRange, RouteHop
from mesh.wire.messages import (
    Close,
    CopyPrefix,
    Failure,
    Loading,
    Message,
    Opened,
    Park,
    PrefixCopied,
    Result,
    Resume,
    RowAsk,
    Seal,
    Sealed,
    Step,
    WireTensor,
)

if TYPE_CHECKING:
    from mesh.pipeline.watch.oversight import Oversight  # which looks at hops

STEPS_UNDER_WAY = 6
"""Steps of one session a hop is sent before it answers the first; a shard refuses more than 8."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds a hop may take to answer what opens a session, and to load its weights when it says
    that it does."""

    answer_s: float = 10.0
    load_s: float = 300.0


class Terms(Protocol):
    """What a session is asked for."""

    def opening(self, session: int, layers: LayerRange) -> Sequence[Message]:
        """What asks a hop for session number `session` on `layers`."""

    def room(self, fed: int) -> int:
        """Positions to reserve for a session that was fed `fed` of them."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step that is unanswered; `waiter` gets the answer where somebody awaits it.

    Of its rows the first `kept` count: those behind were cut while it was on its way. `is_row` for
    what asks for all logits of one row, `is_behind` for what was sent while another was unanswered:
    it had to wait for that, and tells nothing of the way. `nbytes` of it went out.
    """

    position: int
    shape: tuple[int, ...]
    sent_at: float
    waiter: asyncio.Future[WireTensor] | None
    kept: int
    is_row: bool = False
    is_behind: bool = False
    nbytes: int = 0

    @property
    def rows(self) -> int:
        return self.shape[1]


class HopSession:
    """One session on one hop. Implements `mesh.pipeline.links.SessionReceiver`.

    It sends no more than `STEPS_UNDER_WAY` steps before an answer, and none before it has a stream
    that it gave back again. `error` is why it is of no use any more, None while it is; `on_lost` is
    called once when it fails by itself, not when what opens it is refused. `times` has what its
    answered steps took.
    """

    def __init__(
        self, hop: RouteHop, link: HopLink, claim: Claim, terms: Terms, patience: Patience
    ) -> None:
        self.hop = hop
        self.error: MeshError | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.times = TimedSteps()
        self._terms = terms
        self._link = link
        self._claim = claim
        self._patience = patience
        self._number = link.register(self)
        self._opening: asyncio.Future[Opened | PrefixCopied | Sealed] | None = None
        self._deadline: asyncio.Timeout | None = None
        self._limit_s = 0.0
        self._fed = 0
        self._steps = 0
        self._parked = False
        self._resting = False
        self._woken_at: float | None = None
        self._active_at = 0.0
        self._sent: dict[int, _Sent] = {}
        self._backlog: deque[tuple[int, WireTensor, asyncio.Future[WireTensor] | None]] = deque()

    # Life

    async def open(self) -> None:
        """Ask for the session. Raises what the hop answers, LinkLost, PipelineStalled."""
        await self._ask(self._terms.opening(self._number, self.hop.layers))

    def park(self) -> None:
        """Keep the cache, give the stream back until `resume`. Raises LinkLost."""
        self._parked = True
        if not self._resting or self._woken_at is not None:  # one may be on its way back to us
            self._give_back()

    async def resume(self) -> None:
        """Take a stream again, with the room that the terms say.

        Raises what `open` does, and SessionGone when the hop was lost meanwhile, or still owes an
        answer: that could be one to what is about to be cut.
        """
        self._require_alive()
        if self._sent or self._backlog:
            raise SessionGone(
                f"{self.hop.shard.node_name} has not answered what came before.",
                fix="Open a new session and replay the inputs.",
            )
        # Whatever comes of the asking, the hop may hold a stream for this from here on.
        self._parked = self._resting = False
        self._claim.renew()
        await self._ask([Resume(self._number, self._terms.room(self.length))])

    def can_begin_as(self, other: HopSession) -> bool:
        """Whether the hop may copy what `other` holds there: same shard, layers and link."""
        mine, theirs = self.hop, other.hop
        same = key_of(mine.shard) == key_of(theirs.shard) and mine.layers == theirs.layers
        is_there = self._link is other._link and self._link.copies_prefixes
        return same and is_there and other.error is None

    async def begin_as(self, other: HopSession, positions: int) -> int:
        """Have the hop begin with the first `positions` of `other`; how many of them it holds.

        To be asked right after `open`. Raises as `resume` does.
        """
        answer = await self._ask([CopyPrefix(self._number, other._number, positions)])
        return min(answer.positions, positions) if isinstance(answer, PrefixCopied) else 0

    async def seal(self, timeout_s: float) -> list[dict[str, Any]]:
        """End the harvest; what the hop says of each file. Raises as `resume` does."""
        self._require_alive()
        answer = await self._ask([Seal(self._number)], timeout_s)
        return answer.files if isinstance(answer, Sealed) else []

    def close(self) -> None:
        """Free the session on the hop, if it can still be told."""
        self._claim.release()
        self._released()
        self._link.unregister(self._number)
        for waiter in self._owe_nothing():
            waiter.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if not self._link.is_closed:
            try:
                self._link.send(Close(self._number))
            except MeshError as error:  # the hop frees it with the link
                self._link.close(f"nothing more can be sent: {error.message}")

    # Data

    @property
    def length(self) -> int:
        """Positions that are in the hop's cache, or on their way there."""
        return self._fed

    def step(self, position: int, tensor: WireTensor) -> None:
        """Send rows (1, rows, hidden) from `position` on; the hop forgets what it had from there.

        A link that is lost shows in `error`.
        """
        self._send(position, tensor, None)

    async def exchange(self, position: int, tensor: WireTensor) -> WireTensor:
        """`step`, and what the hop answers. Raises its error, and LinkLost."""
        if self.error is not None:
            raise self.error
        answer: asyncio.Future[WireTensor] = asyncio.get_running_loop().create_future()
        self._send(position, tensor, answer)
        return await answer

    async def row(self, position: int, vocab: int) -> WireTensor:
        """All logits, fp32 (1, 1, vocab), of a row that the last answer has candidates of.

        Raises the hop's error, and LinkLost.
        """
        if self.error is not None:
            raise self.error
        self._steps += 1
        now = self._active_at = asyncio.get_running_loop().time()
        answer: asyncio.Future[WireTensor] = asyncio.get_running_loop().create_future()
        sent = _Sent(position, (1, 1, vocab), now, answer, kept=1, is_row=True)
        self._sent[self._steps] = sent
        self._say(RowAsk(self._number, self._steps, position))
        return await answer

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; the next step makes the hop do the same."""
        self._fed = min(self._fed, position)

    # What others ask

    @property
    def waiting_since(self) -> float | None:
        """The loop's time since which an answer is owed: when the oldest unanswered step was sent,
        or the last answer came if that was later. None when nothing is owed."""
        oldest = next(iter(self._sent.values()), None)
        return self._woken_at if oldest is None else max(oldest.sent_at, self.times.last_at)

    @property
    def waiting_rows(self) -> int:
        """How many rows the oldest unanswered step has; 1 when none is."""
        oldest = next(iter(self._sent.values()), None)
        return 1 if oldest is None else oldest.rows

    @property
    def is_draining(self) -> bool:
        """Whether the host is about to stop and the session should move."""
        return self._link.is_draining and self.error is None

    def fail(self, error: MeshError) -> None:
        """Take the hop as lost from now on; reported once."""
        if self.error is not None:
            return
        self.error = error
        waiters = self._owe_nothing()
        self._claim.release()
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(error)
        else:
            self._failed(error)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # SessionReceiver

    def message(self, message: Message) -> None:
        """An answer of the hop."""
        if isinstance(message, Result):
            self._result(message)
        elif isinstance(message, Opened | PrefixCopied | Sealed):
            if self._opening is not None:
                if not self._opening.done():
                    self._opening.set_result(message)
            elif self._woken_at is not None:
                self._awake()
        elif isinstance(message, Loading):
            self._loading()
        elif isinstance(message, Failure) and message.step in (None, *self._sent):
            # That of a step behind a refused one, which is not waited for any more, says nothing.
            self.fail(from_peer(message.error))

    def lost(self, error: MeshError) -> None:
        """The link is gone."""
        self.fail(error)

    def rest(self, before: float) -> None:
        """Give the stream back for a pause; the next step takes it again by itself."""
        is_busy = self._sent or self._opening is not None or self.error is not None
        is_idle = not is_busy and not self._resting and self._active_at <= before
        if is_idle and not self._link.is_closed:
            self._give_back()

    # What a kind of session adds

    def _read(
        self, sent: _Sent, tensor: WireTensor, elapsed_s: float
    ) -> tuple[WireTensor, MeshError | None]:
        """An answer that took so long as it is to be used; what is wrong with it, if anything."""
        return tensor, None

    def _take(self, sent: _Sent, tensor: WireTensor) -> None:
        """An answer that nobody awaits."""

    def _failed(self, error: MeshError) -> None:
        """The hop is lost."""
        self.on_lost()

    def _released(self) -> None:
        """The session has given its stream back, for now or for ever."""

    # Asking

    def _require_alive(self) -> None:
        if self.error is not None:  # told to the observer when it happened
            raise SessionGone(
                f"{self.hop.shard.node_name} lost the session while it rested: {self.error}",
                fix="Open a new one and replay the inputs.",
            ) from self.error

    async def _ask(
        self, question: Sequence[Message], limit_s: float | None = None
    ) -> Opened | PrefixCopied | Sealed:
        """The answer to what opens, resumes or seals; once more time where the hop loads."""
        self._limit_s = self._patience.answer_s if limit_s is None else limit_s
        self._opening = asyncio.get_running_loop().create_future()
        try:
            self._link.ask(question)
            async with asyncio.timeout(self._limit_s) as self._deadline:
                return await self._opening
        except TimeoutError:
            raise PipelineStalled(
                f"{self.hop.shard.node_name} did not open {self.hop.shard.shard_id} "
                f"within {self._limit_s:g} s.",
                fix="Another shard is tried; see `hearthnet peers` for its state.",
            ) from None
        finally:
            self._opening = self._deadline = None
            self._active_at = asyncio.get_running_loop().time()

    def _loading(self) -> None:
        """The hop reads its weights: give it time for that, once."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None and not deadline.expired():
            self._limit_s = self._patience.load_s
            deadline.reschedule(asyncio.get_running_loop().time() + self._limit_s)

    def _give_back(self) -> None:
        self._resting, self._woken_at = True, None
        self._claim.release()
        self._released()
        try:
            self._link.send(Park(self._number))
        except LinkLost:
            raise
        except MeshError as error:
            self.fail(_takes_no_more(self.hop, error))

    def _wake(self) -> None:
        """Take a stream again; the steps that wait for it follow."""
        self._woken_at = asyncio.get_running_loop().time()
        self._claim.renew()
        try:
            self._link.ask([Resume(self._number, self._terms.room(self.length))])
        except LinkLost as error:
            self.fail(error)
        except MeshError as error:
            self.fail(_takes_no_more(self.hop, error))

    def _awake(self) -> None:
        self._resting, self._woken_at = False, None
        waiting, self._backlog = self._backlog, deque()
        for step in waiting:
            self._send(*step)

    # Steps

    def _send(
        self, position: int, tensor: WireTensor, waiter: asyncio.Future[WireTensor] | None
    ) -> None:
        if self.error is not None:  # it was lost while others of its steps went out
            if waiter is not None and not waiter.done():
                waiter.set_exception(self.error)
            return
        self._claim.owes(len(self._sent) + len(self._backlog) + 1)
        if self._resting or len(self._sent) >= STEPS_UNDER_WAY:
            self._backlog.append((position, tensor, waiter))
            # What an earlier hop answers after the end of a generation takes no stream for itself.
            if self._resting and not self._parked and self._woken_at is None:
                self._wake()
            return
        self._steps += 1
        now = self._active_at = asyncio.get_running_loop().time()
        sent = _Sent(
            position, tensor.shape, now, waiter, rows_of(tensor),
            is_behind=bool(self._sent), nbytes=len(tensor.data),
        )  # fmt: skip
        self._sent[self._steps] = sent
        self._fed = position + sent.rows
        self._say(Step(self._number, self._steps, position, tensor))

    def _say(self, message: Message) -> None:
        """Send it, or take the hop as lost."""
        try:
            self._link.send(message)
        except LinkLost as error:
            self.fail(error)
        except MeshError as error:  # its account is full: what is at fault is that hop, no other
            self.fail(_takes_no_more(self.hop, error))

    def _result(self, result: Result) -> None:
        sent = self._sent.pop(result.step, None)
        if sent is None or self.error is not None:
            return  # the answer to a step of before a cut, or of a hop already given up
        now = asyncio.get_running_loop().time()
        elapsed_s = now - max(sent.sent_at, self.times.last_at)
        tensor, fault = self._read(sent, result.tensor, elapsed_s)
        if fault is not None:
            self.fail(fault)
            if sent.waiter is not None and not sent.waiter.done():
                sent.waiter.set_exception(fault)
            return
        self._active_at = now
        self.times.answered(result, sent.sent_at, now, nbytes=sent.nbytes, is_behind=sent.is_behind)
        self._claim.owes(len(self._sent) + len(self._backlog))
        if self._backlog:
            self._send(*self._backlog.popleft())
        if sent.waiter is None:
            self._take(sent, tensor)
        elif not sent.waiter.done():
            sent.waiter.set_result(tensor)

    def _owe_nothing(self) -> list[asyncio.Future[WireTensor]]:
        """Expect no answer any more; who awaits one."""
        waiters = [sent.waiter for sent in self._sent.values()]
        waiters += [waiter for _, _, waiter in self._backlog]
        self._sent.clear()
        self._backlog.clear()
        self._claim.owes(0)
        self._woken_at = None
        return [waiter for waiter in waiters if waiter is not None]


def _takes_no_more(hop: RouteHop, error: MeshError) -> LinkLost:
    return LinkLost(
        f"{hop.shard.node_name} takes nothing more: {error.message}", fix="Use another hop."
    )


class GenerationHop(HopSession):
    """One hop of one generation: a session, its inputs, and what of its answers was handed on.

    Three things are counted apart: how many positions went in (`history.length`), how many came
    out and were handed on (`delivered`), and how many this very session has answered. A replacement
    starts with the first two and an empty cache; it is sent the history again, and what it answers
    is cut to what the next hop has not seen. Replay, a repeated answer and an undisturbed step are
    then the same code path.
    `on_output(hop, tensor)` gets new rows only.
    """

    def __init__(
        self,
        hop: RouteHop,
        link: HopLink,
        claim: Claim,
        terms: SessionTerms,
        patience: Patience,
        observer: Oversight,
    ) -> None:
        super().__init__(hop, link, claim, terms, patience)
        self.history = History()
        self.delivered = 0
        self.on_output: Callable[[GenerationHop, WireTensor], None] = lambda hop, tensor: None
        self.terms = terms
        self._observer = observer
        self._answered = 0
        self._latest: tuple[int, WireTensor] | None = None

    @property
    def length(self) -> int:
        """See `HopSession.length`: the inputs that are kept, whatever of them was replayed."""
        return self.history.length

    async def open(self) -> None:
        """As any session. Raises NoRoute where the shard's version knows not what is asked."""
        if not self.terms.is_served_by(self.hop.shard, self.hop.layers):
            model = self.terms.model_id
            raise NoRoute(
                f"The hearthnet of {self.hop.shard.node_name} does not run for others what of"
                f" {model} this is for.",
                fix=f"Update it, or have the ends here: `hearthnet pull {model} --layers none`.",
            )
        await super().open()

    async def resume_with(self, terms: SessionTerms) -> None:
        """`resume` on other terms."""
        self.terms = self._terms = terms
        await self.resume()

    def has_begun_as(self, other: GenerationHop, positions: int) -> None:
        """The hop holds the first `positions` of `other`, and all behind it know them as well."""
        self.history = other.history.copy()
        self.history.cut(positions)
        self.delivered = self._fed = self._answered = positions

    def accept(self, tensor: WireTensor) -> None:
        """The next rows of input: remember them and send them on their way."""
        position = self.history.length
        self.history.append(tensor)
        if self.error is None:
            self.step(position, tensor)

    def replay(self, max_rows: int, *, joined: int | None = None) -> None:
        """Send the whole history again, to a fresh session, in pieces as `History.chunks` has
        them."""
        for position, tensor in self.history.chunks(max_rows, joined=joined):
            if self.error is not None:
                return
            self.step(position, tensor)

    def go_on(self, max_rows: int) -> bool:
        """Where it refused a step, which leaves its session as it was: send what it has not
        answered once more, as it came. Whether that can be."""
        if self._resting or self._link.is_closed:
            return False
        self.error = None
        self._claim.renew()
        first = min(self.delivered, self._answered)  # of a replay less may be there than was seen
        for position, tensor in self.history.chunks(max_rows, first, joined=1):
            self.step(position, tensor)
        return True

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, also for whoever observes the hop."""
        self._observer.cut(self, position)
        self.history.cut(position)
        self.delivered = min(self.delivered, position)
        for step, sent in self._sent.items():  # of a replay that nobody had to wait for
            kept = max(0, min(sent.kept, position - sent.position))
            self._sent[step] = replace(sent, kept=kept)
        self._backlog = deque(
            (start, slice_rows(tensor, 0, min(rows_of(tensor), position - start)), waiter)
            for start, tensor, waiter in self._backlog
            if start < position
        )

    def fail(self, error: MeshError) -> None:
        """See `HopSession`."""
        if isinstance(error, BadSteering) and not self.terms.edits:  # else the request's own fault
            error = self._observer.corrupted(self.hop, "a refusal of edits that nobody sent")
        super().fail(error)

    async def _ask(
        self, question: Sequence[Message], limit_s: float | None = None
    ) -> Opened | PrefixCopied | Sealed:
        try:
            return await super()._ask(question, limit_s)
        except (Busy, CacheFull):
            if not await self._observer.make_room(self.hop):
                raise
            self.error = None
            self._claim.renew()
            return await super()._ask(question, limit_s)

    def _read(
        self, sent: _Sent, tensor: WireTensor, elapsed_s: float
    ) -> tuple[WireTensor, MeshError | None]:
        layers = self.hop.layers
        if sent.is_row:
            fits = tensor.shape == sent.shape and tensor.dtype == "fp32"
        else:
            fits = self.terms.fits(layers, sent.position, sent.shape, tensor)
        if not fits or tensor.gradient:  # the next hop would refuse a gradient, and be blamed
            what = "a gradient, " if tensor.gradient else ""
            return tensor, self._observer.corrupted(
                self.hop,
                f"{what}{tensor.dtype} of shape {tensor.shape} to an input of {sent.shape}",
            )
        if sent.is_row:
            return tensor, self._observer.gave_row(self.hop, self._said(sent.position), tensor)
        tensor = self.terms.aligned(layers, sent.rows, tensor)
        self._answered = sent.position + sent.rows
        self._latest = sent.position, tensor
        return tensor, self._observer.answered(self, sent.position, tensor, sent.kept, elapsed_s)

    def _said(self, position: int) -> WireTensor:
        """What was last answered of one row."""
        assert self._latest is not None  # noqa: S101 - a row is asked for behind an answer only
        first, tensor = self._latest
        return slice_rows(tensor, position - first, position - first + 1)

    def _take(self, sent: _Sent, tensor: WireTensor) -> None:
        end = sent.position + sent.kept
        fresh = end - self.delivered
        if fresh <= 0 or not sent.kept:
            return
        if fresh > sent.kept:
            self.fail(BadFrame("answers arrived out of order.", fix="Another shard is tried."))
            return
        self.delivered = end
        self.on_output(self, slice_rows(tensor, sent.kept - fresh, sent.kept))

    def _failed(self, error: MeshError) -> None:
        self._observer.failed(self.hop, error)
        self.on_lost()

    def _released(self) -> None:
        self._observer.closed(self)
