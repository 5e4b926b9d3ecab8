"""Nodes of one name, in what is said of routes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from mesh.discovery.advertisement import Advertisement, ShardHealth
from mesh.identity.naming import short_id
from mesh.node.offers import named_apart
from mesh.types import NodeId
from tests.fakes import descriptor

HEALTH = ShardHealth(True, datetime.now(UTC), 0.0, 0.0, 0, 0)
FIRST, SECOND, THIRD = (NodeId(letter * 52) for letter in "abc")


def test_nodes_of_one_name_are_told_apart_and_others_are_left_alone() -> None:
    names = {FIRST: "raspberrypi", SECOND: "raspberrypi", THIRD: "attic"}
    shards = [
        Advertisement(replace(descriptor(name, "0-1"), host=node), HEALTH)
        for node, name in names.items()
    ]
    named = [*named_apart(shards, names)]
    assert [shard.descriptor.node_name for shard in named] == [
        f"{short_id(FIRST)} (raspberrypi)",
        f"{short_id(SECOND)} (raspberrypi)",
        "attic",
    ]
    assert named[2] is shards[2]
    assert [replace(shard.descriptor, node_name="") for shard in named] == [
        replace(shard.descriptor, node_name="") for shard in shards
    ]
    assert [*named_apart(shards[:1], {FIRST: "raspberrypi"})] == shards[:1]
