"""`hearthnet down`: stops the daemon of a state directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.options import StateDir, finite, running_daemon, state_paths
from mesh.cli.output import note

if TYPE_CHECKING:
    from mesh.runtime import DaemonRecord

ENDING_S = 30.0
"""For the processes and the network, beside what running answers get."""
_KILLING_S = 10.0
_POLL_S = 0.05
_SILENT_S = 2.0
"""Who waits longer is told what for."""


StopTimeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.0,
        callback=finite,
        help="Then it is killed; by default when its drain_seconds are long over.",
    ),
]


def down(state_dir: StateDir = None, timeout: StopTimeout = None) -> None:
    """Stop the daemon; running answers move to other nodes first, or end here."""
    from mesh.cli.service_managers import manager_of

    record = running_daemon(state_paths(state_dir), "There is nothing to stop")
    manager = manager_of(record.pid)
    end_daemon(record, timeout)
    if manager is None:
        note("stopped")
        return
    manager.stop()  # or it would start anew what had to be killed
    note(f"stopped; {manager.name} starts it {manager.starts_when()}, or now:")
    note(f"  {manager.how_to_start()}")


def end_daemon(record: DaemonRecord, timeout: float | None, *, ending_s: float = ENDING_S) -> None:
    """Have it stop, and kill it when it has not after `timeout` seconds; by default after its drain
    and `ending_s`."""
    import psutil

    from mesh.errors import Busy

    # Jobs and then streams of the API may each take all of it.
    wait_s = 2 * record.drain_s + ending_s if timeout is None else timeout
    try:
        process = psutil.Process(record.pid)
        process.terminate()
        quiet_s = min(_SILENT_S, wait_s)
        if not _ends(record, quiet_s) and wait_s > quiet_s:
            note(f"stopping; what runs may end or move elsewhere first, for {wait_s:g} s at most")
        if not _ends(record, wait_s - quiet_s):
            note(f"The daemon did not stop within {wait_s:g} s; killing it.")
            process.kill()
            if not _ends(record, _KILLING_S):
                raise Busy(
                    f"The daemon was killed and has not ended after {_KILLING_S:g} s.",
                    fix="It waits for a disk or a device; see what that lacks.",
                )
    except psutil.NoSuchProcess:
        pass  # it went by itself, which is what was wanted


def _ends(record: DaemonRecord, within_s: float) -> bool:
    """Whether it ends in time. Who started it need not have noticed: in a container the first
    process often never does."""
    deadline_s = time.monotonic() + within_s
    while record.is_alive:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
