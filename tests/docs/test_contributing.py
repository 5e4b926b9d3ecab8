"""The map in CONTRIBUTING.md: each path that it sends people on leads where it says."""

from __future__ import annotations

import re

import pytest

from tests.docs.names import ROOT, names_in

_ROW = re.compile(r"^\| (\w[^|]+) \| ([^|]+) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[str, str]]:
    """What somebody wants to do, and the way there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return [row for row in _ROW.findall(text) if not row[0].startswith("where do I")]


@pytest.mark.parametrize(("task", "way"), rows(), ids=lambda text: text[:40])
def test_the_way_leads_there(task: str, way: str) -> None:
    names = _CODE.findall(way)
    assert "/" in names[0], f"the way to {task!r} does not begin with a file"
    path = ROOT
    for name in names:
        if "/" in name:
            path = ROOT / name
            assert path.exists(), name
        else:
            assert path.is_file(), f"{name} of {path}"
            assert name in names_in(path), f"{name} is not in {path.name}"


def test_the_map_is_read() -> None:
    assert len(rows()) > 20


def test_every_verb_of_the_command_line_is_one_line_in_main() -> None:
    """As the map says of a new one."""
    main = (ROOT / "mesh/cli/main.py").read_text(encoding="utf-8")
    verbs = {
        path.stem
        for path in (ROOT / "mesh/cli").glob("*.py")
        if path.stem in names_in(path) and path.stem != "main"
    }
    assert {verb for verb in verbs if f"{verb}." not in main} == set()
