"""`hearthnet config show`: the settings in effect and where each came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.options import ConfigFile, Json, StateDir
from mesh.cli.output import print_json, print_table

app = typer.Typer(help="Settings.", no_args_is_help=True)


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
    columns = ("KEY", "VALUE", "ORIGIN") if origin else ("KEY", "VALUE")
    print_table(
        columns,
        [(key, _text(value), loaded.origins[key])[: len(columns)] for key, value in values.items()],
    )


def _text(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
