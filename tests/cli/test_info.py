"""`hearthnet info`: what to send along with a question."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

from tests.api.conftest import Served
from tests.cli.conftest import Run


async def test_versions_machine_and_files_are_told_and_no_secret(
    hearthnet: Run, tmp_path: Path, daemon: Served
) -> None:
    secret = "k" * 24
    told = await hearthnet("info", "--json", HEARTHNET_API_KEY=secret, HF_TOKEN="hf_secret")  # noqa: S106
    assert told.code == 0, told.err
    parts = json.loads(told.out)
    assert parts["versions"]["torch"] == version("torch")
    assert parts["files"]["state"] == str(tmp_path / ".local/state/hearthnet")
    assert f"process {os.getpid()}" in parts["files"]["daemon"]
    assert secret not in told.out
    assert "hf_secret" not in told.out
    in_words = await hearthnet("info", "--state-dir", str(tmp_path / "other"))
    assert str(tmp_path / "other" / "logs" / "daemon.log") in in_words.out
    assert "(not there)" in in_words.out
    elsewhere = await hearthnet("info", "--json", HEARTHNET_MODELS_DIR=str(tmp_path / "big disk"))
    assert json.loads(elsewhere.out)["files"]["models"] == str(tmp_path / "big disk")
