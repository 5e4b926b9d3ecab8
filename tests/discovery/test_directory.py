"""The directory never offers a shard that is gone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.discovery.advertisement import MAX_SHARDS_PER_NODE, Advertisement
from mesh.discovery.directory import MAX_NODES, NodeInfo, Offering, ShardStore
from mesh.errors import BadAdvertisement
from mesh.types import LayerRange, ModelId, NodeId
from tests.discovery.network import FakeClock, advertised, new_id, offline

EXPIRY_S = 120.0
TINY = ModelId("tiny")
NODES = [new_id() for _ in range(3)]


def info(node_id: NodeId, name: str = "kitchen") -> NodeInfo:
    return NodeInfo(node_id, name, "192.168.1.2:7700", "0.1")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> ShardStore:
    return ShardStore(clock, expiry_s=EXPIRY_S)


def layers(shards: list[Advertisement]) -> list[str]:
    return [str(s.descriptor.layers) for s in shards]


def test_newest_word_of_a_node_replaces_all_it_said_before(store: ShardStore) -> None:
    node = NODES[0]
    store.update(info(node), Offering((advertised(node, "0-7"), advertised(node, "8-15"))))
    store.update(info(node), Offering((advertised(node, "8-15"), advertised(node, "4-11"))))
    assert layers(store.shards(TINY)) == ["4-11", "8-15"]


def test_advertisement_expires_by_the_monotonic_clock_without_a_sweep(
    store: ShardStore, clock: FakeClock
) -> None:
    node = NODES[0]
    store.update(info(node), Offering((advertised(node),)))
    clock.time_s += EXPIRY_S - 0.001
    assert layers(store.shards(TINY)) == ["0-7"]
    clock.time_s += 0.001
    assert store.shards(TINY) == []
    assert store.models() == []
    assert store.nodes() == []
    assert store.sweep() == [node]
    assert store.sweep() == []


def test_lost_link_keeps_the_node_visible_but_not_routable(
    store: ShardStore, clock: FakeClock
) -> None:
    node = NODES[0]
    store.update(info(node), Offering((advertised(node),)))
    clock.time_s += 7
    store.offline(node)
    assert store.shards(TINY) == []
    [view] = store.nodes()
    assert (view.online, view.age_s, layers(list(view.offers.shards))) == (False, 7, ["0-7"])
    store.update(info(node), Offering((advertised(node),)))
    assert layers(store.shards(TINY)) == ["0-7"]


def test_shard_that_calls_itself_offline_is_not_routable(store: ShardStore) -> None:
    node = NODES[0]
    store.update(info(node), Offering((offline(advertised(node, "0-7")), advertised(node, "8-15"))))
    assert layers(store.shards(TINY)) == ["8-15"]


def test_goodbye_removes_at_once(store: ShardStore) -> None:
    store.update(info(NODES[0]), Offering([advertised(NODES[0])]))
    store.remove(NODES[0])
    assert store.nodes() == []


def test_different_weights_under_one_name_are_kept_apart_and_reported(store: ShardStore) -> None:
    first, second = NODES[:2]
    store.update(info(first), Offering((advertised(first, weights="a" * 64),)))
    assert store.conflicts(TINY) == {}
    store.update(info(second), Offering((advertised(second, "8-15", weights="b" * 64),)))
    assert {w: layers(s) for w, s in store.conflicts(TINY).items()} == {
        "a" * 64: ["0-7"],
        "b" * 64: ["8-15"],
    }
    assert layers(store.shards(TINY, "b" * 64)) == ["8-15"]
    assert [(m.model_id, m.weights_sha256[0], m.total_layers) for m in store.models()] == [
        ("tiny", "a", 16),
        ("tiny", "b", 16),
    ]


def test_number_of_nodes_is_bounded_and_expiry_makes_room(
    store: ShardStore, clock: FakeClock
) -> None:
    for _ in range(MAX_NODES):
        store.update(info(new_id()), Offering())
    with pytest.raises(BadAdvertisement):
        store.update(info(NODES[0]), Offering())
    clock.time_s += EXPIRY_S
    store.update(info(NODES[0]), Offering())
    assert [view.info.node_id for view in store.nodes()] == [NODES[0]]


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
def test_unusable_name_is_refused(store: ShardStore, name: str) -> None:
    with pytest.raises(BadAdvertisement) as caught:
        store.update(info(NODES[0], name), Offering())
    assert caught.value.param == "name"


def test_node_speaks_for_itself_only_and_not_for_too_many(store: ShardStore) -> None:
    first, second = NODES[:2]
    with pytest.raises(BadAdvertisement):
        store.update(info(first), Offering((advertised(second),)))
    with pytest.raises(BadAdvertisement):
        store.update(info(first), Offering((advertised(first),) * (MAX_SHARDS_PER_NODE + 1)))
    assert store.nodes() == []


async def test_many_changes_between_two_waits_are_one(store: ShardStore) -> None:
    changes = store.subscribe()
    node = NODES[0]
    assert not await changes.wait(0)
    for _ in range(1000):
        store.update(info(node), Offering((advertised(node),)))
        store.offline(node)
    assert await changes.wait(1)
    assert not await changes.wait(0)
    changes.close()
    store.remove(node)
    assert not await changes.wait(0)


async def test_heartbeat_that_says_nothing_new_wakes_nobody(store: ShardStore) -> None:
    node = NODES[0]
    store.update(info(node), Offering((advertised(node),)))
    changes = store.subscribe()
    store.update(info(node), Offering((advertised(node),)))
    assert not await changes.wait(0)
    waiting = asyncio.create_task(changes.wait(5))
    await asyncio.sleep(0)
    store.update(info(node), Offering())
    assert await waiting


async def test_who_comes_back_after_what_it_said_has_expired_is_news(
    store: ShardStore, clock: FakeClock
) -> None:
    """Readers that looked meanwhile did not see it, though nobody had swept it away yet."""
    node = NODES[0]
    store.update(info(node), Offering((advertised(node),)))
    changes = store.subscribe()
    clock.time_s += EXPIRY_S
    assert not store.shards(ModelId("tiny"))
    store.update(info(node), Offering((advertised(node),)))
    assert await changes.wait(0)
    assert store.shards(ModelId("tiny"))


class Directory(RuleBasedStateMachine):
    """Any order of words, losses, goodbyes, sweeps and time against a plain model of the rule."""

    spans = st.integers(0, 15).flatmap(
        lambda lo: st.integers(lo, 15).map(lambda hi: LayerRange(lo, hi + 1))
    )

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = ShardStore(self.clock, expiry_s=EXPIRY_S)
        self.said: dict[NodeId, tuple[float, bool, set[Advertisement]]] = {}

    @rule(
        node=st.sampled_from(NODES),
        spans=st.lists(spans, max_size=3, unique=True),
        weights=st.sampled_from(["a" * 64, "b" * 64]),
        up=st.booleans(),
    )
    def advertise(self, node: NodeId, spans: list[LayerRange], weights: str, up: bool) -> None:
        shards = [advertised(node, str(span), weights=weights) for span in spans]
        if not up:
            shards = [offline(shard) for shard in shards]
        self.store.update(info(node), Offering(shards))
        self.said[node] = (self.clock.time_s, True, set(shards))

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: NodeId) -> None:
        self.store.offline(node)
        if node in self.said:
            at, _, shards = self.said[node]
            self.said[node] = (at, False, shards)

    @rule(node=st.sampled_from(NODES))
    def leave(self, node: NodeId) -> None:
        self.store.remove(node)
        self.said.pop(node, None)

    @rule()
    def sweep(self) -> None:
        self.store.sweep()

    @rule(seconds=st.floats(0, EXPIRY_S * 1.5))
    def wait(self, seconds: float) -> None:
        self.clock.time_s += seconds

    @invariant()
    def offers_exactly_what_is_alive(self) -> None:
        alive = {
            shard
            for at, online, shards in self.said.values()
            if online and self.clock.time_s - at < EXPIRY_S
            for shard in shards
            if shard.health.online
        }
        offered = self.store.shards(TINY)
        assert set(offered) == alive
        assert len(offered) == len(alive)
        assert {s for m in self.store.models() for s in m.shards} == alive
        weights = {s.descriptor.weights_sha256 for s in alive}
        assert set(self.store.conflicts(TINY)) == (weights if len(weights) > 1 else set())


TestDirectory = Directory.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=20)
