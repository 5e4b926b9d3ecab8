"""Who is in and who is not, with real daemons: founding, joining, levels, revoking, the wire."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mesh.cli.local_node import LocalNode
from mesh.errors import ConnectFailed, MeshError
from mesh.identity.certificates import make_certificate
from mesh.identity.keys import load_or_create
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.paths import StatePaths
from mesh.wire.messages import Hello, Message
from mesh.wire.websocket import connect
from tests.mesh_e2e.sniffer import Sniffer, is_tls, may_sniff
from tests.waiting import wait_until
from tests.warm.daemons import WarmNode, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = "What is hearthnet?"
FLAGS = ("--threads", "1")
ALONE = {"OMP_NUM_THREADS": "1"}
NO_FALLBACK = {"fallback_to_local": False}


def hearthnet(*arguments: str, node: LocalNode) -> dict[str, Any]:
    """A verb's ``--json``, run as people run it."""
    run = command(*arguments, "--json", "--state-dir", str(node.state_dir))
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def up_peers(node: LocalNode) -> set[str]:
    return {p["name"] for p in node.get("/mesh/v1/peers")["peers"] if p["state"] == "up"}


def standing(node: LocalNode) -> dict[str, str]:
    return {m["name"]: m["state"] for m in node.get("/mesh/v1/hearth")["members"]}


def members(node: LocalNode) -> dict[str, str]:
    return {m["name"]: m["level"] for m in node.get("/mesh/v1/hearth")["members"]}


def answers(node: LocalNode) -> bool:
    body = {"model": "builtin", "prompt": "a", "max_tokens": 1, **NO_FALLBACK}
    return node.post("/v1/completions", body).status_code == 200


def run(root: Path, name: str, *flags: str) -> LocalNode:
    return WarmNode(name, root / name, (*FLAGS, *flags), ALONE)


class Nobody:
    """A link handler that expects nothing."""

    def message(self, message: Message) -> None:
        raise AssertionError(f"a stranger was sent {message}")

    def closed(self, error: MeshError | None) -> None:
        """Links end."""


