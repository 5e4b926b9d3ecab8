"""What an invitation leads to, where the node that takes it up cannot use it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.clock import SystemClock
from mesh.errors import PairingRejected
from mesh.hearth.joining import JoiningNode, join_hearth
from mesh.hearth.record import read_record
from mesh.paths import StatePaths
from tests.discovery.network import new_key
from tests.identity.test_pairing import HEARTH, open_window


async def test_a_hearth_whose_log_has_another_form_is_not_joined(tmp_path: Path) -> None:
    paths = await asyncio.to_thread(StatePaths(tmp_path).create)
    joiner = JoiningNode(new_key(), "guest", paths, SystemClock())
    assert HEARTH.startswith("hh1")
    async with open_window() as opened:
        with pytest.raises(PairingRejected) as caught:
            await join_hearth(joiner, opened.link, None, [])
    assert caught.value.message == (
        "'Our home' was founded by another version of hearthnet, whose log has another form."
    )
    assert await asyncio.to_thread(read_record, paths.hearth) is None
