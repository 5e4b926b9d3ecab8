"""What jobs share with chat is there as long as they need it, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from mesh.accounts.ledger import of_peer
from mesh.errors import SessionGone
from mesh.interventions.relay import HopSessions
from mesh.shard.taps.server import TapSettings
from mesh.types import NodeId, WireDtype
from mesh.wire.messages import Open, OpenTaps
from tests.interventions.test_server import MODEL, shard
from tests.interventions.worlds import LAYERS
from tests.shard.asker import settled
from tests.shard.spans import plain_kernels


async def test_weights_that_jobs_share_are_not_idle_until_those_let_them_go() -> None:
    with plain_kernels():
        async with shard(TapSettings(idle_s=0.0), eviction_idle_s=0.0) as here:
            sessions = await HopSessions.open(here.route, here.lines)
            (server,), weights = here.service.servers, here.route[0].shard.weights_sha256
            server.admit(Open(1, MODEL, weights, 0, LAYERS, 8, WireDtype.FP32)).close()
            await asyncio.sleep(0.05)
            assert server.load_now().loaded, "chat would load them once more"
            sessions.close()
            await settled(lambda: not here.taps.sessions and not server.load_now().loaded)
            assert here.taps.weights() == []


async def test_what_loads_for_a_job_that_has_gone_is_let_go() -> None:
    with plain_kernels():
        async with shard(TapSettings(idle_s=0.0), eviction_idle_s=0.0) as here:
            (hop,) = here.route
            request = OpenTaps(1, MODEL, hop.shard.weights_sha256, 0, LAYERS)
            session = here.taps.admit(request, of_peer(NodeId("a" * 64)))
            opening = asyncio.create_task(session.opened())
            (server,) = here.service.servers
            await settled(lambda: server.load_now().loaded)
            session.close()
            here.taps.evict()
            with pytest.raises(SessionGone):
                await opening
            await settled(lambda: here.taps.weights() == [])
