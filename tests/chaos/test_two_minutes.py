"""The quickstart, typed on two machines that have nothing: real mDNS, real pairing, one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.cgroups import limited_group
from tests.chaos.namespaces import why_not
from tests.chaos.street import STREET, House, street
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import hugging_face
from tests.transfers.hub_standin import HubStandin
from tests.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
PROMPT = "The kettle"
SLOWEST_S = 900
"""A fetch has the processor when nobody else wants it: beside ten that do, minutes for 0.8 GB."""
LAYERS = 16
MEMORY_MB = 2250
"""Two thirds of which are free beside a node; the model takes 1.9 GB, most of that for caches."""
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


def script(who: str = "first|second") -> list[tuple[str, str]]:
    """Machine and line, as the page has them."""
    lines = PAGE.read_text("utf-8")
    return re.findall(rf"^({who})\$ +(hearthnet .*)$", lines, re.MULTILINE)


def said(house: House, line: str, stdin: str = "") -> str:
    typed = house.type(line)
    out, _ = typed.communicate(stdin, timeout=SLOWEST_S)
    return out


def found_each_other(machines: dict[str, House]) -> str:
    """Type the page up to its chat; returns that line."""
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
    wait_until(lambda: "builtin answers." in said(machines[second], "hearthnet"), "both are found")
    return chat


def test_two_machines_get_from_nothing_to_an_answer_that_both_computed(
    machines: dict[str, House],
) -> None:
    chat = found_each_other(machines)
    answer = said(machines["second"], chat, "What is hearthnet?\n/route\n")
    assert "mesh" in answer
    assert "0-3" in answer
    assert "4-7" in answer


def test_two_machines_share_a_model_that_neither_has_or_could_hold(
    machines: dict[str, House], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(
        tmp_path / "toy", "llama", layers=LAYERS, hidden=1024, intermediate_size=2816
    )
    with ExitStack() as stack:
        hub = stack.enter_context(HubStandin(checkpoint, host=STREET))
        for house in machines.values():
            house.group = stack.enter_context(limited_group(MEMORY_MB, house.name))
            house.environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
            stack.callback(said, house, "hearthnet down")
        found_each_other(machines)
        ((_, run),) = script("either")
        line = re.sub(r"\S+$", "org/toy", run)
        ran = said(machines["second"], f"{line} --raw --ignore-eos --max-tokens 8 --json", PROMPT)
        facts = json.loads(ran[ran.index("{\n") :])["hearthnet"]
        assert len(facts["route"]) == 2, ran  # both are called as this machine is
        prompt = AutoTokenizer.from_pretrained(checkpoint).encode(PROMPT)
        assert facts["token_ids"] == hugging_face(checkpoint, prompt, 8)[0]
