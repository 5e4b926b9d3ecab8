"""The unmodified nnsight client at an API that speaks TLS, trusting the node's certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.api.tls import api_tls
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.identity.api_keys import Quota, Scope
from tests.ndif import client
from tests.ndif.client import in_thread
from tests.ndif.serving import serving, with_key

OWNER = "0123456789abcdef0123"


async def test_jobs_go_and_come_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket, the upload, a result on the socket, one by polling and one by its URL."""
    config = await asyncio.to_thread(Config, state_dir=tmp_path, api_host="192.0.2.7")
    tls = await asyncio.to_thread(api_tls, config, [])
    assert tls is not None
    async with serving(tmp_path, api=with_key(OWNER), tls=tls) as node:
        assert node.url.startswith("https://")
        scopes = frozenset({Scope.INTERVENTIONS})
        _, key = await asyncio.to_thread(node.keys.create, "anna", scopes, Quota(), SystemClock())
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            await in_thread(client.ask_with_key, node.url, "untrusted", key)
        assert not node.runner.words
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.file))
        result, _ = await in_thread(client.ask_with_key, node.url, "over TLS", key)
        assert result["words"] == "over TLS"
        large, _ = await in_thread(client.ask_with_key, node.url, "big 500000", key)
        assert large["value"].shape == (500_000,)
        via = await in_thread(client.submit_with_key, node.url, "fetched later", key)
        assert (await in_thread(client.wait_for, via))["words"] == "fetched later"
