"""`hearthnet config`: the file is found, changed and checked."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

from tests.api.conftest import Served
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal

PLACE = ".config/hearthnet/config.toml"


async def test_a_key_is_set_in_a_new_file_and_unset_again(hearthnet: Run, tmp_path: Path) -> None:
    place = await hearthnet("config", "path")
    assert (place.code, place.out) == (0, f"{tmp_path / PLACE}\n")
    assert "It is not there" in place.err
    assert "file: none" in (await hearthnet("config", "show")).out
    done = await hearthnet("config", "set", "port", "9000")
    assert (done.code, done.out, done.err) == (0, f"written: {tmp_path / PLACE}\n", "")
    text = await asyncio.to_thread((tmp_path / PLACE).read_text)
    assert text.endswith("port = 9000\n")
    shown = await hearthnet("config", "show", "--origin")
    assert shown.out.splitlines()[0] == f"file: {tmp_path / PLACE}"
    (row,) = (line.split() for line in shown.out.splitlines() if line.startswith("port "))
    assert row == ["port", "9000", str(tmp_path / PLACE)]
    assert (await hearthnet("config", "unset", "port")).code == 0
    assert "9000" not in await asyncio.to_thread((tmp_path / PLACE).read_text)


async def test_what_cannot_be_used_is_not_written(hearthnet: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    await asyncio.to_thread(file.write_text, "port = 1  # mine\n")
    refused = await hearthnet("config", "set", "port", "70000", "--config", str(file))
    assert (refused.code, "65535" in refused.err) == (2, True)
    assert await asyncio.to_thread(file.read_text) == "port = 1  # mine\n"
    unknown = await hearthnet("config", "set", "xyz.q", "7", "--config", str(file))
    assert (unknown.code, "There are: state_dir, name," in unknown.err) == (2, True)
    hidden = await hearthnet("config", "set", "port", "7", HEARTHNET_CONFIG=str(file),
                             HEARTHNET_PORT="8")  # fmt: skip
    assert "HEARTHNET_PORT is set as well, and goes before the file." in hidden.err
    assert await asyncio.to_thread(file.read_text) == "port = 7  # mine\n"


async def test_who_runs_already_has_to_be_restarted(hearthnet: Run, daemon: Served) -> None:
    done = await hearthnet("config", "set", "log_level", "debug")
    assert done.code == 0
    assert "`hearthnet restart` has it read them again" in done.err


def editor(tmp_path: Path, *contents: str) -> str:
    """A command that writes each of these in turn to the file that it is called with."""
    script = tmp_path / "editor.py"
    script.write_text(
        "import sys, pathlib\n"
        f"turns, count = {list(contents)!r}, pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = len(count.read_text()) if count.exists() else 0\n"
        "count.write_text('x' * (number + 1))\n"
        "pathlib.Path(sys.argv[1]).write_text(turns[number])\n"
    )
    return shlex.join([sys.executable, str(script)])


async def test_an_edited_file_is_checked_before_it_takes_its_place(
    hearthnet: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    command = await asyncio.to_thread(editor, tmp_path, "port = x\n", "prot = 1\n", "port = 5\n")
    refused = await hearthnet("config", "edit", EDITOR=command)
    assert refused.code == 2
    assert "is as it was" in refused.err
    assert not await asyncio.to_thread((tmp_path / PLACE).exists)
    async with Terminal(environment | {"EDITOR": command}, "config", "edit") as terminal:
        await terminal.until("Edit again?")
        terminal.type("y\n")
        await terminal.until("written:")
        assert await terminal.process.wait() == 0
    assert await asyncio.to_thread((tmp_path / PLACE).read_text) == "port = 5\n"
    gone = await hearthnet("config", "edit", EDITOR="/nowhere/vi")
    assert "cannot be started" in gone.err
