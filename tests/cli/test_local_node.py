"""Daemons for demos and tests are what they were told to be, whoever starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode

MESH = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ENABLED"


@pytest.mark.slow
def test_settings_of_whoever_starts_a_node_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "config/hearthnet/config.toml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('model = ["/nowhere"]')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HEARTHNET_API_KEY", "k" * 20)
    monkeypatch.setenv(MESH, "false")
    keeps = {"HEARTHNET_ROUTING__KEEP_FIRST": "2"}
    with LocalNode("solo", tmp_path / "solo", ("--layers", "none"), keeps) as node:
        node.wait_up()
        picture = node.get("/mesh/v1/status")
        assert picture["node"]["enabled"]
        assert [model["id"] for model in picture["models"]] == ["builtin"]
        assert node.record.api_key != "k" * 20
        kept = node.get("/mesh/v1/privacy")["precautions"]
        assert kept["keep_first"] == 2
