"""Makes the dashboard's pictures from a real mesh of three nodes: ``python docs/pictures.py``.

They go to docs/pictures/ as SVG, which Textual exports. The answer that is seen running is real,
and so is the node that is lost on the last of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from pathlib import Path

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.client import Client, client_of
from tui.app import TopApp
from tui.picture import Picture

PICTURES = Path(__file__).parent / "pictures"
SIZE = (100, 30)
PATIENCE_S = 60.0
LAYERS = {"sofa": "0-3", "attic": "3-7", "kitchen": "4-7"}
PROMPT = "Tell me a story about a house in the evening."


async def until(app: TopApp, wanted: Callable[[Picture], object]) -> None:
    """Wait for a picture. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(app.picture):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{wanted} did not come: {app.picture}")
        await asyncio.sleep(0.05)


async def ask(client: Client) -> None:
    """An answer that runs for a while, read slowly."""
    options = {"max_tokens": 3500, "temperature": 0.9, "seed": 1}
    chunks = client.complete("builtin", PROMPT, **options, ignore_eos=True)
    async with aclosing(chunks):
        async for _ in chunks:
            await asyncio.sleep(0.02)


async def take(nodes: list[LocalNode]) -> None:
    """All pictures, in one run of the app."""
    sofa = nodes[0]

    def connect() -> Client:
        return client_of(sofa.record)

    def keep(app: TopApp, name: str) -> None:
        svg = app.export_screenshot(title="hearthnet top", simplify=True)
        (PICTURES / f"{name}.svg").write_text(svg, "utf-8")

    app = TopApp(connect)
    async with app.run_test(size=SIZE) as pilot, connect() as client:
        await until(app, lambda picture: len(picture.rows("peers")) == 2)
        await until(app, lambda picture: any(m["runnable"] for m in picture.rows("models")))
        running = asyncio.create_task(ask(client), name="ask")
        await until(app, lambda picture: any(
            row.get("tokens", 0) > 40 for row in picture.rows("generations")))  # fmt: skip
        await pilot.pause(0.5)
        keep(app, "top")
        await pilot.press("f4", *"Who are you?", "enter")
        await pilot.pause(4.0)
        keep(app, "top-chat")
        await pilot.press("f1")
        serving = app.picture.rows("generations")[0]["route"][-1]["node"]
        next(node for node in nodes if node.name == serving).kill()
        await until(app, lambda picture: any(
            row["state"] != "up" for row in picture.rows("peers")))  # fmt: skip
        await pilot.pause(2.0)
        keep(app, "top-a-node-is-lost")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def main() -> int:
    """Start the mesh, take the pictures, end it."""
    PICTURES.mkdir(exist_ok=True)
    os.environ.pop("NO_COLOR", None)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        nodes = [
            LocalNode(name, Path(root) / name, ("--layers", layers, "--threads", "1"))
            for name, layers in LAYERS.items()
        ]
        start_hearth(nodes, stack)
        for node in nodes:
            node.wait_ready(60.0)
        asyncio.run(take(nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
