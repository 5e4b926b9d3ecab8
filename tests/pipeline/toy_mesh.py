"""A mesh in one process: real pipeline, real wire protocol, toy layers with exact arithmetic.

A toy layer's output at a position depends on every input before it, in whole numbers below 97: a
position that is lost, repeated or out of order changes every token after it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import torch

from mesh.clock import SystemClock
from mesh.errors import (
    Busy,
    CacheFull,
    ConnectFailed,
    ContextTooLong,
    MeshError,
    SessionGone,
)
from mesh.models.constraint import Constraint
from mesh.models.grammar import is_bound
from mesh.models.pooling import NO_POOLING, Pooling
from mesh.pipeline.failover import FailoverSettings
from mesh.pipeline.generation import Asked, LoopSettings, PipelineOrchestrator, Prepared
from mesh.pipeline.hop import Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.model import AskerModel, Drafting
from mesh.pipeline.room_line import RoomLine
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import Candidate, CoverRules
from mesh.routing.router import ShardRouter
from mesh.types import (
    THIS_NODE,
    Endpoint,
    GenerationRequest,
    LayerRange,
    ModelId,
    NodeId,
    Principal,
    RouteHop,
    SamplingParams,
    ShardDescriptor,
    WireDtype,
    shard_id,
)
from mesh.wire.abilities import says_copies
from mesh.wire.link import Link, LinkHandler
from mesh.wire.messages import (
    Close,
    CopyPrefix,
    Drain,
    Failure,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    Park,
    PrefixCopied,
    Result,
    Resume,
    Seal,
    Sealed,
    Step,
    WireTensor,
)
from tests.waiting import until
from tests.wire.memory import MemoryLink, link_pair

MODEL = ModelId("toy")
WEIGHTS = "f" * 64
HIDDEN = 4
PRIME = 97
TOTAL_LAYERS = 8


def toy_layer(layer: int, row: Sequence[int], past: Sequence[int]) -> list[int]:
    """One position through one layer; `past` sums the layer's earlier inputs. Non-linear enough."""
    return [
        (value * (layer + 2) + 3 * seen + index + value * seen) % PRIME
        for index, (value, seen) in enumerate(zip(row, past, strict=True))
    ]


class ToySession:
    """The cache of one session: the sums of every layer's inputs, per position."""

    def __init__(self, layers: LayerRange) -> None:
        self.layers = layers
        self.sums: list[list[list[int]]] = []  # position, layer, value
        self.parked = False
        self.last: Result | None = None

    def begin_as(self, other: ToySession, positions: int) -> int:
        self.sums = other.sums[:positions]
        return len(self.sums)

    def run(self, position: int, rows: list[list[int]]) -> list[list[int]]:
        assert position <= len(self.sums), "a hole in the positions"
        del self.sums[position:]
        outputs = []
        for row in rows:
            before = self.sums[-1] if self.sums else [[0] * HIDDEN] * len(self.layers)
            sums, value = [], row
            for layer, past in zip(range(self.layers.start, self.layers.stop), before, strict=True):
                sums.append([a + b for a, b in zip(past, value, strict=True)])
                value = toy_layer(layer, value, past)
            self.sums.append(sums)
            outputs.append(value)
        return outputs


class ToyShard:
    """A shard host that answers at once, or `delay_s` later; one step after the other where it
    `computes_in_turn`. `before_step` may raise or return False to stay silent.

    `answer` turns what was computed into what is sent, `reply` sends it, now or later. A session is
    open `opens_after_s` seconds after it was asked for; `is_loading` says meanwhile that it loads;
    one of more than `kv_tokens` is refused.
    """

    def __init__(self, network: ToyNetwork, descriptor: ShardDescriptor) -> None:
        self.descriptor = descriptor
        self.network = network
        self.sessions: dict[tuple[int, int], ToySession] = {}
        self.steps: list[tuple[int, int]] = []  # (position, rows) of every step that was run
        self.alive = True
        self.before_step: Callable[[Step], bool] = lambda step: True
        self.before_seal: Callable[[], None] = lambda: None
        self.refuses_opens_with: MeshError | None = None
        self.refuses_steps_with: MeshError | None = None
        self.delay_s = 0.0
        self.computes_in_turn = False
        self.free_at = 0.0
        self.under_way = 0
        self.most_under_way = 0
        self.answer: Callable[[Step, WireTensor], WireTensor] = lambda step, computed: computed
        self.reply: Callable[[MemoryLink, Result], None] = lambda link, result: link.send(result)
        self.opens_after_s = 0.0
        self.is_loading = False
        self.kv_tokens = 1 << 20
        self.room: int | None = None
        """A step that ends behind this position is refused."""
        self.new_session: Callable[[LayerRange], ToySession] = ToySession
        self.reserved: list[int] = []
        """The positions that each session was opened or resumed with."""
        self.copies_after_s = 0.0
        self.copied: list[int] = []
        """The positions that sessions began with, as others did."""
        self.is_advertised = True
        self.links: list[MemoryLink] = []
        self.far_ends: list[MemoryLink] = []

    def open_streams(self) -> int:
        return sum(not session.parked for session in self.sessions.values())

    def drain(self) -> None:
        """Ask every asker to move its sessions elsewhere."""
        for link in self.far_ends:
            link.send(Drain("maintenance"))

    def kill(self) -> None:
        """Gone with everything it held, links cut under way."""
        self.alive = False
        links, self.links, self.far_ends = self.links, [], []
        self.sessions.clear()
        for link in links:
            link.cut()


