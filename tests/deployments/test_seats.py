"""Which of its devices a node puts a shard on, and that none is ever filled beyond its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.deployments.reconcile import Decision, OwnShard, ShardStage, View
from mesh.deployments.seats import reconcile_devices, seated
from mesh.deployments.wishes import Deployment
from mesh.types import LayerRange, ModelId, NodeId, ShardId, shard_id
from tests.deployments.house import LAYER_MB, WEIGHTS
from tests.deployments.house import need_mb as size_mb
from tests.deployments.test_reconcile import deployment

ME = NodeId("me")
OTHER = NodeId("you")


def need_mb(deployed: Deployment, layers: LayerRange, device: str) -> int | None:
    """A card has what a processor has in half the room, and not in 8 bit."""
    if deployed.wish.quant == "int8" and device.startswith("cuda"):
        return None
    return size_mb(deployed, layers) // (2 if device.startswith("cuda") else 1)


@dataclass
class Node:
    """A node with devices, which does at once what it decides."""

    total_mb: dict[str, int]
    wishes: dict[str, Deployment] = field(default_factory=dict)
    held: dict[ShardId, OwnShard] = field(default_factory=dict)
    asking_mb: int = 0
    decision: Decision = field(default_factory=Decision)

    @property
    def free_mb(self) -> dict[str, int | None]:
        taken = [each for each in self.held.values() if not each.is_to_come]
        return {
            device: total - sum(each.mb for each in taken if each.device == device)
            for device, total in self.total_mb.items()
        }

    @property
    def seats(self) -> dict[str, str]:
        """Where the layers of each shard that is up lie."""
        up = [each for each in self.held.values() if each.state is ShardStage.READY]
        return {str(each.layers): each.device for each in up}

    def wish(self, deployed: Deployment) -> None:
        self.wishes = {deployed.id: deployed}

    def step(self) -> bool:
        """Decide and act once; whether there was anything to do."""
        view = View(ME, self.wishes, list(self.held.values()), (), None, size_mb)
        asking = self.asking_mb
        seats = seated(view, self.free_mb, need_mb, lambda wish: asking)
        decision = self.decision = reconcile_devices(view, seats, self.free_mb, need_mb)
        for drop in decision.drops:
            del self.held[drop.shard]
        for fetch in decision.fetches:
            wish = self.wishes[fetch.deployment].wish
            self.held[fetch.shard] = OwnShard(
                fetch.shard, wish.model_id, WEIGHTS, fetch.layers, fetch.mb,
                ShardStage.PROVISIONED, device=seats[fetch.shard],
            )  # fmt: skip
        if (load := decision.load) is not None:
            self.held[load.shard] = replace(self.held[load.shard], state=ShardStage.READY)
        assert all(mb is None or mb >= 0 for mb in self.free_mb.values()), "never over memory"
        return not decision.is_idle

    def settle(self) -> None:
        for _ in range(100):
            if not self.step():
                return
        raise AssertionError("it does not come to rest")


def test_each_device_has_a_part_the_largest_where_there_is_room_for_it() -> None:
    node = Node({"cuda:0": 20, "cpu": 100})
    node.wish(deployment(("me", "0-2"), ("me", "3-7"), layers=8))
    node.settle()
    assert node.seats == {"0-2": "cuda:0", "3-7": "cpu"}


def test_what_a_device_does_not_compute_in_the_wished_format_goes_on_another() -> None:
    node = Node({"cuda:0": 100, "cpu": 40})
    wished = deployment(("me", "0-3"))
    node.wish(replace(wished, wish=replace(wished.wish, quant="int8")))
    assert node.step()
    assert [each.device for each in node.held.values()] == ["cpu"]


def test_both_parts_may_lie_on_one_device_where_the_other_has_no_room() -> None:
    node = Node({"cuda:0": 20, "cuda:1": 4})
    node.wish(deployment(("me", "0-1"), ("me", "2-3")))
    node.settle()
    assert node.seats == {"0-1": "cuda:0", "2-3": "cuda:0"}


def test_what_asking_takes_of_the_first_device_is_kept_for_it() -> None:
    node = Node({"cuda:0": 20, "cuda:1": 20}, asking_mb=5)
    node.wish(deployment(("me", "0-3"), ("me", "4-6"), layers=7))
    node.settle()
    assert node.seats == {"0-3": "cuda:1", "4-6": "cuda:0"}


def test_what_is_somewhere_stays_there_and_makes_room_on_its_own_device_alone() -> None:
    node = Node({"cuda:0": 20, "cuda:1": 20})
    node.wish(deployment(("me", "0-3"), ("me", "4-7"), layers=8))
    node.settle()
    before = dict(node.held)
    # One part grows by a layer: there is no room for old and new, and the other stays as it is.
    node.wish(deployment(("me", "0-2"), ("me", "4-7"), ("you", "3-3"), layers=8))
    gaps = []
    for _ in range(20):
        if not node.step():
            break
        gaps += [drop.shard for drop in node.decision.drops if drop.gap]
    kept = shard_id(ModelId("m"), LayerRange(4, 8))
    assert node.held[kept] is before[kept]
    assert node.seats == {"0-2": node.held[kept].device.replace("1", "0"), "4-7": "cuda:1"}
    assert gaps == [shard_id(ModelId("m"), LayerRange(0, 4))]


def test_a_shard_goes_once_its_layers_are_served_on_another_device() -> None:
    node = Node({"cuda:0": 20, "cuda:1": 20})
    node.wish(deployment(("me", "0-3")))
    node.settle()
    assert node.seats == {"0-3": "cuda:0"}
    node.wish(deployment(("me", "0-1"), ("me", "2-3"), asked=False))
    node.settle()
    assert node.seats == {"0-1": "cuda:1", "2-3": "cuda:1"}, "the old stayed until both were up"


def test_what_is_to_come_leaves_the_next_less_room() -> None:
    node = Node({"cpu:0": 40, "cpu:1": 40})
    node.wish(deployment(("me", "0-1"), ("me", "2-3"), ("me", "4-5"), ("me", "6-7"), layers=8))
    assert node.step()
    where = Counter(each.device for each in node.held.values())
    assert where == {"cpu:0": 2, "cpu:1": 2}, "each has what it has room for, at once"


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_whatever_is_wished_no_device_is_filled_beyond_its_memory_and_what_fits_is_up(
    sizes: list[int], wishes: list[list[int]]
) -> None:
    node = Node({f"cpu:{number}": size * LAYER_MB for number, size in enumerate(sizes)})
    for cuts in wishes:
        ends = [sum(cuts[:count]) for count in range(len(cuts) + 1)]
        spans = [("me", f"{lo}-{hi - 1}") for lo, hi in pairwise(ends)]
        node.wish(deployment(*spans, layers=ends[-1]))
        node.settle()
        lacking = [each for each in node.decision.waiting or {} if each not in node.held]
        room = max(mb or 0 for mb in node.free_mb.values())
        for shard in lacking:
            lo, _, hi = shard.partition(":")[2].partition("-")
            assert (int(hi) - int(lo) + 1) * LAYER_MB > room, "what fits somewhere is loaded there"
