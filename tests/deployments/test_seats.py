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

    def wish(self, deployed: Deployment, copies: int = 1) -> None:
        assert deployed.plan is not None
        (replica,) = deployed.plan.replicas
        replicas = tuple(replica._replace(number=number) for number in range(copies))
        plan = replace(deployed.plan, replicas=replicas)
        self.wishes = {deployed.id: replace(deployed, plan=plan)}

    def step(self) -> bool:
        """Decide and act once; whether there was anything to do."""
        held, devices = list(self.held.values()), len(self.total_mb)
        view = View(ME, self.wishes, held, (), None, size_mb, devices=devices)
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


def test_what_is_to_come_takes_room_of_its_own_device_alone() -> None:
    node = Node({"cpu:0": 60, "cpu:1": 60})
    node.wish(deployment(("me", "0-3"), ("you", "4-8"), ("me", "9-9"), layers=10))
    assert node.step()
    node.wish(deployment(("me", "0-3"), ("me", "4-8"), ("me", "9-9"), layers=10))
    assert node.step()
    where = {str(each.layers): each.device for each in node.held.values()}
    assert where == {"0-3": "cpu:0", "4-8": "cpu:1", "9-9": "cpu:1"}, "at once"


def test_where_nobody_knows_what_is_free_there_is_room() -> None:
    wished = deployment(("me", "0-3"))
    view = View(ME, {wished.id: wished}, (), (), None, size_mb, devices=2)
    free_mb = {"cuda:0": 4, "cuda:1": None}
    assert [*seated(view, free_mb, need_mb, lambda wish: 0).values()] == ["cuda:1"]


def test_what_is_up_takes_its_room_once() -> None:
    node = Node({"cpu:0": 100, "cpu:1": 30})
    node.wish(deployment(("me", "0-3"), ("you", "4-8"), layers=9))
    node.settle()
    node.wish(deployment(("me", "0-3"), ("me", "4-8"), layers=9))
    node.settle()
    assert node.seats == {"0-3": "cpu:0", "4-8": "cpu:0"}


def test_what_fits_nowhere_goes_where_most_gets_free_of_what_nobody_wishes_for() -> None:
    node = Node({"cpu:0": 50, "cpu:1": 105})
    node.wish(deployment(("me", "0-3"), ("you", "4-4"), ("me", "5-13"), layers=14))
    node.settle()
    node.wish(deployment(("me", "0-4"), ("me", "5-13"), layers=14))
    node.settle()
    assert node.seats == {"0-4": "cpu:0", "5-13": "cpu:1"}


def test_what_no_device_computes_goes_to_the_first_whose_process_says_so() -> None:
    node = Node({"cuda:0": 100, "cuda:1": 100})
    wished = deployment(("me", "0-3"))
    node.wish(replace(wished, wish=replace(wished.wish, quant="int8")))
    assert node.step()
    assert [each.device for each in node.held.values()] == ["cuda:0"]


def test_the_same_layers_of_another_model_are_no_copy() -> None:
    node = Node({"cpu:0": 100, "cpu:1": 10})
    one = deployment(("me", "0-3"))
    wish = replace(one.wish, deployment="f" * 16, model_id=ModelId("n"))
    assert one.plan is not None
    other = replace(one, wish=wish, plan=replace(one.plan, deployment=wish.deployment))
    node.wishes = {each.id: each for each in (one, other)}
    node.settle()
    assert {held.device for held in node.held.values()} == {"cpu:0"}
    assert len(node.held) == 2


def test_copies_of_the_same_layers_lie_on_a_device_each_as_far_as_there_are_any() -> None:
    node = Node({"cuda:0": 100, "cuda:1": 100, "cuda:2": 100})
    first, second, third = (shard_id(ModelId("m"), LayerRange(0, 4), n) for n in range(3))
    for copies, expected in (
        (2, {first: "cuda:0", second: "cuda:1"}),
        (1, {first: "cuda:0"}),
        (5, {first: "cuda:0", second: "cuda:1", third: "cuda:2"}),
    ):
        node.wish(deployment(("me", "0-3")), copies)
        node.settle()
        assert {name: each.device for name, each in node.held.items()} == expected


def test_a_copy_is_never_put_beside_the_other_and_says_what_it_waits_for() -> None:
    first, second = (shard_id(ModelId("m"), LayerRange(0, 4), n) for n in range(2))
    for devices, quant, why in (
        ({"cuda:0": 100, "cuda:1": 4}, "none", "needs 20 MiB, 4 MiB are free"),
        ({"cpu": 200, "cuda:0": 100}, "int8", "no other device here computes its format"),
    ):
        node = Node(dict(devices))
        wished = deployment(("me", "0-3"))
        node.wish(replace(wished, wish=replace(wished.wish, quant=quant)), 2)
        node.settle()
        assert [*node.held] == [first]
        assert (node.decision.waiting or {})[second] == why


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_is_wished_no_device_is_filled_beyond_its_memory_and_what_fits_is_up(
    sizes: list[int], wishes: list[tuple[list[int], int]]
) -> None:
    node = Node({f"cpu:{number}": size * LAYER_MB for number, size in enumerate(sizes)})
    for cuts, copies in wishes:
        ends = [sum(cuts[:count]) for count in range(len(cuts) + 1)]
        spans = [("me", f"{lo}-{hi - 1}") for lo, hi in pairwise(ends)]
        node.wish(deployment(*spans, layers=ends[-1]), copies)
        node.settle()
        lying = Counter((each.device, each.layers) for each in node.held.values())
        assert max(lying.values(), default=1) == 1, "copies lie on a device each"
        lacking = [each for each in node.decision.waiting or {} if each not in node.held]
        for shard in lacking:
            layers = LayerRange.parse(shard.partition(":")[2].partition("#")[0])
            others = [mb or 0 for d, mb in node.free_mb.items() if (d, layers) not in lying]
            room = max(others, default=0)
            assert len(layers) * LAYER_MB > room, "what fits somewhere is loaded there"
