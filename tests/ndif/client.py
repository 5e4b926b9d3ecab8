"""The unmodified nnsight client, told where to go by its own settings; called from threads."""

from __future__ import annotations

import asyncio
import linecache
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

# nnsight puts attributes on `object`, and this module of the server's does not load after that.
import anyio._backends._asyncio  # noqa: F401
import nnsight
import pytest
import torch
from nnsight.intervention.backends.remote import AsyncRemoteBackend, RemoteBackend
from nnsight.modeling.transformers import TransformersModel

from mesh.models.builtin import checkpoint_dir

torch.set_num_threads(1)

T = TypeVar("T")

KEY = (
    "nnsight.modeling.transformers.TransformersModel:"
    '{"repo_id": "builtin", "revision": null, "task": "text-generation"}'
)


_BUILDING = Lock()
"""While it builds a model, transformers patches its classes: two threads would leave them so."""


def model() -> TransformersModel:
    """The built-in model as a client has it: without weights."""
    with _BUILDING:
        return _model()


@cache
def _model() -> TransformersModel:
    return TransformersModel(str(checkpoint_dir()), task="text-generation")


_THREADS = ThreadPoolExecutor(16, "client")


def in_thread(work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Run a client beside the server's loop, in threads that the server does not use."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


class Recording(RemoteBackend):
    """The client's own backend; `seen` is every status that its own code handled."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.seen: list[Any] = []

    def note(self, response: Any) -> bool:
        self.seen.append(response)
        return super().note(response)


def backend(url: str, **more: Any) -> Recording:
    """A blocking backend unless told otherwise."""
    return Recording(KEY, host=url, **more)


def logits_of(directory: Path, name: str, prompt: str, url: str, key: str) -> tuple[Any, Recording]:
    """Ask a node for the logits of the checkpoint in `directory`, which it knows as `name`, as the
    owner of `key`; waits. Raises RemoteError. The backend tells what was heard meanwhile."""
    via = Recording(KEY.replace("builtin", name), host=url, api_key=key)
    with _BUILDING:
        asked = TransformersModel(str(directory), task="text-generation")
    with asked.trace(prompt, backend=via):
        logits = asked.output.logits.save()
    return logits, via


def ask(url: str, words: str, **more: Any) -> tuple[dict[str, Any], Recording]:
    """Trace with these words for the runner, wait, and return what came back."""
    via = backend(url, **more)
    results = trace(via, words)
    return results, via


def submit(url: str, words: str, **more: Any) -> Recording:
    """Hand in a job and do not wait."""
    via = backend(url, blocking=False, **more)
    trace(via, words)
    assert via.job_id is not None
    return via


def ask_with_key(url: str, words: str, key: str) -> tuple[dict[str, Any], Recording]:
    """See `ask`."""
    return ask(url, words, api_key=key)


def submit_with_key(url: str, words: str, key: str) -> Recording:
    """See `submit`."""
    return submit(url, words, api_key=key)


def wait_for(via: RemoteBackend, limit_s: float = 30.0) -> dict[str, Any]:
    """Poll as the client does until there is a result."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = via()
        if found is not None:
            return dict(found)
        time.sleep(0.02)
    raise TimeoutError(f"{via.job_id} is {via.status}")


def ask_async(url: str, words: str) -> dict[str, Any]:
    """The same through the client's asyncio backend, in an event loop of its own."""

    async def ask() -> dict[str, Any]:
        via = AsyncRemoteBackend(KEY, host=url)
        trace(via, words)
        return dict(await via)

    return asyncio.run(ask())


class _Kept:
    """Hands a backend's answer out of the trace, which throws it away."""

    def __init__(self, via: RemoteBackend) -> None:
        self.via = via
        self.result: Any = None

    def __call__(self, tracer: Any = None) -> Any:
        self.result = self.via(tracer)
        return self.result


def trace(via: RemoteBackend, words: str) -> dict[str, Any]:
    """What a trace through `via` with these words for the runner gives."""
    kept = _Kept(via)
    source = _SOURCE.format(words=words)
    scope: dict[str, Any] = {"model": model(), "kept": kept}
    path = f"<trace {words}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), scope)  # noqa: S102 - a body per words, as a user writes it
    return kept.result if isinstance(kept.result, dict) else {}


_SOURCE = """\
with model.trace("Hello", backend=kept):
    script = '{words}'
    value = model.output.logits.save()
"""


def configure(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Change the client's settings of the API for one test."""
    for name, value in settings.items():
        monkeypatch.setattr(nnsight.CONFIG.API, name, value)
