"""A node's side of Kubernetes: the file that leads to a server, and a store that is connected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from mesh.clock import Clock, SystemClock
from mesh.coordination.kubernetes import KubernetesStore
from mesh.coordination.ready import ReadySignal

READY = ReadySignal(ready=True, stability_verified=True)


def write_kubeconfig(file: Path, server: str, authority: Path, token: str) -> Path:
    """With it the bearer of the token finds a server that has a certificate of the authority."""
    cluster = {"server": server, "certificate-authority": str(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "node", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "node"}}],
    }
    file.write_text(yaml.safe_dump(config), "utf-8")
    return file


@asynccontextmanager
async def connected(
    namespace: str, kubeconfig: Path, clock: Clock | None = None
) -> AsyncIterator[KubernetesStore]:
    """A store of this namespace; closed in the end."""
    store = KubernetesStore(namespace, kubeconfig, clock or SystemClock())
    try:
        await store.connect()
        yield store
    finally:
        await store.close()
