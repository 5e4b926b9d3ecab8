"""Every setting of a node: its keys and bounds (`sections`, `settings`), and what was loaded."""

from mesh.config.settings import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    Config,
    Settings,
    client_host,
    flatten,
    is_loopback,
    load_config,
    terminal_features,
)
from mesh.config.variables import heeded_variables

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "Config",
    "Settings",
    "client_host",
    "flatten",
    "heeded_variables",
    "is_loopback",
    "load_config",
    "terminal_features",
]
