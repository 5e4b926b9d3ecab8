"""`hearthnet top`: the dashboard. The only verb that imports textual."""

from __future__ import annotations

import sys

from mesh.cli.options import ApiPort, Host, StateDir, locate_daemon
from mesh.errors import BadValue


def top(state_dir: StateDir = None, host: Host = None, api_port: ApiPort = None) -> None:
    """Watch the mesh: who is here, what is held, what runs and what slows it; chat, jobs, log."""
    from mesh.config import terminal_features

    moves_cursor, _ = terminal_features()
    if not (sys.stdin.isatty() and sys.stdout.isatty() and moves_cursor):
        raise BadValue(
            "`hearthnet top` draws on a terminal, and here is none that can be drawn on.",
            fix="Use `hearthnet status --watch`, or `hearthnet status --json` in scripts.",
            param="terminal",
        )

    from tui.app import TopApp

    TopApp(lambda: locate_daemon(state_dir, host, api_port), _verbs).run()


def _verbs() -> dict[str, str]:
    """Each verb with the first line of its help."""
    import typer.main

    from mesh.cli.main import app

    commands = getattr(typer.main.get_command(app), "commands", {})
    return {name: (command.help or "").partition("\n")[0] for name, command in commands.items()}
