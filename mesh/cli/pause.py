"""`hearthnet pause` and `hearthnet resume`: step aside for a while, as before a sleep."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import StateDir, ask, finite, running_daemon, state_paths
from mesh.cli.output import note

if TYPE_CHECKING:
    from mesh.client import Client
    from mesh.runtime import DaemonRecord

_LOOK_S = 0.1


def pause(
    state_dir: StateDir = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            callback=finite,
            help="How long to wait for answers to move.",
        ),
    ] = 10.0,
) -> None:
    """Serve nobody for now: running answers move to other nodes. For sleep hooks.

    Returns when they have moved, or after the timeout.
    """
    from mesh.client import client_of

    record = _signal(state_dir, signal.SIGUSR1, "There is nothing to pause")
    client = client_of(record)
    left = ask(client, lambda client: _wait_until_idle(client, timeout))
    note("paused; `hearthnet resume` serves again")
    if left:
        note(f"still running here after {timeout:g} s: {left}")


def resume(state_dir: StateDir = None) -> None:
    """Serve again after `pause`, and try again at once what could not be loaded."""
    _signal(state_dir, signal.SIGUSR2, "Start one with `hearthnet up`")
    note("serving again")


async def _wait_until_idle(client: Client, timeout_s: float) -> str:
    """What runs on this node's layers when it is idle or the time is over; empty when nothing."""
    import asyncio

    left = "it did not say"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while left:
                picture = await client.status()
                left = _running(picture) if picture["node"]["paused"] else "it is about to pause"
                if left:
                    await asyncio.sleep(_LOOK_S)
    return left


def _running(picture: dict[str, Any]) -> str:
    streams = sum(shard["active_streams"] for shard in picture["shards"])
    traces = sum(session["purpose"] == "taps" for session in picture["sessions"])
    counts = {"streams of answers": streams, "sessions of traces": traces}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _signal(state_dir: Path | None, number: signal.Signals, otherwise: str) -> DaemonRecord:
    record = running_daemon(state_paths(state_dir), otherwise)
    os.kill(record.pid, number)
    return record