class ToyDoor:
    """One link into a toy shard."""

    def __init__(self, shard: ToyShard, link: MemoryLink, number: int) -> None:
        self._shard = shard
        self._link = link
        self._number = number

    def message(self, message: Message) -> None:
        sessions, key = self._shard.sessions, (self._number, getattr(message, "session", 0))
        if isinstance(message, Open):
            refusal = self._refusal(message)
            if refusal is not None:
                self._fail(key[1], refusal)
                return
            sessions[key] = self._shard.new_session(LayerRange(message.start, message.stop))
            self._open(message)
        elif isinstance(message, Resume):
            if key not in sessions:
                self._fail(key[1], SessionGone("gone.", fix="Replay."))
                return
            sessions[key].parked = False
            self._open(message)
        elif isinstance(message, Park):
            sessions[key].parked = True
        elif isinstance(message, Close):
            sessions.pop(key, None)
        elif isinstance(message, CopyPrefix):
            self._copy(sessions[key], message)
        elif isinstance(message, Step):
            self._step(sessions[key], message)
        else:
            self._ask(sessions, key, message)

    def _refusal(self, request: Open) -> MeshError | None:
        if self._shard.open_streams() >= self._shard.descriptor.max_concurrent_streams:
            return Busy("full.", fix="Elsewhere.")
        if request.max_tokens > self._shard.kv_tokens:
            here = f"{request.max_tokens} of {self._shard.kv_tokens}."
            return ContextTooLong(here, fix="Ask for less.")
        return self._shard.refuses_opens_with

    def _ask(
        self, sessions: dict[tuple[int, int], ToySession], key: tuple[int, int], message: Message
    ) -> None:
        if isinstance(message, CopyPrefix):
            self._copy(sessions[key], message)
        elif isinstance(message, Seal):
            self._shard.before_seal()
            said = {"file": self._shard.descriptor.shard_id, "node": "another's"}
            self._link.send(Sealed(key[1], [said]))

    def _copy(self, session: ToySession, request: CopyPrefix) -> None:
        source = self._shard.sessions.get((self._number, request.source))
        held = 0 if source is None else session.begin_as(source, request.positions)
        self._shard.copied.append(held)
        done = PrefixCopied(request.session, held)
        asyncio.get_running_loop().call_later(self._shard.copies_after_s, self._say, done)

    def closed(self, error: Exception | None) -> None:
        for key in [key for key in self._shard.sessions if key[0] == self._number]:
            del self._shard.sessions[key]

    def _open(self, request: Open | Resume) -> None:
        self._shard.reserved.append(request.max_tokens)
        opened = Opened(request.session, request.max_tokens)
        if self._shard.is_loading:
            self._link.send(Loading(request.session))
        if self._shard.opens_after_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._shard.opens_after_s, self._say, opened)
        else:
            self._link.send(opened)

    def _say(self, message: Message) -> None:
        if not self._link.is_closed:
            self._link.send(message)

    def _step(self, session: ToySession, step: Step) -> None:
        shard = self._shard
        if shard.refuses_steps_with is not None:
            self._fail(step.session, shard.refuses_steps_with)
            return
        if shard.room is not None and step.position + step.tensor.shape[1] > shard.room:
            self._fail(step.session, CacheFull("others have it all.", fix="Elsewhere."))
            return
        shard.under_way += 1
        shard.most_under_way = max(shard.most_under_way, shard.under_way)
        if shard.delay_s:
            loop = asyncio.get_running_loop()
            begins = max(loop.time(), shard.free_at) if shard.computes_in_turn else loop.time()
            shard.free_at = begins + shard.delay_s
            loop.call_at(shard.free_at, self._run, session, step)
        else:
            self._run(session, step)

    def _run(self, session: ToySession, step: Step) -> None:
        self._shard.under_way -= 1
        if not self._shard.before_step(step) or not self._shard.alive:
            return
        rows = decode(step.tensor)
        self._shard.steps.append((step.position, len(rows)))
        out = self._shard.answer(step, encode(session.run(step.position, rows)))
        result = Result(step.session, step.step, out, compute_us=1, queue_us=0)
        self._shard.reply(self._link, result)

    def _fail(self, session: int, error: MeshError) -> None:
        self._link.send(Failure(error.to_dict(), session=session))


