"""What of an environment a node heeds, to start one elsewhere that is the same; and commands."""

from __future__ import annotations

import os
import shlex

from mesh.config.modelexpress import NAMES
from mesh.config.settings import CLIENT_VARIABLE, ENV_PREFIX
from mesh.errors import BadValue

_BEGIN = (
    ENV_PREFIX, "HF_", "TRANSFORMERS_", "SSL_CERT_", "CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROC",
    "TORCH", "PYTORCH_", "OMP_", "MKL_", "LD_LIBRARY_PATH", "DYLD_", "PYTHONPATH",
)  # fmt: skip
_OTHERS = frozenset(
    {
        *("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "REQUESTS_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    }
)
"""Read by libraries: where files lie, which devices there are, how the hub is reached."""


def heeded_variables() -> dict[str, str]:
    """Those of this process's environment: its settings, and what libraries read."""
    return {name: value for name, value in os.environ.items() if _is_heeded(name)}


def client_host() -> str | None:
    """HEARTHNET_HOST: the URL of the daemon that client verbs ask, when not the local one."""
    return os.environ.get(CLIENT_VARIABLE) or None


def visible_cards() -> int | None:
    """To how many cards CUDA_VISIBLE_DEVICES holds torch; None where it does not."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else len([name for name in named.split(",") if name.strip()])


def terminal_features() -> tuple[bool, bool]:
    """Whether a terminal can move its cursor (TERM), and may use colours (NO_COLOR)."""
    return os.environ.get("TERM", "dumb") != "dumb", not os.environ.get("NO_COLOR")


def editor() -> list[str]:
    """What this user edits files with (VISUAL, EDITOR), as a command; empty where nobody said.
    Raises BadValue."""
    named = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        return shlex.split(named)
    except ValueError as error:
        raise BadValue(
            f"VISUAL or EDITOR is {named!r}, which is no command: {error}.", fix="Correct it."
        ) from None


def _is_heeded(name: str) -> bool:
    if name == CLIENT_VARIABLE:
        return False
    return name.startswith(_BEGIN) or name in NAMES or name.upper() in _OTHERS
