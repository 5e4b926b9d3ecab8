"""What a house takes that is left running: ``python -m tests.bench soak``, by its name alone as it
takes an hour and a quarter, or SOAK_MINUTES.

Four nodes with the built-in model, one of which holds no layers and is asked: chats, some broken
off, long and short completions, schemas, three further APIs, wrong requests, status, traces of an
nnsight client, and a reader of events, about two a second. The processes' own memory, descriptors
and threads are looked at every half minute; each should come to rest.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.client import pinned, trusting_nobody
from tests.ndif import client

LAYERS = {"attic": "0-3", "barn": "4-7", "cellar": "0-7", "desk": "none"}
LOOK_S = 30.0
REQUEST_S = 0.7
JOB_S = 12.0
QUESTIONS = (
    "Tell me of the attic.",
    "How do I add a node?",
    "Who sees my prompt?",
    "Count to ten.",
)


class Look(NamedTuple):
    """One process at one time, in hours since the start."""

    at_h: float
    own_mb: float
    descriptors: int
    threads: int


@dataclass
class House:
    """The nodes, who asks them, and what became of that."""

    nodes: list[LocalNode]
    ends_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def repeat(self, name: str, work: Callable[[], object], every_s: float) -> None:
        """Until the end; what fails is noted."""
        while (began_s := time.monotonic()) < self.ends_s:
            try:
                work()
                self.done[name] += 1
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                self.failed.append(f"{name}: {error!r:.300}")
            time.sleep(max(0.0, every_s - (time.monotonic() - began_s)))

    def http(self, node: LocalNode) -> httpx.Client:
        """Asks a node as its owner."""
        certificate = node.record.certificate
        return httpx.Client(
            base_url=node.url,
            headers={"Authorization": f"Bearer {_key(node)}"},
            verify=trusting_nobody() if certificate is None else pinned(certificate),
            trust_env=False,
            timeout=120.0,
        )

    def ask(self, http: httpx.Client) -> None:
        """One request of one of the kinds."""
        kind = self.rng.choice(
            (_chat, _chat, _chat, _leave, _complete, _form, _others, _look, _err)
        )
        kind(http, self.rng)

    def follow(self) -> None:
        """Read events until the end."""
        with self.http(self.nodes[-1]) as http, http.stream("GET", "/mesh/v1/events") as events:
            for _ in events.iter_lines():
                if time.monotonic() > self.ends_s:
                    return

    def trace(self) -> None:
        """Read a layer and the logits of a short text."""
        asked, model, layer = self.nodes[-1], client.model(), self.rng.randrange(8)
        with model.trace("The attic is", backend=client.backend(asked.url, api_key=_key(asked))):
            hidden = model.model.layers[layer].output.save()  # noqa: F841
            logits = model.output.logits.save()  # noqa: F841


def _key(node: LocalNode) -> str:
    key = node.record.api_key
    assert key is not None
    return key


def _post(http: httpx.Client, path: str, **body: Any) -> None:
    http.post(path, json={"model": "builtin", **body}).raise_for_status()


def _said(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{rng.choice(QUESTIONS)} {rng.randrange(1000)}"}]


def _chat(http: httpx.Client, rng: random.Random, leaves_after: int = 0) -> None:
    body = {"model": "builtin", "messages": _said(rng), "max_tokens": 60, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for number, _ in enumerate(response.iter_lines()):
            if leaves_after and number > leaves_after:
                return


def _leave(http: httpx.Client, rng: random.Random) -> None:
    _chat(http, rng, rng.randrange(1, 12))


def _complete(http: httpx.Client, rng: random.Random) -> None:
    prompt = [rng.randrange(3, 500) for _ in range(rng.randrange(5, 600))]
    _post(http, "/v1/completions", prompt=prompt, max_tokens=8)


def _form(http: httpx.Client, rng: random.Random) -> None:
    schema = {"type": "object", "properties": {f"k{rng.randrange(50)}": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    _post(http, "/v1/chat/completions", messages=_said(rng), max_tokens=40, response_format=wanted)


def _others(http: httpx.Client, rng: random.Random) -> None:
    _post(http, "/v1/responses", input="Say hello.", max_output_tokens=16)
    _post(http, "/v1/messages", messages=_said(rng), max_tokens=16)
    _post(http, "/api/chat", messages=_said(rng), stream=False, options={"num_predict": 8})


def _look(http: httpx.Client, _rng: random.Random) -> None:
    for path in ("/mesh/v1/status", "/mesh/v1/models", "/v1/models", "/metrics", "/"):
        http.get(path).raise_for_status()


def _err(http: httpx.Client, _rng: random.Random) -> None:
    assert http.post("/v1/chat/completions", json={"model": "none"}).status_code == 400
    assert http.post("/v1/chat/completions", content=b"{{{").status_code == 400


def _looked_at(nodes: list[LocalNode], at_h: float) -> dict[tuple[str, int], Look]:
    found = {}
    for node in nodes:
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)
        for process in (daemon, *daemon.children(recursive=True)):
            try:
                own_mb = process.memory_full_info().uss / 2**20
                look = Look(at_h, own_mb, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue  # a job's, which has ended
            found[node.name, process.pid] = look
    return found


def measure() -> dict[str, Any]:
    """Of each process that lived throughout, its own MB after the first tenth of the time, after
    two thirds, and at the end; descriptors and threads likewise; what was done, and what failed."""
    minutes = float(os.environ.get("SOAK_MINUTES", "75"))
    looks: dict[tuple[str, int], list[Look]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        nodes = [
            LocalNode(name, Path(root) / name, ("--threads", "1", "--layers", layers))
            for name, layers in LAYERS.items()
        ]
        start_hearth(nodes, stack)
        for node in nodes:
            node.wait_ready()
        house = House(nodes, time.monotonic() + 60 * minutes)
        with ThreadPoolExecutor(3) as pool:
            _begin(house, pool, stack)
            began_s = time.monotonic()
            while (now_s := time.monotonic()) < house.ends_s:
                for key, look in _looked_at(nodes, (now_s - began_s) / 3600).items():
                    looks[key].append(look)
                time.sleep(min(LOOK_S, max(0.0, house.ends_s - time.monotonic())))
    count = max(map(len, looks.values()))
    lasting = {key: seen for key, seen in looks.items() if len(seen) > 0.9 * count}
    return {
        "done": dict(house.done),
        "failed": house.failed,
        "processes": {f"{name} {pid}": _told(seen) for (name, pid), seen in lasting.items()},
    }


def _begin(house: House, pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    import nnsight  # has to come behind what `client` imports before it

    nnsight.CONFIG.APP.REMOTE_LOGGING = False
    asked = (house.nodes[-1], house.nodes[0])
    clients = [stack.enter_context(house.http(node)) for node in asked]
    pool.submit(house.repeat, "request", lambda: house.ask(house.rng.choice(clients)), REQUEST_S)
    pool.submit(house.repeat, "trace", house.trace, JOB_S)
    pool.submit(house.repeat, "reader of events", house.follow, 1.0)


def _told(seen: list[Look]) -> dict[str, list[float]]:
    at = [seen[len(seen) // 10], seen[2 * len(seen) // 3], seen[-1]]
    last = [look.own_mb for look in seen[2 * len(seen) // 3 :]]
    return {
        "own MB": [round(look.own_mb, 1) for look in at],
        "MB an hour at last": [round(_slope(seen[2 * len(seen) // 3 :]), 1)],
        "median MB at last": [round(statistics.median(last), 1)],
        "descriptors": [look.descriptors for look in at],
        "threads": [look.threads for look in at],
    }


def _slope(seen: list[Look]) -> float:
    if len(seen) < 2:
        return 0.0
    return statistics.linear_regression(
        [look.at_h for look in seen], [look.own_mb for look in seen]
    ).slope
