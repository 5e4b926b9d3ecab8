"""Writes docs/reference/ from the code: ``python docs/generate.py [--check]``.

With ``--check`` nothing is written; the exit status is 1 when a page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isinf
from pathlib import Path
from typing import Any

import api_page
import click
import dashboard
import typer
import wire_page
from pydantic import BaseModel

from mesh import errors
from mesh.accounts import allowances
from mesh.accounts.ledger import Limit, Limits
from mesh.cli.main import app
from mesh.config import Config
from mesh.config.problems import meanings
from mesh.health.series import PRESENT, SERIES

REFERENCE = Path(__file__).parent / "reference"
HEAD = "<!-- Written by docs/generate.py; edit the code instead. -->\n\n"


def errors_page() -> str:
    rows = ["# Errors", "", "| code | HTTP | try again | meaning |", "|---|---|---|---|"]
    seen: dict[tuple[str, str], str] = {}
    for kind in _subclasses(errors.MeshError):
        if kind.__subclasses__() and kind.code in {"bad_config", "wire_error", "route_error"}:
            continue
        meaning = " ".join((kind.__doc__ or "").split())
        retry = "yes" if kind.retryable else "no"
        seen[kind.code, kind.__name__] = (
            f"| `{kind.code}` | {kind.http_status} | {retry} | {meaning} |"
        )
    return "\n".join([*rows, *(row for _, row in sorted(seen.items()))]) + "\n"


def config_page() -> str:
    lines = [
        "# Settings",
        "",
        "Defaults < TOML file < `HEARTHNET_...` environment < command-line flag.",
        "The file is `~/.config/hearthnet/config.toml` (macOS: `~/Library/Application "
        "Support/hearthnet/config.toml`), or the one that `--config` or `HEARTHNET_CONFIG` names.",
        "`hearthnet config show --origin` prints the values in force and where each comes from;",
        "`hearthnet config set KEY VALUE` checks a value and writes it, `config edit` opens the file.",
        "A daemon reads its settings when it starts: `hearthnet restart` after a change.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    said = meanings(Config)
    for key, field in _fields(Config):
        default = "" if field.default_factory is not None else f"`{field.default!r}`"
        lines.append(f"| `{key}` | {default} | {said[key]} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    command = typer.main.get_command(app)
    pages = ["# Commands", ""]
    for name, path, each in _commands("hearthnet", command):
        context = click.Context(each, info_name=path, terminal_width=90, max_content_width=90)
        del name
        pages += [f"## `{path}`", "", each.help or "", ""]
        for parameter in each.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                pages.append(f"- `{record[0]}` {record[1]}".rstrip())
        pages.append("")
    return "\n".join(pages)


def limits_page() -> str:
    lines = [
        "# Limits",
        "",
        "What one principal may hold, or use in the time that the name says, and all together, in "
        "each process. [Why, and what happens at the limit](../explanation/limits.md). Streams, "
        "cache positions, sessions of interventions, and what API keys may, are "
        "[settings](config.md).",
    ]
    for title, limits in LIMITS.items():
        lines += ["", f"## {title}", "", "| resource | each | all together | then refused for |"]
        lines += ["|---|---|---|---|", *(_row(resource, limits[resource]) for resource in limits)]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` gives these to Prometheus. A counter's `_total` counts up; of a histogram "
        "there are `_bucket`, `_sum` and `_count`. Where the API needs a key, this needs one, too. "
        "Nothing says who asked ([why](../decisions/no-caller-in-metrics.md)). A node counts what "
        "its own callers asked for, and what its own shards hold.",
        "",
        "A scrape job, and [a Grafana dashboard](grafana.json) (Dashboards, New, Import):",
        "",
        "```yaml",
        "scrape_configs:",
        "  - job_name: hearthnet",
        "    static_configs:",
        '      - targets: ["127.0.0.1:8420"]',
        "```",
        "",
        "Beyond loopback add `scheme: https`, `authorization: {credentials: hn_...}` and"
        " `tls_config: {ca_file: api-cert.pem}` ([more](../how-to/reach-the-api.md)).",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for each in (*SERIES, *PRESENT):
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.shown}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(lines) + "\n"


LIMITS: dict[str, Limits] = {
    "The daemon": allowances.DAEMON,
    "A shard": allowances.SHARDS,
    "A model's asker": allowances.ASKER,
    "The jobs": allowances.JOBS,
}

PAGES = {
    "errors.md": errors_page,
    "config.md": config_page,
    "cli.md": cli_page,
    "limits.md": limits_page,
    "wire.md": wire_page.page,
    "metrics.md": metrics_page,
    "grafana.json": dashboard.page,
    "api.md": api_page.page,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, (HEAD if name.endswith(".md") else "") + page()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not check:
            REFERENCE.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `make docs`\n")
    return 1 if stale else 0


def _row(resource: str, limit: Limit) -> str:
    def amount(value: float) -> str:
        if isinf(value):
            return "no limit"
        return f"{value / (1 << 20):g} MiB" if "bytes" in resource else f"{value:,g}"

    kinds = "".join(f", a {kind} {amount(value)}" for kind, value in limit.kinds.items())
    cooldown = f"{limit.cooldown_s:g} s" if limit.cooldown_s else ""
    each = amount(limit.each) + kinds
    return f"| `{resource}` | {each} | {amount(limit.total)} | {cooldown} |"


def _subclasses(kind: type[errors.MeshError]) -> Iterator[type[errors.MeshError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _commands(path: str, command: Any) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(command, click.Group) and not hasattr(command, "commands"):
        yield path, path, command
        return
    if command.invoke_without_command:
        yield path, path, command
    for name, child in sorted(command.commands.items()):
        yield from _commands(f"{path} {name}", child)


if __name__ == "__main__":
    sys.exit(main())
