"""Seven daemons on this machine that lose one of theirs again and again, and an asker among them.

Every layer is held twice, so a route has three hops and each has a stand-in. Only the victim is
started again after a fault.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from tests.warm.daemons import WarmNode

SERVING = {
    "attic": "0-2", "barn": "3-5", "cellar": "6-7",
    "den": "0-2", "entry": "3-5", "foyer": "6-7",
}  # fmt: skip
ASKER = "sofa"
STALL_S = 2.0
WHOLE_AGAIN_S = 120.0
SS = shutil.which("ss") or "ss"
_ACTIVATIONS = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ACTIVATION_DTYPE"
_HEALTH = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SHARD_HEALTH_TIMEOUT_SECONDS"


@dataclass(slots=True)
class Answer:
    """What came over the stream of one request."""

    token_ids: list[int]
    text_chunks: int
    events: list[str]
    facts: dict[str, Any]

    @property
    def failovers(self) -> int:
        return int(self.facts["failovers"])

    def steps(self) -> dict[str, int]:
        """How many steps each node of the final route ran."""
        return {hop["node"]: hop["steps"] for hop in self.facts["timings"]["hops"]}


class Household:
    """The nodes by name."""

    def __init__(self, directory: Path) -> None:
        # In fp16 another cut of the layers rounds elsewhere: only fp32 promises the same ids.
        environment = {"OMP_NUM_THREADS": "1", _HEALTH: str(STALL_S), _ACTIVATIONS: "fp32"}
        self.nodes = {
            name: WarmNode(
                name, directory / name, ("--threads", "1", "--layers", layers), environment
            )
            for name, layers in {**SERVING, ASKER: "none"}.items()
        }
        self._frozen: set[str] = set()

    def __enter__(self) -> Household:
        with contextlib.ExitStack() as stack:
            start_hearth(list(self.nodes.values()), stack)
            self.wait_whole()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._frozen):
            self.thaw(name)
        for node in self.nodes.values():
            if node.process is not None:
                node.process.terminate()  # all at once: each takes its time to leave
        with contextlib.ExitStack() as stack:
            for node in self.nodes.values():
                stack.callback(node.stop)

    @property
    def asker(self) -> LocalNode:
        return self.nodes[ASKER]

    # Asking

    def stream(self, prompt: list[int], count: int, *, act: Callable[[], None], at: int) -> Answer:
        """Ask; do `act` when token number `at` has come, or with the request itself when 0."""
        body = {
            "model": "builtin", "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": True, "fallback_to_local": False,
            "hearthnet": {"draft": False},  # so that each token is a step, and moments are known
        }  # fmt: skip
        answer = Answer([], 0, [], {})
        url = f"{self.asker.url}/v1/completions"
        if at == 0:
            act()
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
            response.raise_for_status()
            for chunk in _chunks(response):
                assert "error" not in chunk, chunk["error"]
                extra = chunk.get("hearthnet", {})
                if "event" in extra:
                    answer.events.append(extra["event"]["type"])
                    continue
                if extra:
                    answer.facts, answer.token_ids = extra, extra["token_ids"]
                    continue
                answer.text_chunks += 1
                if answer.text_chunks == at:
                    act()
        return answer

    def route(self) -> list[str]:
        """The nodes that a request takes now, in the order of their layers."""
        seed = secrets.randbelow(100)
        answer = self.stream([40 + seed, 41, 42 + seed], 1, act=lambda: None, at=-1)
        return [hop["node"] for hop in answer.facts["route"]]

    def live_route(self) -> list[str]:
        """The nodes that the one live generation runs over now; none when it has just ended."""
        running = self.asker.get("/mesh/v1/status")["generations"]
        return [hop["node"] for hop in running[0]["route"]] if running else []

    # Faults

    def kill_node(self, name: str) -> None:
        """The plug is pulled: daemon, shard process and all."""
        node = self.nodes[name]
        assert node.process is not None
        family = psutil.Process(node.process.pid).children(recursive=True)
        node.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_shard(self, name: str) -> None:
        """Only its shard process: the daemon lives and starts another."""
        self.shard_process(name).kill()

    def freeze(self, name: str) -> None:
        """SIGSTOP to all of it: connected, and silent."""
        self._frozen.add(name)
        self.nodes[name].freeze()

    def freeze_shard(self, name: str) -> None:
        """SIGSTOP to the shard process alone: the daemon goes on saying that all is well."""
        self._frozen.add(name)
        os.kill(self.shard_process(name).pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Everything of it goes on."""
        self._frozen.discard(name)
        self.nodes[name].thaw()

    def cut_links(self, name: str) -> None:
        """Break the TCP connections into its shard process, which lives on. See `why_no_cut`."""
        port = urlsplit(self._endpoint(name)).port
        assert port is not None
        failure = _cut(port)
        assert not failure, failure

    def shard_process(self, name: str) -> psutil.Process:
        """The process that computes its layers."""
        node = self.nodes[name]
        assert node.process is not None
        children = psutil.Process(node.process.pid).children(recursive=True)
        return next(p for p in children if "mesh.shard.process" in p.cmdline())

    # Mending

    def mend(self, *names: str) -> None:
        """Undo whatever was done to these nodes, and wait until everybody is there again."""
        for name in names:
            node = self.nodes[name]
            if name in self._frozen:
                self.thaw(name)
            if node.process is None:
                node.start()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Until the asker can use every node's shard."""
        self.asker.wait_up()
        deadline = time.monotonic() + WHOLE_AGAIN_S
        while time.monotonic() < deadline:
            if (
                self._usable() == set(SERVING)
                and not self.asker.get("/mesh/v1/status")["generations"]
            ):
                return
            time.sleep(0.1)
        raise AssertionError(f"not whole again: only {sorted(self._usable())} serve")

    def _usable(self) -> set[str]:
        peers = self.asker.get("/mesh/v1/peers")["peers"]
        return {
            peer["name"]
            for peer in peers
            if peer["state"] == "up" and any(shard["online"] for shard in peer["shards"])
        }

    def _endpoint(self, name: str) -> str:
        peers = self.asker.get("/mesh/v1/peers")["peers"]
        return next(str(p["shards"][0]["endpoint"]) for p in peers if p["name"] == name)


@functools.cache
def why_no_cut() -> str:
    """Why no connection can be cut here; empty when one was."""
    if os.geteuid() != 0 or shutil.which(SS) is None:
        return "cutting connections needs root and ss"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=1.0) as probe,
    ):
        if failure := _cut(server.getsockname()[1]):
            return f"`ss -K` fails here: {failure}"
        try:
            probe.recv(1)
        except TimeoutError:
            return "`ss -K` leaves connections alone: the kernel has no INET_DIAG_DESTROY"
        except OSError:
            pass  # ECONNABORTED: it was cut
    return ""


def _cut(port: int) -> str:
    """Break every connection on loopback that has this port; what ``ss`` says when it cannot."""
    for ends in (["dst", "127.0.0.1", "dport"], ["src", "127.0.0.1", "sport"]):
        killed = subprocess.run(
            [SS, "-K", "-t", "-n", *ends, "=", str(port)],
            capture_output=True, check=False, text=True, timeout=10,
        )  # fmt: skip
        if killed.returncode != 0:
            return killed.stderr.strip()
    return ""


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
