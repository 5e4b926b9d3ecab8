"""A certificate that the settings name is renewed while the API is served with it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh.api.renewal import follow_renewals
from mesh.api.tls import ApiTls, given_tls
from mesh.client import client_of
from mesh.clock import SystemClock
from mesh.health.eventstream import EventFeed
from mesh.identity.api_certificate import fingerprint
from mesh.runtime import DaemonRecord
from tests.api.conftest import Served, serving
from tests.api.test_tls import given
from tests.waiting import until

EVERY_S = 0.02


@dataclass
class Renewed:
    """An API whose certificate's files are looked at often."""

    api: Served
    folder: Path
    first: ApiTls
    events: EventFeed
    record: DaemonRecord

    def put(self, other: Path, *names: str) -> None:
        """Replace files by those of the same names of `other`."""
        for name in names:
            shutil.copy(other / name, self.folder / f"{name}.new")
            (self.folder / f"{name}.new").replace(self.folder / name)

    def said(self) -> list[dict[str, Any]]:
        return self.events.warnings(9)

    async def shown(self) -> str:
        """The fingerprint of the certificate that a new connection is shown."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", self.api.server.port, ssl=context)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return fingerprint(ssl.DER_cert_to_PEM_cert(der))


def made(folder: Path, year: int) -> ApiTls:
    folder.mkdir()
    return given_tls(*given(folder, year).values())


@pytest.fixture
async def renewed(tmp_path: Path) -> AsyncIterator[Renewed]:
    first = await asyncio.to_thread(made, tmp_path / "own", 2998)
    events = EventFeed(SystemClock())
    async with serving(tls=first) as api:
        reached: dict[str, Any] = api.server.reached("127.0.0.1") | {"port": 0, "api_key": None}
        record = await asyncio.to_thread(DaemonRecord.for_this_process, **reached)
        files = tmp_path / "own" / "chain.pem", tmp_path / "own" / "own.key"
        task = asyncio.create_task(follow_renewals(api.server, *files, events, EVERY_S))
        try:
            yield Renewed(api, tmp_path / "own", first, events, record)
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_renewed_certificate_is_shown_and_the_own_client_knows_it(
    renewed: Renewed, tmp_path: Path
) -> None:
    async with client_of(renewed.record) as client:
        assert await client.readiness() == []
        for year in (2999, 3000):
            folder = tmp_path / str(year)
            second = await asyncio.to_thread(made, folder, year)
            renewed.put(folder, "chain.pem", "own.key")
            await until(lambda sha256=second.sha256: told(renewed)["sha256"] == sha256)
            assert await renewed.shown() == second.sha256
            assert told(renewed)["expires"].startswith(str(year))
            assert await client.readiness() == [], "also on the connection that was open"
            async with client_of(renewed.record) as anew:
                assert await anew.readiness() == []
    assert renewed.said() == []


def told(renewed: Renewed) -> dict[str, str]:
    assert renewed.api.server.tls is not None
    return renewed.api.server.tls.shown()


async def test_half_of_a_pair_leaves_the_one_before_and_is_told_once(
    renewed: Renewed, tmp_path: Path
) -> None:
    second = await asyncio.to_thread(made, tmp_path / "second", 2999)
    renewed.put(tmp_path / "second", "chain.pem")
    await until(renewed.said)
    await asyncio.sleep(5 * EVERY_S)
    (warning,) = renewed.said()
    assert warning["code"] == "certificate_refused"
    assert "stays what it was" in warning["message"]
    assert "MISMATCH" in warning["message"]
    assert await renewed.shown() == renewed.first.sha256
    async with client_of(renewed.record) as client:
        assert await client.readiness() == []
    (renewed.folder / "own.key").unlink()
    await until(lambda: any("cannot be read" in each["message"] for each in renewed.said()))
    assert len(renewed.said()) == 1
    renewed.put(tmp_path / "second", "own.key")
    await until(lambda: told(renewed)["sha256"] == second.sha256)
    assert renewed.said() == [], "as it is so no longer"
