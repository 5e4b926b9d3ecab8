"""What is said of a deployment: how far each span is, what answers, and what is on its way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from mesh.deployments.formats import LoadedFormat
from mesh.deployments.listing import DeploymentRows
from mesh.deployments.phases import Phase, PhaseProgress, Phases
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.wishes import Deployment, Plan, Replica, Span, Wish
from mesh.discovery.weights import Arriving, HeldWeights
from mesh.types import LayerRange, ModelId, NodeId, ShardId

HERE, THERE = NodeId("a"), NodeId("b")
FIRST, SECOND = Span(HERE, LayerRange(0, 2)), Span(THERE, LayerRange(2, 4))
WISH = Wish("0" * 16, ModelId("m"), "ab" * 32, 4, 40, quant="int8")
EVENT = "cd" * 32
MB = 1 << 20


class Seen:
    """What a node sees, as a test says: two machines, of which `up` are there."""

    node = HERE

    def __init__(self, wish: Wish = WISH, *replicas: tuple[Span, ...], event: str = EVENT) -> None:
        spans = replicas or ((FIRST, SECOND),)
        plan = Plan(
            wish.deployment, EVENT, 0, tuple(map(Replica, range(len(spans)), spans)), 9, asked=True
        )
        self.deployment = Deployment(wish, plan, event, HERE, 0)
        self.phases = Phases(lambda shard, now: None)
        self.rows = DeploymentRows(self, self.phases)
        self.up = {HERE, THERE}
        self.offered: list[ServedShard] = []
        self.words: dict[ShardId, PhaseProgress] = {}
        self.disk: HeldWeights | None = None
        self.resident = True

    def serve(self, span: Span, quant: str = "int8", weights: str = WISH.weights_sha256) -> None:
        loaded = LoadedFormat("int8" if quant == "int8" else "bf16", quant)
        self.offered.append(ServedShard(span.node, WISH.model_id, weights, span.layers, loaded))

    def far(self) -> list[str]:
        return [span.now.phase.value for span in self.rows.seen(self.deployment).spans]

    def row(self) -> dict[str, Any]:
        return self.rows.row(self.rows.seen(self.deployment))

    def deployments(self) -> dict[str, Deployment]:
        return {self.deployment.id: self.deployment}

    def names(self) -> Mapping[NodeId, str]:
        return {HERE: "attic", THERE: "kitchen"}

    def trusted(self) -> Collection[NodeId]:
        return {HERE, THERE}

    def alive(self) -> Collection[NodeId]:
        return self.up

    def served(self) -> list[ServedShard]:
        return [each for each in self.offered if each.node != HERE]

    def serves(self) -> Collection[ServedShard]:
        return [each for each in self.offered if each.node == HERE]

    def told(self, node: NodeId, shard: ShardId) -> PhaseProgress | None:
        return self.words.get(shard) if node == THERE else None

    def on_disk(self, node: NodeId, weights_sha256: str) -> HeldWeights | None:
        return self.disk if node == THERE else None

    def is_resident(self, model_id: ModelId, weights_sha256: str) -> bool:
        return self.resident


def test_how_far_this_node_s_own_span_is_it_knows_and_another_s_it_is_told() -> None:
    seen = Seen()
    assert seen.far() == ["QUEUED", "QUEUED"]
    seen.phases.put(seen.deployment.shard(FIRST.layers), Phase.DEPLOYING)
    seen.words[seen.deployment.shard(SECOND.layers)] = PhaseProgress(Phase.FAILED)
    seen.words[seen.deployment.shard(FIRST.layers)] = PhaseProgress(Phase.FAILED)
    assert seen.far() == ["DEPLOYING", "FAILED"]
    for span in (FIRST, SECOND):
        seen.serve(span)
    assert seen.far() == ["DEPLOYING", "FAILED"], "what is served is to be another"
    seen.up = {HERE}
    assert seen.far() == ["DEPLOYING", "AWAY"]


def test_what_is_served_as_it_was_wished_before_is_not_ready() -> None:
    seen = Seen()
    seen.serve(FIRST, "none")
    seen.serve(SECOND, "none")
    seen.phases.put(seen.deployment.shard(FIRST.layers), Phase.READY)
    assert (seen.far(), seen.row()["state"]) == (["QUEUED", "QUEUED"], "PARTLY")
    for span in (FIRST, SECOND):
        seen.serve(span)
    assert (seen.far(), seen.row()["state"]) == (["READY", "READY"], "READY")
    # While a machine that just came back is not known to be there, what it offers is.
    seen.up = {HERE}
    assert seen.far() == ["READY", "READY"]


@pytest.mark.parametrize(
    ("layers", "arriving", "far"),
    [
        ((), None, (Phase.PROVISIONING, 0, 20 * MB)),
        ((LayerRange(0, 3),), None, (Phase.PROVISIONING, 10 * MB, 20 * MB)),
        ((LayerRange(0, 3),), Arriving(7, 9, 1), (Phase.PROVISIONING, 7, 9)),
        ((), Arriving(10, 9, 1), (Phase.PROVISIONING, 9, 9)),
        ((LayerRange(0, 4),), Arriving(7, 9, 1), (Phase.DEPLOYING, 0, 0)),
    ],
)
def test_of_what_another_fetches_it_is_said_how_much_is_there(
    layers: tuple[LayerRange, ...], arriving: Arriving | None, far: tuple[Phase, int, int]
) -> None:
    seen = Seen()
    held = HeldWeights(WISH.model_id, WISH.weights_sha256, 4, layers, False, ("192.0.2.7", 1))
    seen.disk = replace(held, arriving=arriving)
    now = seen.rows.seen(seen.deployment).spans[1].now
    assert (now.phase, now.done, now.total) == far


def test_a_replica_answers_while_another_is_on_its_way() -> None:
    seen = Seen(WISH, (FIRST, SECOND), (Span(THERE, WISH.whole),))
    seen.serve(FIRST)
    row = seen.row()
    assert (row["state"], row["missing"], row["replicas_ready"]) == ("QUEUED", ["2-3"], 0)
    seen.serve(SECOND)
    row = seen.row()
    assert (row["state"], row["missing"], row["replicas_ready"]) == ("PARTLY", [], 1)
    assert seen.rows.is_on_its_way(seen.deployment)
    seen.serve(Span(THERE, WISH.whole))
    assert (seen.row()["state"], seen.row()["replicas_ready"]) == ("READY", 2)
    assert not seen.rows.is_on_its_way(seen.deployment)
    seen.deployment = replace(seen.deployment, event="ef" * 32)
    assert seen.row()["state"] == "PARTLY", "it was planned for an earlier wish"


def test_what_nobody_who_is_there_brings_up_is_not_on_its_way() -> None:
    seen = Seen()
    assert seen.rows.is_on_its_way(seen.deployment)
    seen.serve(FIRST)
    assert seen.rows.is_on_its_way(seen.deployment)
    seen.up = {HERE}
    assert not seen.rows.is_on_its_way(seen.deployment)
    unplanned = replace(seen.deployment, plan=None)
    resting = replace(seen.deployment, wish=replace(WISH, resting=True))
    seen.up, seen.offered = {HERE, THERE}, []
    assert not any(map(seen.rows.is_on_its_way, (unplanned, resting)))


def test_the_level_is_that_of_these_weights_and_what_rests_lacks_nothing() -> None:
    seen = Seen()
    for span in (FIRST, SECOND):
        seen.serve(span, weights="00" * 32)
    assert (seen.row()["level"], seen.row()["missing"]) == ("COLD", ["0-3"])
    seen.serve(FIRST)
    assert (seen.row()["level"], seen.row()["missing"]) == ("HOT", ["2-3"])
    seen.resident = False
    assert seen.row()["level"] == "WARM"
    seen.deployment = replace(seen.deployment, wish=replace(WISH, resting=True))
    row = seen.row()
    assert (row["level"], row["state"], row["missing"]) == ("COLD", "RESTING", [])
    assert seen.far() == ["RESTING", "RESTING"]
