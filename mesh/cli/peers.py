"""`hearthnet peers`."""

from __future__ import annotations

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json
from mesh.cli.status import print_peers


def peers(
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
) -> None:
    """List the other nodes and the layers each holds."""
    found = ask(locate_daemon(state_dir, host, api_port), lambda client: client.peers())
    if as_json:
        print_json({"peers": found})
    else:
        print_peers(found)
