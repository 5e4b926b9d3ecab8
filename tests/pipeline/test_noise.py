"""Noise on what leaves the asker: as strong as configured, on every row, and off by default."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.config import Config
from mesh.identity.keys import NodeKey
from mesh.identity.tls import TlsMaterial
from mesh.models.local import LocalModel
from mesh.node.wiring import start_asker
from mesh.pipeline.prefill import RowNoise
from mesh.types import LayerRange, ModelId, TokenDelta
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens, toy_orchestrator, toy_request


def rows(scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(1)
    sizes = torch.tensor([0.01, 1.0, 100.0])[None, :, None]
    return scale * sizes * torch.randn(1, 3, 4096)


def test_none_by_default() -> None:
    hidden = rows()
    assert RowNoise(0.0).add(hidden) is hidden


@pytest.mark.parametrize("relative", [0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_row_gets_its_share(relative: float, dtype: torch.dtype) -> None:
    hidden = rows().to(dtype)
    noisy = RowNoise(relative).add(hidden)
    assert (noisy.dtype, noisy.shape) == (dtype, hidden.shape)
    added = (noisy.float() - hidden.float()).square().mean(-1).sqrt()
    size = hidden.float().square().mean(-1).sqrt()
    torch.testing.assert_close(added / size, torch.full((1, 3), relative), rtol=0.1, atol=0)


def test_nobody_else_can_draw_the_same() -> None:
    torch.manual_seed(7)
    one = RowNoise(0.5)
    torch.manual_seed(7)
    other = RowNoise(0.5)
    assert not torch.equal(one.add(rows()), other.add(rows()))
    assert not torch.equal(one.add(rows()), one.add(rows()))


def test_no_row_of_zeros_becomes_anything_else() -> None:
    assert not RowNoise(1.0).add(torch.zeros(1, 2, 8)).any()


@pytest.mark.parametrize("noise", [0.0, 0.5])
async def test_it_goes_into_the_first_hop(noise: float) -> None:
    """The toy layers' arithmetic makes the least change of a row another token."""
    network = ToyNetwork()
    network.add("0-7")
    orchestrator, sessions = toy_orchestrator(network, noise=noise)
    prompt = [5, 11, 23, 42]
    frames = [frame async for frame in orchestrator.chat(toy_request(prompt, 12))]
    await sessions.close()
    tokens = [t for frame in frames if isinstance(frame, TokenDelta) for t in frame.token_ids]
    assert len(tokens) == 12
    assert (tokens == expected_tokens(prompt, 12)) == (noise == 0.0)


def test_the_configuration_reaches_the_asker() -> None:
    routing = {"keep_first": 2, "keep_last": 1, "activation_noise": 0.25}
    model = LocalModel(ModelId("m"), "/m", "a" * 64, 8, None, None)
    key = NodeKey(Ed25519PrivateKey.generate())
    tls = TlsMaterial.of(key, [])
    research = {"distributed_inference": {"draft_tokens": 3}}
    config = Config(routing=routing, research=research)
    settings = start_asker(config, key, model, tls).settings
    assert settings.activation_noise == 0.25
    assert settings.draft_tokens == 3
    assert settings.routes.cover_rules(model).home == (LayerRange(0, 2), LayerRange(7, 8))
    assert start_asker(Config(), key, model, tls).settings.routes.cover_rules(model).home == ()
