"""Which node is meant."""

from __future__ import annotations

from pathlib import Path

from mesh.config import Config
from mesh.hearth.record import HearthRecord, read_record, write_record
from mesh.identity.naming import nodes_meant, told_apart
from mesh.node.daemon import with_known_name
from mesh.paths import StatePaths
from mesh.types import NodeId

A, B, C = NodeId("hn1aaaaaabbbb"), NodeId("hn1aaaaaacccc"), NodeId("hn1dddddd2222")
HOUSE = [(A, "attic"), (B, "attic"), (C, "sofa")]


def test_a_name_or_an_id_or_how_it_begins() -> None:
    assert nodes_meant("sofa", HOUSE) == nodes_meant("hn1ddd", HOUSE) == [C]
    assert nodes_meant("dddddd", HOUSE) == nodes_meant(C, HOUSE) == [C]
    assert nodes_meant("attic", HOUSE) == nodes_meant("aaaaaa", HOUSE) == [A, B]
    assert nodes_meant("aaaaaac", HOUSE) == [B]
    assert nodes_meant("ddddd", HOUSE) == nodes_meant("cellar", HOUSE) == []
    assert nodes_meant("hn1ddd", [*HOUSE, (A, "hn1ddd")]) == [A], "a name before a beginning"


def test_who_is_called_alike_is_told_apart() -> None:
    assert told_apart(HOUSE[1:]) == "attic, sofa"
    assert told_apart(HOUSE) == "aaaaaa (attic), aaaaaa (attic), sofa"


def test_a_node_is_called_what_it_was_called_as_it_came_in(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path).create()
    config = Config(state_dir=tmp_path)
    assert with_known_name(config, paths).name == config.name
    write_record(paths.hearth, HearthRecord("hh2abc", "Home", node_name="barn"))
    assert read_record(paths.hearth) == HearthRecord("hh2abc", "Home", node_name="barn")
    assert with_known_name(config, paths).name == "barn"
    assert with_known_name(Config(state_dir=tmp_path, name="loft"), paths).name == "loft"
