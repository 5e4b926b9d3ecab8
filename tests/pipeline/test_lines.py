"""The links that an asker holds to hosts."""

from __future__ import annotations

from mesh.pipeline.lines import Lines
from tests.pipeline.toy_mesh import ToyNetwork


async def test_a_host_that_starts_again_and_again_leaves_no_closed_lines_behind() -> None:
    network = ToyNetwork()
    lines = Lines(network.dial)
    for _ in range(5):
        shard = network.add("0-7", name="restless")  # each life has a port of its own
        line = await lines.line(shard.descriptor.host, shard.descriptor.endpoint)
        shard.kill()
        assert line.is_closed
    last = network.add("0-7", name="restless")
    kept = await lines.line(last.descriptor.host, last.descriptor.endpoint)
    assert list(lines._lines.values()) == [kept]
    await lines.close()
