"""Daemons for demos and tests are what they were told to be, whoever starts them."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from mesh.paths import StatePaths
from tests.waiting import wait_until
from tests.warm.daemons import WarmNode, command

MESH = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ENABLED"


ANYWHERE = "0.0.0.0"  # noqa: S104 - asked over loopback only


def _logged(node: WarmNode, line: str) -> bool:
    return line in node.log


@pytest.mark.slow
def test_an_api_beyond_loopback_speaks_tls_and_its_owner_s_tools_know_it(tmp_path: Path) -> None:
    flags = ("--layers", "none", "--api-host", ANYWHERE)
    fingerprints = []
    for _ in range(2):
        with WarmNode("solo", tmp_path / "solo", flags) as node:
            record = node.wait_up()
            assert record.api_url == f"https://127.0.0.1:{record.api_port}"
            own = node.get("/mesh/v1/status")["node"]
            assert own["api"] == record.public_url
            tls = own["api_tls"]
            fingerprints.append(tls["sha256"])
            assert tls["certificate"] == str(StatePaths(node.state_dir).api_certificate)
            said = f"export OPENAI_BASE_URL={record.public_url}/v1 OPENAI_API_KEY=KEY"
            wait_until(partial(_logged, node, said), said, limit_s=20)
            wait_until(partial(_logged, node, f"SHA-256 {tls['sha256']}"), limit_s=20)
            for where in ((), ("--api-port", str(record.api_port)), ("--host", record.api_url)):
                status = command("status", "--state-dir", str(node.state_dir), *where)
                assert tls["sha256"] in status.stdout, status
            address = f"http://127.0.0.1:{record.api_port}/healthz"
            plain = httpx.get(address, trust_env=False, timeout=30)
            assert plain.json()["error"]["code"] == "tls_required"
    assert fingerprints[0] == fingerprints[1], "a restart needs no new trust"


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


def test_a_node_whose_processes_come_and_go_freezes_and_thaws(tmp_path: Path) -> None:
    coming_and_going = ["sh", "-c", "while :; do sleep 0.001 & wait; done"]
    process = subprocess.Popen(coming_and_going, start_new_session=True)
    node = LocalNode("solo", tmp_path / "solo", process=process)
    try:
        for _ in range(30):
            node.freeze()
            node.thaw()
    finally:
        node.kill()
