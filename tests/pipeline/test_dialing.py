"""How an asker reaches the shards of its own node, over real links."""

from __future__ import annotations

import pytest

from mesh.discovery.interfaces import Reach
from mesh.errors import MeshError
from mesh.pipeline.dialing import secured
from mesh.pipeline.links import HopLinks
from mesh.types import Endpoint
from mesh.wire.websocket import serve
from tests.identity.support import Party, Recorder

ATTIC = Party("attic")
GONE = "192.0.2.1"
"""Of TEST-NET-1: no machine's."""


@pytest.mark.parametrize(
    ("listens_at", "told"), [(Reach([], GONE, list), GONE), ("127.0.0.2", "127.0.0.2")]
)
async def test_own_shards_are_reached_also_when_the_nodes_address_is_another(
    listens_at: Reach | str, told: str
) -> None:
    tls = await ATTIC.trusting(ATTIC)
    try:
        server = await serve(
            listens_at, 0, accept=lambda _: Recorder(), hello=ATTIC.hello, ssl=tls.server
        )
    except MeshError as error:  # a Mac has only the one loopback address
        pytest.skip(error.message)
    lines = HopLinks(secured(ATTIC.hello(), tls))
    line = await lines.link(ATTIC.id, Endpoint(f"wss://{told}:{server.port}"))
    assert not line.is_closed
    await lines.close()
    await server.close()
