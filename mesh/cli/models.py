"""`hearthnet models`."""

from __future__ import annotations

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json
from mesh.cli.status import print_models


def models(
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
) -> None:
    """List the models of the mesh and what keeps each from answering."""
    found = ask(locate_daemon(state_dir, host, api_port), lambda client: client.models())
    if as_json:
        print_json({"models": found})
    else:
        print_models(found)
