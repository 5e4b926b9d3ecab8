"""`hearthnet info`: what this is and where its files lie, to go with a question or a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh.cli.options import ConfigFile, Json, StateDir
from mesh.cli.output import print_json, print_table

if TYPE_CHECKING:
    from mesh.config import Settings

_PACKAGES = (
    "torch", "transformers", "nnsight", "onnxruntime", "websockets", "zeroconf", "huggingface_hub",
)  # fmt: skip
_TELLING = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni",
            "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "neon", "asimd", "asimddp", "i8mm",
            "bf16", "sve", "sve2")  # fmt: skip
"""Of what a processor can do, what decides which kernels there are."""


def info(state_dir: StateDir = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """Show versions, the machine and where the files lie; nothing private, no daemon needed."""
    from mesh.config import load_config

    loaded = load_config({"state_dir": state_dir}, file=config)
    told = {
        "versions": _versions(),
        "machine": _machine(),
        "files": _files(loaded),
    }
    if as_json:
        print_json(told)
        return
    print_table(
        ("WHAT", "IS"),
        [(what, value) for part in told.values() for what, value in part.items()],
    )


def _versions() -> dict[str, Any]:
    import platform
    import sys
    from importlib.metadata import PackageNotFoundError, version

    from mesh import __version__

    found: dict[str, Any] = {
        "hearthnet": __version__,
        "python": f"{platform.python_version()} {sys.executable}",
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _machine() -> dict[str, Any]:
    import os
    import platform

    import psutil

    from mesh.processes.processor import cpu_flags, cpu_model
    from mesh.units import memory_size

    flags = cpu_flags()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{cpu_model()}, {os.cpu_count()} processors",
        "it can": " ".join(flag for flag in _TELLING if flag in flags) or None,
        "memory": memory_size(psutil.virtual_memory().total),
    }


def _files(loaded: Settings) -> dict[str, Any]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from mesh.paths import StatePaths, default_config_file, models_dir
    from mesh.runtime import read_daemon

    paths = StatePaths(loaded.config.state_dir)
    record = read_daemon(paths.runtime_file)
    return {
        "settings": str(loaded.file or f"{default_config_file()} (not there)"),
        "state": str(paths.root),
        "models": str(loaded.config.models_dir or models_dir()),
        "hub's cache": HF_HUB_CACHE,
        "log": str(paths.daemon_log),
        "daemon": f"process {record.pid}, {record.api_url}" if record else None,
    }
