"""The verbs `log`, `queue --log` and `top`, against the real API in front of a scripted house."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mesh.hearth.listing import LogFilter
from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord
from tests.cli.conftest import COMMAND, Run
from tests.tui.conftest import OWNER, Daemon


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Daemon]:
    """A running API that the default state directory points to, with its owner's key."""
    served = Daemon()
    await served.start()
    await asyncio.to_thread(point_to, served, tmp_path / ".local/state/hearthnet")
    yield served
    await served.stop()


def point_to(served: Daemon, state_dir: Path) -> None:
    assert served.server is not None
    record = DaemonRecord.for_this_process(
        api_url=served.url, api_port=served.server.port, port=1, api_key=OWNER
    )
    record.write(StatePaths(state_dir).create().runtime_file)


async def test_the_signed_log_is_a_table_or_json(hearthnet: Run, house: Daemon) -> None:
    shown = await hearthnet("log", "--author", "sofa", "--type", "member", "--limit", "5")
    assert shown.code == 0
    head, row = shown.out.splitlines()
    assert head.split() == ["AT", "WHO", "TYPE", "SAYS"]
    assert row.split() == ["2030-01-01T12:00:00", "sofa", "member.added", "name=attic"]
    (wanted,) = house.hearth.wanted
    assert (wanted.author, wanted.kind, wanted.limit) == ("sofa", "member", 5)
    page = json.loads((await hearthnet("log", "--json")).out)
    assert [row["type"] for row in page["decisions"]] == ["member.added"]


@pytest.mark.parametrize(("flags", "end"), [([], b"---\n"), (["--json"], b"\n")])
async def test_the_queue_is_followed(
    hearthnet: Run, house: Daemon, environment: dict[str, str], flags: list[str], end: bytes
) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "queue", "--watch", *flags, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            first = await process.stdout.readuntil(end)
            assert (await hearthnet("kill", "1f" * 16)).code == 0
            second = await process.stdout.readuntil(end)
    finally:
        process.kill()
        await process.communicate()
    assert (first.count(b"RUNNING"), second.count(b"RUNNING")) == (2, 1)


async def test_two_ways_to_look_at_the_queue_exclude_each_other(hearthnet: Run) -> None:
    both = await hearthnet("queue", "--watch", "--log", "1f" * 16)
    assert (both.code, both.out) == (2, "")
    assert "exclude each other" in both.err


async def test_an_author_who_is_nobody_is_told_from_one_who_signed_nothing(
    hearthnet: Run, house: Daemon
) -> None:
    async def nothing(_: LogFilter) -> dict[str, Any]:
        return {"decisions": [], "facts": [], "next": None}

    house.hearth.log = nothing  # type: ignore[method-assign]
    for author in ("sofa", "att"):
        silent = await hearthnet("log", "--author", author)
        assert (silent.code, silent.out) == (0, "nothing in the log is of that kind\n")
    nobody = await hearthnet("log", "--author", "zz")
    assert (nobody.code, nobody.out) == (4, "")
    assert "Nobody here is called 'zz'." in nobody.err


async def test_a_member_is_put_out_after_a_yes_only(hearthnet: Run, house: Daemon) -> None:
    for answer, code in (("", 2), ("n\n", 1)):
        refused = await hearthnet("members", "revoke", "attic", stdin=answer)
        assert (refused.code, house.hearth.out) == (code, [])
        assert "Put attic out for good?" in refused.err
        assert ("fix:   Say it with --yes." in refused.err) == (answer == "")
    nobody = await hearthnet("members", "revoke", "atic")
    assert (nobody.code, "Put" in nobody.err) == (4, False)
    assert "Nobody here is called 'atic'." in nobody.err
    for arguments, answer in ((["--yes"], ""), ([], "y\n")):
        done = await hearthnet("members", "revoke", "attic", *arguments, "--json", stdin=answer)
        assert json.loads(done.out)["done"]
    assert house.hearth.out == ["attic", "attic"]


async def test_an_estimate_of_what_does_not_fit_ends_as_a_refused_deploy(
    hearthnet: Run, house: Daemon
) -> None:
    refused = await hearthnet("deploy", "huge", "--estimate", "--json")
    assert (refused.code, json.loads(refused.out)["refusal"]["code"]) == (5, "not_enough_memory")


async def test_names_with_commas_are_split_for_an_estimate(hearthnet: Run, house: Daemon) -> None:
    asked = ["--without", "attic, kitchen", "--without", "study", "--json"]
    assert (await hearthnet("deploy", "llama", "--estimate", *asked)).code == 0
    assert house.plans.orders[-1]["without"] == ["attic", "kitchen", "study"]


async def test_a_path_is_meant_from_where_it_is_written(hearthnet: Run, house: Daemon) -> None:
    """The daemon was started in another directory."""
    for written, meant in (("./toy=t", f"{os.getcwd()}/toy=t"), ("org/toy", "org/toy")):  # noqa: PTH109
        await hearthnet("deploy", written, "--estimate", "--json")
        assert house.plans.orders[-1]["model"] == meant


@pytest.mark.parametrize("verb", [["deploy", "llama"], ["scale", "llama", "2"], ["evict", "llama"]])
async def test_a_time_for_no_wait_is_refused(hearthnet: Run, verb: list[str]) -> None:
    refused = await hearthnet(*verb, "--timeout", "5")
    assert (refused.code, "--timeout goes with --wait" in refused.err) == (2, True)


async def test_what_a_job_printed_is_harmless(hearthnet: Run, house: Daemon) -> None:
    shown = await hearthnet("queue", "--log", "1f" * 16)
    assert (shown.code, shown.out) == (0, "layer 3\n[31mloss 0.25\n")
    found = json.loads((await hearthnet("queue", "--log", "1f" * 16, "--json")).out)
    assert found["dropped"] == 0


async def test_without_a_terminal_there_is_no_dashboard(hearthnet: Run) -> None:
    refused = await hearthnet("top")
    assert (refused.code, refused.out) == (2, "")
    assert "hearthnet status --json" in refused.err
