"""The quickstart, typed on two machines that have nothing: real mDNS, real pairing, one answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.namespaces import why_not
from tests.chaos.street import House, street, until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]
PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, House]]:
    if reason := why_not():
        pytest.skip(reason)
    with street(tmp_path, ("first", "second")) as houses:
        try:
            yield {house.name: house for house in houses}
        finally:
            for house in houses:
                said(house, "hearthnet down")


def script() -> list[tuple[str, str]]:
    """Machine and line, as the page has them."""
    return re.findall(r"^(first|second)\$ +(hearthnet .*)$", PAGE.read_text("utf-8"), re.MULTILINE)


def said(house: House, line: str, stdin: str = "") -> str:
    typed = house.type(line)
    out, _ = typed.communicate(stdin, timeout=120)
    return out


def test_two_machines_get_from_nothing_to_an_answer_that_both_computed(
    machines: dict[str, House],
) -> None:
    lines = script()
    assert [line.split()[1] for _, line in lines] == ["up", "invite", "join", "up", "chat"]
    (first, up), (_, invite), (second, join), (_, up_too), (_, chat) = lines

    assert "hearthnet up" in said(machines[first], "hearthnet")
    assert "recovery code" in said(machines[first], up)
    inviting = machines[first].type(invite)
    assert inviting.stdout is not None
    code = next(m[1] for line in inviting.stdout if (m := re.search(r"hearthnet join (\S+)", line)))
    assert "This node is in" in said(machines[second], join.replace("CODE", code))
    assert "joined as trusted" in inviting.communicate(timeout=60)[0]
    said(machines[second], up_too)
    until(lambda: "builtin answers." in said(machines[second], "hearthnet"), "both are found")
    answer = said(machines[second], chat, "What is hearthnet?\n/route\n")
    assert "mesh" in answer
    assert "0-3" in answer
    assert "4-7" in answer
