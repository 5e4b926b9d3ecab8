"""`hearthnet config`: the settings in effect, where each came from, and their file changed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import ConfigFile, Json, StateDir, prompted
from mesh.cli.output import note, print_json, print_table, report, say
from mesh.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from mesh.config import Settings

app = typer.Typer(cls=VerbGroup, help="Settings.", no_args_is_help=True)

_HEADER = "# Settings of hearthnet; `hearthnet config show` prints all keys and what is in force.\n"
_EDITORS = ("sensible-editor", "nano", "vi", "notepad")
Key = Annotated[str, typer.Argument(metavar="KEY", help="As `hearthnet config show` prints it.")]


@app.callback()
def group() -> None:
    """Settings: defaults, then the TOML file, then HEARTHNET_... variables, then flags."""


@app.command()
def show(
    config: ConfigFile = None,
    state_dir: StateDir = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value is from.")] = False,
    as_json: Json = False,
) -> None:
    """Print the settings that `hearthnet up` would use."""
    from mesh.config import flatten, load_config

    loaded = load_config({"state_dir": state_dir}, file=config)
    values = flatten(loaded.config)
    if values["api_key"] is not None:
        values["api_key"] = "(set)"
    if "@" in values["coordination.redis_url"]:
        values["coordination.redis_url"] = "(set)"
    if as_json:
        rows: dict[str, Any] = values
        if origin:
            rows = {k: {"value": v, "origin": loaded.origins[k]} for k, v in values.items()}
        print_json(rows)
        return
    say(_source(loaded))
    columns = ("KEY", "VALUE", "ORIGIN") if origin else ("KEY", "VALUE")
    print_table(
        columns,
        [(key, _text(value), loaded.origins[key])[: len(columns)] for key, value in values.items()],
    )


@app.command()
def path(config: ConfigFile = None) -> None:
    """Print which file is read; where there is none, the one that would be."""
    from mesh.config import config_place

    file = config_place(config)
    say(str(file))
    if not file.exists():
        note("It is not there: the defaults are in force. `hearthnet config set` makes it.")


@app.command("set")
def set_value(
    key: Key,
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="A list as A,B or as a TOML array.")
    ],
    config: ConfigFile = None,
) -> None:
    """Set one key in the file; comments and order stay.

    The value is checked as `hearthnet up` would, and nothing is written when it cannot be used.
    Write `--` before a VALUE that begins with a dash.
    """
    from mesh.config import config_place
    from mesh.config.editing import read_text, with_value

    file = config_place(config)
    text = read_text(file)
    draft, settings = with_value(file, text or _HEADER, key, value)
    _write(file, draft, settings)
    _note_hidden(key, file, settings)


@app.command()
def unset(key: Key, config: ConfigFile = None) -> None:
    """Take one key out of the file, so that its default is in force again."""
    from mesh.config import config_place
    from mesh.config.editing import read_text, without_key

    file = config_place(config)
    draft, settings = without_key(file, read_text(file), key)
    _write(file, draft, settings)
    _note_hidden(key, file, settings)


@app.command()
def edit(config: ConfigFile = None) -> None:
    """Open the file in VISUAL or EDITOR; what was saved is checked before it takes its place."""
    from mesh.config import config_place, read_as
    from mesh.config.editing import read_text

    file = config_place(config)
    command, text = _editor(), read_text(file)
    with tempfile.TemporaryDirectory(prefix="hearthnet-config-") as directory:
        draft = Path(directory) / file.name  # 0700, so nobody else reads it
        draft.write_bytes((text or _HEADER).encode())
        while True:
            _let_edit(command, draft)
            changed = read_text(draft)
            if changed in {text, "" if text else _HEADER}:
                note(f"Nothing was changed: {file}")
                return
            try:
                settings = read_as(file, changed)
            except ConfigError as error:
                report(error)
                if _is_to_go_on():
                    continue
                raise BadRequest(
                    f"{file} is as it was: what was saved cannot be used.",
                    fix="Edit again, or set one key: `hearthnet config set KEY VALUE`.",
                ) from None
            _write(file, changed, settings, expected=text)
            return


def _write(file: Path, draft: str, settings: Settings, expected: str | None = None) -> None:
    """Put it in its place, and say when it is in force."""
    from mesh.config.editing import read_text, replace_file
    from mesh.paths import StatePaths
    from mesh.runtime import read_daemon

    there = file.exists()
    before = read_text(file) if expected is None else expected
    replace_file(file, draft, before if there else None)
    say(f"written: {file}")
    daemon = read_daemon(StatePaths(settings.config.state_dir).runtime_file)
    if daemon is not None:
        note(
            f"The daemon that runs (process {daemon.pid}) has read its settings when it started:"
            " `hearthnet restart` has it read them again."
        )


def _note_hidden(key: str, file: Path, settings: Settings) -> None:
    """Say where something else than the file decides."""
    origin = settings.origins[key]
    if origin not in {str(file), "default"}:
        note(f"{origin} is set as well, and goes before the file.")


def _source(loaded: Settings) -> str:
    from mesh.config import config_place

    if loaded.file is not None:
        return f"file: {loaded.file}"
    return f"file: none, {config_place()} is not there"


def _editor() -> list[str]:
    import shutil

    from mesh.config import editor

    found = editor() or [each for each in _EDITORS if shutil.which(each)][:1]
    if not found:
        raise BadRequest(
            "There is no editor.", fix="Set EDITOR, or use `hearthnet config set KEY VALUE`."
        )
    return found


def _let_edit(command: list[str], draft: Path) -> None:
    try:
        status = subprocess.run([*command, str(draft)], check=False).returncode
    except OSError as error:
        raise BadRequest(
            f"The editor {command[0]} cannot be started: {error.strerror or error}.",
            fix="Set EDITOR to one that can.",
        ) from None
    if status != 0:
        raise BadRequest(
            f"The editor {command[0]} ended with {status}; nothing was written.", fix="Edit again."
        )


def _is_to_go_on() -> bool:
    """Whether somebody is there who wants to edit again."""
    if not sys.stdin.isatty():
        return False
    return prompted(typer.confirm, "Edit again?", default=True)


def _text(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
