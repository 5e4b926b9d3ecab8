"""`hearthnet top`: the dashboard. The only verb that imports textual."""

from __future__ import annotations

from mesh.cli.options import ApiPort, Host, StateDir, locate_daemon


def top(state_dir: StateDir = None, host: Host = None, api_port: ApiPort = None) -> None:
    """Watch the mesh: who is here, what is held, what runs and what slows it; chat, jobs, log."""
    import typer.main

    from mesh.cli.main import app
    from tui.app import TopApp

    commands = getattr(typer.main.get_command(app), "commands", {})
    verbs = {name: (command.help or "").partition("\n")[0] for name, command in commands.items()}
    TopApp(lambda: locate_daemon(state_dir, host, api_port), verbs).run()
