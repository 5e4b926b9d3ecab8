"""Shards: layer ranges of a checkpoint that compute for other nodes.

Importing this package does not import torch; the servers are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.shard.settings import ShardSettings
from mesh.types import ShardDescriptor, ShardHealth

if TYPE_CHECKING:
    from mesh.shard.runtime import SpanRuntime, StepInput
    from mesh.shard.server import ShardServer
    from mesh.shard.service import ShardService

__all__ = [
    "ShardDescriptor",
    "ShardHealth",
    "ShardServer",
    "ShardService",
    "ShardSettings",
    "SpanRuntime",
    "StepInput",
]

_LATE = {
    "ShardServer": "mesh.shard.server",
    "ShardService": "mesh.shard.service",
    "SpanRuntime": "mesh.shard.runtime",
    "StepInput": "mesh.shard.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)
