"""The malicious member: speaks the real protocol over the same links, and keeps to none of it.

She knows what any of the others knows at once, without having to ask. What she wants others to take
in she announces, and gives when it is pulled.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mesh.errors import BadFrame, Busy, MeshError
from mesh.events import messages
from mesh.events.decision import MAX_PARENTS, DecisionDraft, DecisionId, SignedDecision, seal
from mesh.events.graph import Graph
from mesh.events.intake import Received
from mesh.events.messages import Ask, Heads, Page, Probe, Probed, Pull, to_dict
from mesh.events.store import MAX_PAGE_BYTES, MAX_PAGE_EVENTS, RECORD_OVERHEAD_BYTES
from mesh.events.types import GENESIS, MODEL_PUBLISHED, Draft, Event, EventId
from mesh.events.types import seal as seal_event
from mesh.identity import decisions
from mesh.identity.decisions import Acknowledged, Added, Decision, LevelChanged, Revoked
from mesh.wire.frames import FrameType
from mesh.wire.limits import DEFAULT_LIMITS, KIB, Limits
from mesh.wire.messages import Gossip, Message, Open, Step, WireTensor
from mesh.wire.tensors import pack_header
from tests.identity.deciding import ANCHOR, NOTHING, TRUSTED, party
from tests.pipeline.toy_mesh import MODEL, TOTAL_LAYERS, WEIGHTS
from tests.simulation.members.casting import ACCOMPLICE, VILLAIN
from tests.simulation.members.house import House, HouseLink
from tests.simulation.members.plan import Attack

LOOSE: Limits = replace(
    DEFAULT_LIMITS, chunk_bytes=16 * KIB, high_water_bytes=1 << 30, queued_bytes=1 << 30
)
"""Of her own end, which refuses her nothing."""

Said = SignedDecision | Event
_FAT = 12_000


class Eve:
    """Call `enter`, then `begin` each attack."""

    def __init__(self, house: House, rng: random.Random) -> None:
        self.id = party(VILLAIN).id
        self.key = party(VILLAIN).key
        self.done = 0
        """How many attacks were begun."""
        self._house = house
        self._rng = rng
        self._links: dict[str, HouseLink] = {}
        self._graph = Graph()
        self._to_tell: dict[str, deque[Said]] = defaultdict(deque)
        self._generation = 1
        self._chain: list[Event] = []
        self._learn(house.cast.history.graph)

    # Links

    def enter(self, name: str) -> None:
        """A control link to a node, unless there is one or it lets her in no more."""
        link = self._links.get(name)
        if link is None or link.is_closed:
            made = self._house.let_in(name, _Ear(self, name), LOOSE)
            if made is not None:
                self._links[name] = made

    def _say(self, name: str, body: dict[str, Any]) -> None:
        self.enter(name)
        link = self._links.get(name)
        if link is not None and not link.is_closed:
            link.send(Gossip(body))

    def heard(self, name: str, body: dict[str, Any]) -> None:
        """An honest node asks, or answers, which is all the same to her."""
        try:
            message = messages.from_dict(body)
        except BadFrame:
            return
        match message:
            case Ask(number):
                self._say(name, to_dict(self._heads(name, number)))
            case Pull(number):
                self._say(name, to_dict(Page.of(number, self._page(name))))
            case Probe(number, author, _, seqs):
                hashes = {seq: self._rng.randbytes(8) for seq in seqs}
                self._say(name, to_dict(Probed(number, author, hashes)))

    def _heads(self, name: str, number: int) -> Heads:
        waiting = self._to_tell[name]
        tips = [one.id for one in waiting if isinstance(one, SignedDecision)]
        known = self._graph.tips if not tips else ()
        heads = {}
        if any(isinstance(one, Event) for one in waiting):
            heads[self.id] = (self._generation, 10**6, bytes(8))
        elif self._chain:
            heads[self.id] = (self._generation, len(self._chain), self._chain[-1].id[:8])
        return Heads(number, heads, {}, (*tips[-messages.MAX_TIPS :], *known)[: messages.MAX_TIPS])

    def _page(self, name: str) -> Received:
        waiting, room = self._to_tell[name], MAX_PAGE_BYTES
        decided: list[tuple[bytes, bytes]] = []
        events: list[tuple[bytes, bytes]] = []
        while waiting and max(len(decided), len(events)) < MAX_PAGE_EVENTS:
            room -= len(waiting[0].body) + RECORD_OVERHEAD_BYTES
            if room < 0:
                break
            one = waiting.popleft()
            (decided if isinstance(one, SignedDecision) else events).append(
                (one.body, one.signature)
            )
        return Received(tuple(events), (), tuple(decided))

    def tell(self, targets: Iterable[str], said: Iterable[Said]) -> None:
        """Have these nodes pull it."""
        records = list(said)
        for name in targets:
            self._to_tell[name].extend(records)
            self._say(name, to_dict(self._heads(name, 0)))

    # What she signs

    def _learn(self, graph: Graph) -> None:
        for at in range(len(graph)):
            if graph[at].id not in self._graph and not self._graph.missing(graph[at]):
                self._graph.add(graph[at])

    def _catch_up(self) -> None:
        for node in self._house.nodes.values():
            self._learn(node.hearth.log.docket.graph)

    def decision(
        self,
        said: Decision | tuple[str, dict[str, Any]],
        parents: tuple[DecisionId, ...],
        author: str = VILLAIN,
        depth: int | None = None,
    ) -> SignedDecision:
        """By her key, in whosever name."""
        kind, payload = said if isinstance(said, tuple) else decisions.encode(said)
        depth = self._graph.depth_after(parents) if depth is None else depth
        draft = DecisionDraft(
            self._house.cast.hearth, party(author).id, depth, self._rng.randrange(1 << 40), kind,
            payload, parents,
        )  # fmt: skip
        return seal(draft, self.key.sign)

    def fact(self, seq: int, prev: EventId, lamport: int, size: int) -> Event:
        payload = {"model_id": f"m{self._rng.randrange(1 << 30)}", "x": bytes(size)}
        draft = Draft(
            self._house.cast.hearth, self.id, self._generation, seq, prev, lamport, 0,
            MODEL_PUBLISHED, payload,
        )  # fmt: skip
        return seal_event(draft, self.key.sign)

    # What she does

    def begin(self, attack: Attack) -> None:
        """Begin it; what takes time goes on by itself."""
        self.done += 1
        self._catch_up()
        for name in attack.targets:
            self.enter(name)
        _ATTACKS[attack.kind](self, attack)

    def repeated_ranges(self, attack: Attack) -> None:
        authors = [node.id for node in self._house.nodes.values()]
        for name in attack.targets:
            for number in range(attack.size // 8):
                rows = [[authors[number % 3], 1, 1, 1 << 40]] * messages.MAX_AUTHORS
                self._say(name, {**to_dict(Pull(number)), "ranges": rows})

    def overlapping_pulls(self, attack: Attack) -> None:
        authors = sorted([*(node.id for node in self._house.nodes.values()), self.id])
        ranges = tuple((author, 1, 1, 1 << 40) for author in authors)
        tips = self._graph.tips[: messages.MAX_TIPS]
        for name in attack.targets:
            self._later(self._keep_pulling(name, ranges, tips, attack.size))

    async def _keep_pulling(
        self, name: str, ranges: Any, tips: tuple[DecisionId, ...], count: int
    ) -> None:
        link = self._links.get(name)
        if link is not None and self._rng.random() < 0.7:
            link.deaf = True
        for number in range(count):
            self._say(name, to_dict(Pull(number, ranges, (), tips)))
            await asyncio.sleep(0.02)
        await asyncio.sleep(5)
        if link is not None and link.deaf:
            link.cut()

    def void_flood(self, attack: Attack) -> None:
        everything = self._graph.tips[:MAX_PARENTS]
        old = (self._graph[0].id,)
        ways: list[Callable[[int], SignedDecision]] = [
            lambda n: self.decision(Added(party("x").certificate, f"x{n}", TRUSTED), old),
            lambda n: self.decision(("nonsense", {"n": n}), everything),
            lambda n: self.decision(Acknowledged(), everything, author="ann"),  # forged
            lambda n: self.decision(Acknowledged(), old, depth=40 + n),
            lambda n: self.decision(Revoked(party("ann").id, NOTHING), old, author="nobody"),
        ]
        said = [self._rng.choice(ways)(number) for number in range(attack.size)]
        self.tell(attack.targets, said)

    def lawful_flood(self, attack: Attack) -> None:
        docket = self._house.nodes[attack.targets[0]].hearth.log.docket
        parents = docket.graph.tips[:MAX_PARENTS]
        said = []
        for number in range(attack.size):
            guest = Added(party(f"x{number % 5}").certificate, "x" * 64, TRUSTED)
            said_one = guest if self._rng.random() < 0.2 else Acknowledged()
            one = self.decision(said_one, parents)
            said.append(one)
            if self._rng.random() < 0.9:
                self._graph.add(one)
                parents = (one.id,)
        self.tell(attack.targets, said)

    def fat_orphans(self, attack: Attack) -> None:
        fat = {"x": bytes(_FAT)}
        said: list[Said] = []
        for number in range(attack.size // 2):
            parents = (DecisionId(self._rng.randbytes(32)),)
            said.append(self.decision(("nonsense", fat), parents, depth=9))
            said.append(self.fact(3 + 2 * number, EventId(self._rng.randbytes(32)), 5, _FAT))
        self.tell(attack.targets, said)

    def facts_flood(self, attack: Attack) -> None:
        said: list[Said] = []
        if self._rng.random() < 0.5 or not self._chain:
            self._generation += 1
            self._chain = []
        size = self._rng.choice([10, 2_000])
        for _ in range(attack.size):
            last = self._chain[-1] if self._chain else None
            event = self.fact(
                len(self._chain) + 1, GENESIS if last is None else last.id,
                1 if last is None else last.lamport + 1, size,
            )  # fmt: skip
            self._chain.append(event)
            said.append(event)
        self.tell(attack.targets, said)

    def half_tensors(self, attack: Attack) -> None:
        for _ in range(12):
            link = self._shard_link()
            if link is None:
                return
            whole = WireTensor("int8", (30 * KIB,), b"")
            for number in range(4):
                link.emit(FrameType.DATA, pack_header(whole, number), bytes(15 * KIB))

    def tensors_on_control(self, attack: Attack) -> None:
        for name in attack.targets:
            link = self._links.get(name)
            if link is not None and not link.is_closed:
                size = self._rng.choice([100, 15 * KIB, 200 * KIB])
                link.send(Step(1, 1, 0, WireTensor("int8", (size,), bytes(size))))

    def silent_sessions(self, attack: Attack) -> None:
        for _ in range(2):
            link = self._shard_link()
            if link is not None:
                self._later(self._hold_streams(link))

    async def _hold_streams(self, link: HouseLink) -> None:
        """As many as there are, again whenever one was taken away."""
        for number in range(1, 60):
            if link.is_closed:
                return
            link.send(
                Open(number, MODEL, WEIGHTS, 0, TOTAL_LAYERS, self._rng.choice([8, 90]), "fp32")
            )
            await asyncio.sleep(0.25)

    def _shard_link(self) -> HouseLink | None:
        try:
            return self._house.enter_shard(VILLAIN, _Mute(), LOOSE)
        except Busy:
            return None

    def late_fork(self, attack: Attack) -> None:
        graph = self._graph
        own = [graph[at] for at in range(len(graph)) if graph[at].author == self.id]
        said: list[Said] = []
        for number in range(min(attack.size, 20)):
            old = self._rng.choice(own).parents if own else (graph[0].id,)
            subject = party(self._rng.choice(["bob", "dan", ACCOMPLICE])).id
            wish = self._rng.choice(
                [Acknowledged(), Revoked(subject, NOTHING), LevelChanged(subject, ANCHOR)]
                if subject != party("dan").id
                else [Acknowledged(), LevelChanged(subject, ANCHOR)]
            )
            said.append(self.decision(wish, old))
            if self._chain:
                at = self._rng.randrange(len(self._chain))
                prev = self._chain[at - 1].id if at else GENESIS
                said.append(self.fact(at + 1, prev, self._chain[at].lamport, number))
        self.tell(attack.targets, said)

    def back_dating(self, attack: Attack) -> None:
        graph = self._graph
        said: list[Said] = []
        for past in self._rng.sample(range(len(graph)), min(4, len(graph))):
            parents: tuple[DecisionId, ...] = graph.newest((1 << past + 1) - 1)
            accomplice = self.decision(
                Added(party(ACCOMPLICE).certificate, ACCOMPLICE, TRUSTED), parents
            )
            graph.add(accomplice)
            said.append(accomplice)
            wishes = (
                LevelChanged(party(ACCOMPLICE).id, ANCHOR), Revoked(party("ann").id, NOTHING),
                LevelChanged(party("bob").id, TRUSTED), Revoked(party("bob").id, NOTHING),
            )  # fmt: skip
            said += [self.decision(wish, (accomplice.id,)) for wish in wishes]
        if self._chain:
            last = self._chain[-1]
            said.append(self.fact(len(self._chain) + 1, last.id, 1, 10))
        self.tell(attack.targets, said)

    def _later(self, work: Any) -> None:
        self._house.keep(work)


class _Ear:
    """Her end of a control link."""

    def __init__(self, eve: Eve, name: str) -> None:
        self._eve, self._name = eve, name

    def message(self, message: Message) -> None:
        if isinstance(message, Gossip):
            self._eve.heard(self._name, message.body)

    def closed(self, error: MeshError | None) -> None:
        """She comes back whenever she has something to say."""


class _Mute:
    """Her end of a tensor link."""

    def message(self, message: Message) -> None:
        """She is not interested."""

    def closed(self, error: MeshError | None) -> None:
        """Nor in this."""


_ATTACKS: dict[str, Callable[[Eve, Attack], None]] = {
    "repeated ranges": Eve.repeated_ranges,
    "overlapping pulls": Eve.overlapping_pulls,
    "void flood": Eve.void_flood,
    "lawful flood": Eve.lawful_flood,
    "fat orphans": Eve.fat_orphans,
    "facts flood": Eve.facts_flood,
    "half tensors": Eve.half_tensors,
    "tensors on control": Eve.tensors_on_control,
    "silent sessions": Eve.silent_sessions,
    "late fork": Eve.late_fork,
    "back-dating": Eve.back_dating,
}