class ToyNetwork:
    """Nodes by port; also the router's store."""

    def __init__(self) -> None:
        self.shards: dict[int, ToyShard] = {}
        self._links = 0

    def add(
        self, layers: str, *, streams: int = 8, name: str = "", weights: str = WEIGHTS
    ) -> ToyShard:
        span, port = LayerRange.parse(layers), 1000 + len(self.shards)
        node = name or f"node-{port}"
        descriptor = ShardDescriptor(
            shard_id(MODEL, span), MODEL, weights, span, TOTAL_LAYERS, 1, streams, NodeId(node),
            node, Endpoint(f"wss://toy:{port}"), "fp32", "toy", datetime.now(UTC),
        )  # fmt: skip
        self.shards[port] = ToyShard(self, descriptor)
        return self.shards[port]

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        listed = [shard for shard in self.shards.values() if shard.is_advertised]
        return [Candidate(shard.descriptor, 0) for shard in listed]

    def home(self) -> ToyShard:
        """The whole model at the asker's; advertised to nobody."""
        home = self.add(f"0-{TOTAL_LAYERS - 1}", name="home")
        home.is_advertised = False
        return home

    async def until_free(self) -> None:
        """Until no session is left at any shard; what was said last takes turns of the loop."""
        await until(lambda: not any(shard.sessions for shard in self.shards.values()))

    async def dial(self, host: str, port: int, handler: LinkHandler) -> Link:
        shard = self.shards[port]
        if not shard.alive:
            raise ConnectFailed(f"{host}:{port} is gone.", fix="Elsewhere.")
        ours, theirs = link_pair(
            Hello("asker", "asker", "tensors", "toy"),
            says_copies(Hello("hop", "hop", "tensors", "toy")),
        )
        self._links += 1
        ours.attach(handler)
        theirs.attach(ToyDoor(shard, theirs, self._links))
        shard.links.append(ours)
        shard.far_ends.append(theirs)
        return ours


