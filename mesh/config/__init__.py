"""Every setting of a node: its keys and bounds (`sections`, `settings`), and what was loaded."""

from mesh.config.settings import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    Config,
    Settings,
    config_place,
    flatten,
    is_loopback,
    load_config,
    read_as,
)
from mesh.config.variables import client_host, editor, heeded_variables, terminal_features

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "Config",
    "Settings",
    "client_host",
    "config_place",
    "editor",
    "flatten",
    "heeded_variables",
    "is_loopback",
    "load_config",
    "read_as",
    "terminal_features",
]
