"""ModelExpress' names of environment variables, for deployments that set them already.

They count below ``HEARTHNET_...``. Reads nothing by itself; the environment is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {
    "MX_METADATA_BACKEND": "coordination.store",
    "MX_METADATA_NAMESPACE": "coordination.namespace",
    "MX_REDIS_HOST": "coordination.redis_url",
    "MX_REDIS_PORT": "coordination.redis_url",
}
NAMES = frozenset(_KEYS)


def from_modelexpress(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that these variables say, nested as a configuration file has them."""
    given = {name: environment[name] for name in _KEYS if environment.get(name)}
    section: dict[str, Any] = {}
    if "MX_METADATA_BACKEND" in given:
        section["store"] = given["MX_METADATA_BACKEND"]
    if "MX_METADATA_NAMESPACE" in given:
        section["namespace"] = given["MX_METADATA_NAMESPACE"]
    host, port = given.get("MX_REDIS_HOST"), given.get("MX_REDIS_PORT")
    if host or port:
        section["redis_url"] = f"redis://{host or '127.0.0.1'}:{port or 6379}/0"
    return {"coordination": section} if section else {}


def alias_of(key: str) -> str:
    """The variables that may be behind a setting of `from_modelexpress`."""
    return ", ".join(name for name, setting in _KEYS.items() if setting == key)
