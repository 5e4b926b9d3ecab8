"""Following a deployment on its way up, in virtual time, by what the daemon says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mesh.cli.bringing_up import bring_up
from mesh.cli.deploying import EVICTED_S, PlacedSpan, follow, until_unloaded
from mesh.errors import DiskFull, NoRoute, NotReady
from tests.simulation.virtual_loop import run_virtually
from tests.tui.house import deployment, span

NAME = "d" * 16


class Said:
    """A client to a daemon that says `at` what time how far one deployment is."""

    def __init__(self, at: Callable[[float], dict[str, Any]]) -> None:
        self._at = at

    async def deployments(self) -> list[dict[str, Any]]:
        """See `Client`."""
        now = asyncio.get_running_loop().time()
        return [{"error": None, **self._at(now)}]


def row(phase: str, *, done: int = 0, reason: str | None = None) -> dict[str, Any]:
    on = span(0, "s", "sofa", "0-3", phase, (done, 100), reason)
    return deployment(NAME, "toy", (int(phase == "READY"), 1), phase, "COLD", [on], "0-3")


async def followed(at: Callable[[float], dict[str, Any]]) -> float:
    """After how many seconds it is up."""
    await follow(Said(at), NAME)  # type: ignore[arg-type]
    return asyncio.get_running_loop().time()


def test_what_fails_again_and_again_is_given_up() -> None:
    """Each try waits two minutes for somebody who has it, and says for a moment that it failed."""

    def at(now: float) -> dict[str, Any]:
        fails = now % 122 > 120
        return row("FAILED", reason="nobody has it") if fails else row("PROVISIONING")

    async def main() -> None:
        async with asyncio.timeout(250):
            with pytest.raises(NoRoute, match="sofa cannot hold layers 0-3: nobody has it"):
                await followed(at)

    run_virtually(main)


def test_what_fails_is_said_as_what_it_is() -> None:
    full = DiskFull("The disk of /models is full.", fix="Free some room.")
    failed = {**row("FAILED", reason=str(full))}
    failed["spans"] = [{**failed["spans"][0], "error": full.to_dict()}]

    async def main() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(DiskFull) as caught:
                await followed(lambda now: failed)
        assert caught.value.message == "sofa cannot hold layers 0-3: The disk of /models is full."
        assert caught.value.fix.startswith("Free some room. It is tried again by itself")

    run_virtually(main)


def test_what_gets_on_between_two_failures_is_waited_for() -> None:
    def at(now: float) -> dict[str, Any]:
        if now > 600:
            return row("READY")
        if now % 122 > 120:
            return row("FAILED", reason="nobody has it")
        return row("PROVISIONING", done=int(now) % 100)

    assert 600 < run_virtually(lambda: followed(at)) < 602


def test_what_rests_meanwhile_is_not_waited_for() -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(NotReady, match="toy rests again"):
                await followed(lambda now: row("PROVISIONING" if now < 9 else "RESTING"))

    run_virtually(main)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        ("READY", None),  # evicted, or nobody knows of its layers here yet
        ("READY", {"id": "toy", "local": True, "reason": "missing layers 0-3; failed: no room"}),
        ("RESTING", {"id": "toy", "local": True, "reason": "resting"}),
    ],
)
def test_whatever_keeps_a_model_that_was_brought_up_is_said_by_asking_it(
    state: str, model: dict[str, Any] | None
) -> None:
    class Daemon(Said):
        async def models(self) -> list[dict[str, Any]]:
            """See `Client`."""
            return [] if model is None else [{**model, "runnable": False}]

        async def deploy(self, model: str) -> dict[str, Any]:
            """See `Client`."""
            return row("QUEUED")

    async def main() -> str:
        async with asyncio.timeout(60):
            client = Daemon(lambda now: {**row(state), "missing": []})
            return await bring_up(client, "toy", NoRoute("not up", fix="Wait."))  # type: ignore[arg-type]

    assert run_virtually(main) == "toy"


def test_layers_that_are_held_by_hand_are_not_waited_for_long() -> None:
    """They are those of the second machine; the first lets go of its own after a while."""
    held = [PlacedSpan(name, name, "toy", "0-3") for name in ("attic", "sofa")]
    shards = [{"model_id": "toy", "layers": "0-3"}]

    class Client:
        async def status(self) -> dict[str, Any]:
            """See `Client`."""
            now = asyncio.get_running_loop().time()
            peer = {"id": "sofa", "shards": shards}
            return {"node": {"id": "attic"}, "shards": shards if now < 20 else [], "peers": [peer]}

    async def main() -> float:
        with pytest.raises(NotReady, match="sofa still serves layers 0-3 of toy") as caught:
            await until_unloaded(Client(), held, patience_s=EVICTED_S)  # type: ignore[arg-type]
        assert "by hand" in caught.value.fix
        return asyncio.get_running_loop().time()

    assert 20 + EVICTED_S <= run_virtually(main) < 21 + EVICTED_S
