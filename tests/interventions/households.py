"""Households of real daemons that run jobs, and the unmodified client and a chat that ask them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend
from nnsight.schema.response import ResponseModel

from mesh.cli.local_node import LocalNode
from tests.interventions.jobworld import tracing_with
from tests.interventions.worlds import checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face

PROMPT = list(range(5, 29))
CHAT_TOKENS = 96
_CHAT_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class House:
    """Which nodes hold what, which of them is asked, and over whom its routes then go."""

    held: dict[str, str]
    asked: str
    route: tuple[str, ...]


_TWO = {"cellar": "0-5", "attic": "0-1"}
HOUSES: dict[int, House] = {
    # A node's own shard is not its first hop while another holds the first layers.
    1: House(_TWO, "attic", ("cellar",)),
    2: House(_TWO, "cellar", ("attic", "cellar")),
    3: House(
        {"attic": "0-1", "kitchen": "1-3", "study": "4-5", "sofa": "none"},
        "sofa",
        ("attic", "kitchen", "study"),
    ),
}
"""By the number of hops."""


def move_in(
    start: StartNode,
    house: House,
    families: Sequence[str],
    *flags: str,
    environment: dict[str, str] | None = None,
) -> LocalNode:
    """Start the house's nodes, each with its layers of every family; the one that is asked."""
    models = [f"{Path(checkpoint(family).directory)}={family}" for family in families]
    each = [flag for model in models for flag in ("--model", model)]
    nodes = {
        name: start(name, *each, "--layers", held, "--dtype", "fp32", *flags,
                    environment=environment)
        for name, held in house.held.items()
    }  # fmt: skip
    for node in nodes.values():
        node.wait_ready(300)
    return nodes[house.asked]


@contextmanager
def remotely(
    node: LocalNode, *, key: str | None = None, compress: bool = True
) -> Iterator[list[ResponseModel]]:
    """Meanwhile every trace of a client's model is ``remote=True`` at `node`.

    The client listens as it does; what it was told is in the list. `key` None is the owner's, an
    empty one a stranger's on this machine, who is not trusted.
    """
    told: list[ResponseModel] = []
    noted = RemoteBackend.note

    def note(backend: RemoteBackend, response: ResponseModel) -> bool:
        told.append(response)
        return bool(noted(backend, response))

    with pytest.MonkeyPatch.context() as patch, tracing_with(lambda _: {"remote": True}):
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        patch.setattr(RemoteBackend, "note", note)
        patch.setattr(CONFIG.API, "HOST", node.url)
        patch.setattr(CONFIG.API, "APIKEY", node.record.api_key if key is None else key)
        patch.setattr(CONFIG.API, "COMPRESS", compress)
        patch.setattr(CONFIG.APP, "REMOTE_LOGGING", False)
        yield told


def chat(node: LocalNode, family: str, begun: threading.Event | None = None) -> list[int]:
    """The ids of a streamed answer; `begun` is set at its first token."""
    request = {
        "model": family, "prompt": PROMPT, "max_tokens": CHAT_TOKENS, "temperature": 0,
        "ignore_eos": True, "wire_dtype": "fp32", "stream": True, "fallback_to_local": False,
    }  # fmt: skip
    ids: list[int] = []
    with httpx.stream(
        "POST",
        f"{node.url}/v1/completions",
        json=request,
        headers={"Authorization": f"Bearer {node.record.api_key}"},
        timeout=_CHAT_LIMIT_S,
        trust_env=False,
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            if begun is not None:
                begun.set()
            ids = chunk.get("hearthnet", {}).get("token_ids", ids)
    return ids


def undisturbed(family: str) -> list[int]:
    """What `chat` answers: Hugging Face's ids on one machine."""
    return hugging_face(Path(checkpoint(family).directory), PROMPT, CHAT_TOKENS)[0]


@dataclass
class Chatting:
    """A thread that asks the same again and again; `answers` are those that came whole."""

    node: LocalNode
    family: str
    answers: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None
    _begun: threading.Event = field(default_factory=threading.Event)
    _enough: threading.Event = field(default_factory=threading.Event)

    def _ask_on(self) -> None:
        try:
            while not self._enough.is_set():
                self.answers.append(chat(self.node, self.family, self._begun))
        except (AssertionError, httpx.HTTPError) as error:
            self.error = error
            self._begun.set()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Inside, an answer is streaming; afterwards none is. Raises what went wrong in one."""
        thread = threading.Thread(target=self._ask_on, name="chat", daemon=True)
        thread.start()
        assert self._begun.wait(_CHAT_LIMIT_S), "the chat did not begin"
        try:
            yield
        finally:
            self._enough.set()
            thread.join(_CHAT_LIMIT_S)
        if self.error is not None:
            raise self.error
        assert not thread.is_alive()
        assert self.answers