def test_found_invite_join_promote_revoke_and_what_the_wire_shows(tmp_path: Path) -> None:
    """One story, because every daemon takes seconds to start."""
    attic = run(tmp_path, "attic")  # holds every layer
    sofa = run(tmp_path, "sofa", "--layers", "none")
    with attic, sofa:
        attic.wait_ready()
        sofa.wait_up()
        assert "founded" in attic.log
        assert members(attic) == {"attic": "anchor"}
        assert members(sofa) == {"sofa": "anchor"}
        shard_port = _strangers_get_nothing(attic, tmp_path)

        # sofa's daemon runs already, alone in a hearth of its own; it finds the window by mDNS
        window = hearthnet("invite", "--level", "member", node=attic)
        joined = hearthnet("join", window["code"].upper(), "--interface", "127.0.0.1", node=sofa)
        assert joined["running"]
        assert joined["id"] == attic.get("/mesh/v1/hearth")["id"]
        wait_until(lambda: up_peers(sofa) == {"attic"}, "they link")
        wait_until(
            lambda: members(sofa) == {"attic": "anchor", "sofa": "member"}, "the log arrives"
        )

        # a member sees who is there, and uses nobody's shards
        wait_until(lambda: sofa.get("/mesh/v1/status")["models"], "its ends load")
        assert not answers(sofa)
        assert hearthnet("members", "promote", "sofa", node=attic)["done"]
        wait_until(lambda: answers(sofa), "trusted: it may ask")

        # a third one, whose daemon starts later
        barn = run(tmp_path, "barn", "--layers", "none")
        window = hearthnet("invite", node=attic)
        place = f"{window['host']}:{window['port']}"
        joined = hearthnet("join", window["code"], "--peer", place, "--name", "barn", node=barn)
        assert not joined["running"]
        sniffer = Sniffer() if may_sniff() else None
        with sniffer or nullcontext(), barn:
            barn.wait_up()
            everybody = {"attic": "anchor", "barn": "trusted", "sofa": "trusted"}
            for node in (attic, sofa, barn):
                wait_until(lambda node=node: members(node) == everybody, "the log reaches all")
            wait_until(lambda: up_peers(sofa) == {"attic", "barn"}, "all link to all")
            barn.wait_ready()
            body = {
                "model": "builtin", "messages": [{"role": "user", "content": PROMPT}],
                "temperature": 0, "max_tokens": 24, **NO_FALLBACK,
            }  # fmt: skip
            response = barn.post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            answer = response.json()["choices"][0]["message"]["content"]
            nodes = {attic.record.port, barn.record.port, shard_port}
            api = barn.record.api_port

            revoked_at = time.monotonic()
            out = ("members", "revoke", "sofa", "--yes", "--reason", "sold")
            assert hearthnet(*out, node=attic)["done"]
            wait_until(lambda: not up_peers(sofa), "it loses its links")
            wait_until(lambda: up_peers(barn) == {"attic"}, "barn cut it off as well", limit_s=20)
            assert time.monotonic() - revoked_at < 30
            assert not answers(sofa)
            left = {"attic": "anchor", "barn": "trusted"}
            wait_until(lambda: members(barn) == left, "barn has heard it, not only lost the link")
            gone = barn.get("/mesh/v1/hearth")["out"]
            assert [(row["name"], row["why"]) for row in gone] == [("sofa", "revoked")]
            assert standing(attic) == {"attic": "this node", "barn": "up"}
        wait_until(lambda: standing(attic)["barn"] == "away", "it said goodbye", limit_s=20)
        (away,) = attic.get("/mesh/v1/status")["node"]["away"]
        assert (away["name"], bool(away["last_seen"])) == ("barn", True)
    if sniffer is None:
        pytest.skip("all of it holds; what the wire shows needs a packet socket")
    streams = sniffer.streams()
    between = {flow: data for flow, data in streams.items() if nodes & set(flow)}
    tensors = sum(len(data) for flow, data in between.items() if shard_port in flow)
    assert tensors > 24 * 2 * 128, "the activations of 24 steps came by"
    for flow, data in between.items():
        assert is_tls(data), flow
        for secret in (PROMPT, answer, answer[:12], "builtin", "hearthnet/"):
            assert secret.encode() not in data
    # the same eyes see the prompt and the answer where they are meant to be seen
    local = b"".join(data for flow, data in streams.items() if api in flow)
    assert PROMPT.encode() in local
    assert answer.encode() in local
    assert not is_tls(local)


def _strangers_get_nothing(attic: LocalNode, tmp_path: Path) -> int:
    """Neither in the clear nor with a key of its own, at either port; its shard's port."""
    shard: str = attic.get("/mesh/v1/status")["shards"][0]["endpoint"]
    shard_port = urlsplit(shard).port
    assert shard.startswith("wss://")
    assert shard_port is not None
    stranger = load_or_create(tmp_path / "stranger" / "identity.key")
    hello = Hello(stranger.node_id, "stranger", "tensors", "test")
    home = load_or_create(StatePaths(attic.state_dir).identity_key)
    own = TlsContexts(TlsMaterial.of(stranger, [make_certificate(home)]))
    ways: list[ssl.SSLContext | None] = [None, own.client(home.node_id)]
    for port in (attic.record.port, shard_port):
        for way in ways:
            with pytest.raises(ConnectFailed):
                asyncio.run(connect("127.0.0.1", port, hello=hello, handler=Nobody(), ssl=way))
    assert up_peers(attic) == set()
    return shard_port


def test_the_log_tells_of_each_of_many_nodes(tmp_path: Path) -> None:
    places = [f"127.0.0.{number}:1" for number in range(2, 42)]
    flags = [flag for place in places for flag in ("--peer", place)]
    with run(tmp_path, "attic", "--layers", "none", *flags) as attic:
        attic.wait_up()
        for place in places:
            said = f"name={place} address={place} state=unreachable"
            wait_until(lambda said=said: said in attic.log, f"the log says {said}", limit_s=30)