class ToyEnds:
    """Token ids become rows, rows become one-hot logits; both depend on the position."""

    vocab = PRIME

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        rows = [
            [(token * (i + 1) + position + offset) % PRIME for i in range(HIDDEN)]
            for offset, token in enumerate(ids[0].tolist())
        ]
        return torch.tensor([rows], dtype=torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = (hidden.sum(-1).long() * 31 + 7) % self.vocab
        return torch.nn.functional.one_hot(tokens, self.vocab).float()

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / PRIME


class NarrowEnds(ToyEnds):
    """A head that says one of two tokens, by everything before it; the other is its second choice.

    Such a text has had all its short runs before, and goes on otherwise every other time.
    """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        first = (hidden.sum(-1).long() * 31 + 7) % PRIME % 2 + 1
        scores = torch.full((*first.shape, self.vocab), -30.0)
        scores[..., 1:3] = 0.0
        return scores.scatter(-1, first[..., None], 2.0)


class RepeatingEnds(ToyEnds):
    """A head that says the same token for most rows, and another one now and then.

    Such a text goes on as it did before for so long that a second draft follows the first, and
    breaks off anywhere in them.
    """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        changes = (hidden.sum(-1).long() * 31 + 7) % PRIME < 8
        scores = torch.full((*changes.shape, self.vocab), -30.0)
        scores[..., 1:3] = 0.0
        return scores.scatter(-1, torch.where(changes, 2, 1)[..., None], 4.0)


class ToyText:
    """Tokens are numbers; 0 ends."""

    eos_ids = frozenset({0})
    reasoning_marks = None
    call_marks = None

    def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        return list(request.prompt_ids or ())

    def constraint(self, request: GenerationRequest) -> Constraint | None:
        return None

    def decoder(self, *, continues: bool) -> ToyText:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""

    def vocabulary(self) -> dict[str, int]:
        return {str(token): token for token in range(97)}

    def hides(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return str(token_id).encode()


def toy_orchestrator(
    network: ToyNetwork,
    oversight: Oversight | None = None,
    *,
    noise: float = 0.0,
    home: ToyShard | None = None,
    context: int = 4096,
    line: RoomLine | None = None,
    ends: ToyEnds | None = None,
    draft: Drafting | None = None,
    links: HopLinks | None = None,
    pooling: Pooling = NO_POOLING,
    short: int = 0,
) -> tuple[PipelineOrchestrator, Sessions]:
    """An orchestrator over the network with fp32 on the wire, which may go `home`; the
    model holds `context` positions, of which texts of up to `short` are another kind. `line` is
    where those wait who find all shards full, `links` are the asker's. The head computes up to 8
    rows at once."""

    async def go_home() -> Sequence[RouteHop]:
        assert home is not None
        return [RouteHop(home.descriptor, home.descriptor.layers)]

    router = ShardRouter(network, CoverRules())
    sessions = Sessions(
        links or HopLinks(network.dial),
        router,
        SystemClock(),
        Patience(answer_s=2.0),
        oversight or Oversight(SystemClock(), ceiling_s=30.0),
        line=line,
    )
    model = AskerModel(
        MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, context, ends or ToyEnds(), ToyText(),
        head_rows=8, draft=draft, pooling=pooling, short_positions=short,
    )  # fmt: skip
    orchestrator = PipelineOrchestrator(
        model,
        sessions,
        router,
        plainly(model, WireDtype.FP32),
        failover=FailoverSettings(retry_delays_s=(0.01, 0.02), moved_delays_s=(0.1, 0.2)),
        local_model=None if home is None else go_home,
        settings=LoopSettings(noise=noise),
    )
    return orchestrator, sessions


def plainly(model: AskerModel, wire_dtype: WireDtype) -> Prepared:
    """Requests become tokens on the loop, and activations travel so."""

    @asynccontextmanager
    async def prepared(request: GenerationRequest) -> AsyncIterator[Asked]:
        ids = model.text.prompt_ids(request, model.max_positions)
        constraint = (
            await asyncio.to_thread(model.text.constraint, request) if is_bound(request) else None
        )
        yield Asked(ids, constraint, wire_dtype)

    return prepared


def toy_request(
    prompt: Sequence[int], count: int, request_id: str = "r", principal: Principal = THIS_NODE
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        MODEL,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=count, ignore_eos=True),
        principal=principal,
    )


def whole_output(prompt: Sequence[int]) -> torch.Tensor:
    """(1, rows, hidden): what one session over all layers puts out, with no mesh at all."""
    session = ToySession(LayerRange(0, TOTAL_LAYERS))
    rows = ToyEnds().embed(torch.tensor([list(prompt)]), 0)[0]
    return torch.tensor([session.run(0, [[int(v) for v in row] for row in rows])]).float()


def lost_in_the_second_chunk(network: ToyNetwork, lost: ToyShard) -> None:
    """The shard dies in the middle of a prompt, when another with its layers has come."""

    def die(step: Step) -> bool:
        if step.position >= 128:
            network.add(str(lost.descriptor.layers), name="second")
            lost.kill()
            return False
        return True

    lost.before_step = die


def expected_tokens(prompt: Sequence[int], count: int, ends: ToyEnds | None = None) -> list[int]:
    """The same generation with one session over all layers and no mesh at all."""
    ends, session = ends or ToyEnds(), ToySession(LayerRange(0, TOTAL_LAYERS))
    ids, tokens = list(prompt), []
    position = 0
    for _ in range(count):
        rows = [[int(v) for v in row] for row in ends.embed(torch.tensor([ids]), position)[0]]
        out = session.run(position, rows)
        position += len(ids)
        token = int(ends.logits(torch.tensor([out[-1:]], dtype=torch.float32)).argmax())
        tokens.append(token)
        ids = [token]
    return tokens


def encode(rows: list[list[int]]) -> WireTensor:
    values = [float(value) for row in rows for value in row]
    return WireTensor("fp32", (1, len(rows), HIDDEN), struct.pack(f"<{len(values)}f", *values))


def decode(tensor: WireTensor) -> list[list[int]]:
    values = struct.unpack(f"<{len(tensor.data) // 4}f", bytes(tensor.data))
    return [[int(v) for v in values[i : i + HIDDEN]] for i in range(0, len(values), HIDDEN)]
