"""Files in which a liar had a part are not taken as good."""

from __future__ import annotations

import pytest

from mesh.models.harvest import HarvestBatch
from mesh.pipeline.route import HopLost
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.spot_checks import SpotFinding
from mesh.types import WireDtype
from tests.health.watched import halves, watched
from tests.pipeline.toy_mesh import MODEL, TOTAL_LAYERS, WEIGHTS, encode

TERMS = SessionTerms(
    MODEL, WEIGHTS, 8, WireDtype.FP32, harvest=HarvestBatch("0" * 16, 0, 1, "layers.", "layers.*")
)


@pytest.mark.parametrize("when", ["before", "meanwhile", "never"])
async def test_a_hop_that_was_caught_seals_nothing(when: str) -> None:
    network, (liar, other) = halves("a-liar", "b")
    finding = SpotFinding(liar.descriptor, other.descriptor, liar.descriptor, 0, 9.0, ("a", "b"))
    with watched(network) as mesh:
        session = await mesh.engine.sessions.open_fresh(TERMS, TOTAL_LAYERS)
        session.route.feed(encode([[1, 2, 3, 4]]))
        await session.route.output(1)
        if when == "before":
            mesh.engine.oversight.found(finding)
        if when == "meanwhile":
            liar.before_seal = lambda: mesh.engine.oversight.found(finding)
        if when == "never":
            sealed = await session.route.seal(1.0)
            hosts = [hop.hop.shard.host for hop in session.route.hops]
            assert [each["node"] for each in sealed] == hosts, "whatever they say themselves"
        else:
            with pytest.raises(HopLost):
                await session.route.seal(1.0)
        mesh.engine.sessions.release(session, keep=False)
        await mesh.engine.close()
