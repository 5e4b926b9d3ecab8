"""`hearthnet keys`, with a daemon and without one."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.identity.api_keys import new_owner_key
from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord
from tests.api.conftest import SETTINGS, Served, serving
from tests.cli.conftest import Run

OWNERS = new_owner_key()


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[Served]:
    """A running API whose owner's key is in the default state directory's runtime file."""
    async with serving(replace(SETTINGS, api_key=OWNERS)) as served:
        await asyncio.to_thread(_write_record, served, tmp_path / ".local/state/hearthnet")
        yield served


def _write_record(served: Served, state_dir: Path) -> None:
    record = DaemonRecord.for_this_process(
        api_url=served.url, api_port=served.server.port, port=1, api_key=OWNERS
    )
    record.write(StatePaths(state_dir).create().runtime_file)


async def test_keys_are_made_listed_and_revoked_through_the_daemon(
    hearthnet: Run, owned: Served
) -> None:
    made = await hearthnet(
        "keys", "create", "--name", "lab", "--scope", "chat,admin", "--scope", "interventions",
        "--trusted", "--quota", "requests=60", "--quota", "tokens=1000", "--json",
    )  # fmt: skip
    key = json.loads(made.out)
    kept = owned.keys.verify(key["key"])
    assert (kept.name, sorted(kept.scopes), kept.trusted) == (
        "lab", ["admin", "chat", "interventions"], True,
    )  # fmt: skip
    assert (kept.requests_per_minute, kept.tokens_per_day) == (60, 1000)
    # Found by address too: the key goes to the daemon that wrote it down.
    listed = await hearthnet("keys", "list", "--host", owned.url)
    assert (
        f"{kept.id}  lab   admin, chat, interventions (trusted)  60 requests a minute" in listed.out
    )
    assert key["key"] not in listed.out
    revoked = await hearthnet("keys", "revoke", kept.id)
    assert revoked.code == 0
    assert owned.keys.keys == ()


async def test_the_owners_key_goes_to_no_other_address(hearthnet: Run, owned: Served) -> None:
    async with serving(replace(SETTINGS, api_key=new_owner_key())) as other:
        refused = await hearthnet("keys", "list", "--host", other.url)
        assert refused.code == 6
        assert "unauthorized" in refused.err


async def test_keys_are_made_and_revoked_without_a_daemon(hearthnet: Run, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    where = ("--state-dir", str(state_dir))
    made = await hearthnet("keys", "create", *where)
    (key,) = made.out.splitlines()
    assert key.startswith("hn_")
    assert "shown once" in made.err
    file = StatePaths(state_dir).api_keys
    assert stat.S_IMODE((await asyncio.to_thread(file.stat)).st_mode) == 0o600
    (row,) = json.loads((await hearthnet("keys", *where, "--json")).out)["keys"]
    assert (row["name"], row["scopes"]) == ("key", ["chat"])
    assert (await hearthnet("keys", "revoke", row["id"], *where)).code == 0
    assert (await hearthnet("keys", "revoke", row["id"], *where)).code == 4
    assert json.loads((await hearthnet("keys", *where, "--json")).out) == {"keys": []}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--scope", "root"),
        ("--quota", "60"),
        ("--quota", "requests=0"),
        ("--quota", f"requests={'9' * 5000}"),
        ("--name", ""),
    ],
    ids=lambda wrong: wrong[1][:10],
)
async def test_unusable_wishes_are_refused(
    wrong: tuple[str, str], hearthnet: Run, tmp_path: Path
) -> None:
    refused = await hearthnet("keys", "create", *wrong, "--state-dir", str(tmp_path / "state"))
    assert refused.code == 2
    assert "error:" in refused.err
