"""Fetchers for tests: real processes on loopback, each with an identity, that trust one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.discovery.weights import HeldWeights
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsMaterial
from mesh.transfers.commands import LocalCheckpoint, PeerHolding, StartFetcher
from mesh.transfers.hub import HubSettings
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import Endpoint, ModelId
from mesh.wire.messages import Hello

MODEL = ModelId("toy")


@dataclass(slots=True)
class Fetcher:
    """One node's fetcher, and what it said for people."""

    name: str
    key: NodeKey
    supervisor: FetcherSupervisor
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def holding(self, *, endpoint: str | None = None) -> list[PeerHolding]:
        """As its daemon would advertise it."""
        where = endpoint or f"wss://127.0.0.1:{self.supervisor.port}"
        return [
            PeerHolding(
                self.key.node_id, self.name,
                HeldWeights(
                    ModelId(held.model_id), held.weights_sha256, held.total_layers,
                    held.layers, held.ends, Endpoint(where), held.origin,
                    held.files_sha256,
                ),
            )
            for held in self.supervisor.holdings
        ]  # fmt: skip


class House:
    """Makes fetchers; all keys are known to all."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.hub = HubSettings("http://127.0.0.1:9", offline=True)
        """What all are told of the hub from now on."""
        self.keys = {name: NodeKey(Ed25519PrivateKey.generate()) for name in names}
        self.fetchers: dict[str, Fetcher] = {}

    def start(
        self,
        name: str,
        *directories: Path,
        is_used: Callable[[], bool] = lambda: False,
        lies: bool = False,
        module: str = "mesh.transfers.process",
        **changes: Any,
    ) -> Fetcher:
        """Start one that has these checkpoints; `is_used`: whether its machine answers somebody.
        One that `lies` gives what is there, whatever that is by now; `module` is what it runs."""
        key = self.keys[name]
        members = [TlsMaterial.of(other, []).certificate for other in self.keys.values()]
        start = StartFetcher(
            hello=Hello(key.node_id, name, "weights", "test"),
            tls=TlsMaterial.of(key, members),
            listen_host="127.0.0.1",
            models=tuple(LocalCheckpoint(MODEL, directory) for directory in directories),
            models_dir=self.root / name / "models",
            cache_dir=self.root / name / "cache",
            interfaces=("127.0.0.1",),
            **{"patience_s": 30.0, "nice": 0, **changes},
        )
        events: list[tuple[str, dict[str, Any]]] = []
        supervisor = FetcherSupervisor(
            start,
            notify=lambda *event: events.append(event),
            hub=lambda: self.hub,
            is_used=is_used,
            module="tests.transfers.lying" if lies else module,
        )
        supervisor.start()
        fetcher = self.fetchers[name] = Fetcher(name, key, supervisor, events)
        return fetcher

    def introduce(self) -> None:
        """Have everybody hear what the others have; the daemons' part."""
        for fetcher in self.fetchers.values():
            others = [f for f in self.fetchers.values() if f is not fetcher]
            heard = [held for other in others for held in other.holding()]
            fetcher.supervisor.hear(heard, len(others))


@asynccontextmanager
async def house(root: Path, *names: str) -> AsyncIterator[House]:
    """A house whose fetchers are stopped at the end."""
    made = House(root, names)
    try:
        yield made
    finally:
        await asyncio.gather(*(f.supervisor.stop() for f in made.fetchers.values()))


@asynccontextmanager
async def hub_house(
    root: Path, url: str, *names: str, **changes: Any
) -> AsyncIterator[tuple[House, list[Fetcher]]]:
    """Fetchers that are up, may ask the hub at `url`, and keep hearing what the others have."""

    async def keep_introducing() -> None:
        while True:
            made.introduce()
            await asyncio.sleep(0.1)

    async with house(root, *names) as made:
        made.hub = HubSettings(url)
        fetchers = [made.start(name, **changes) for name in names]
        await up(*fetchers)
        gossip = asyncio.create_task(keep_introducing())
        try:
            yield made, fetchers
        finally:
            gossip.cancel()


async def up(*fetchers: Fetcher) -> None:
    """Until they are ready."""
    async with asyncio.timeout(60):
        for fetcher in fetchers:
            await fetcher.supervisor.wait_up()
