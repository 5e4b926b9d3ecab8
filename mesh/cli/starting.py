"""Whether a node could start, asked before anything is made that outlives a start that fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mesh.cli.ports import require_free
from mesh.errors import BadValue

if TYPE_CHECKING:
    from mesh.config import Config

_DEV = Path("/dev")
_CARDS = ("nvidia*", "nvhost*", "kfd", "dxg")
"""What the drivers make there: NVIDIA's, also on a Jetson; AMD's, whose cards torch calls cuda as
well; that of WSL 2."""


def require_startable(config: Config) -> None:
    """Look at what `require_there` does, and at the ports. Raises what its start would."""
    require_there(config)
    require_free(config)


def require_there(config: Config) -> None:
    """Look at device, addresses and models as the node will, without reading all of the weights.

    Raises what its start would: BadValue, ModelNotFound, BadCheckpoint and kin.
    """
    from mesh.cli.ports import require_api_address
    from mesh.discovery.interfaces import choose
    from mesh.models.local import find_local_models
    from mesh.paths import cache_dir

    require_devices(config.device)
    require_api_address(config)
    choose(config.interface)
    find_local_models(config, cache_dir(), is_hashed=False)


def require_devices(text: str) -> None:
    """Raise BadValue where one of the devices that a setting names cannot be there."""
    from mesh.capacity import named_devices

    for device in named_devices(text):
        require_device(device)


def require_device(device: str, platform: str = sys.platform, dev: Path = _DEV) -> None:
    """Raise BadValue for one that cannot be there. What may be there, torch finds out later."""
    from mesh.capacity import cores_of

    kind, cores = device.partition(":")[0], cores_of(device)
    why = ""
    if cores is not None:
        why = _why_no_cores(cores)
    elif kind == "mps" and platform != "darwin":
        why = "it is for Apple's machines"
    elif kind == "cuda" and platform == "darwin":
        why = "Apple's machines have none"
    elif kind == "cuda" and platform == "linux":
        why = _why_no_card(device, dev)
    if not why:
        return
    raise BadValue(
        f"There is no device {device} on this machine: {why}.",
        fix="Use --device auto, which takes the best that is there, or cpu.",
        param="device",
    )


def _why_no_card(device: str, dev: Path) -> str:
    from mesh.processes.cards import all_cards

    if not any(map(any, map(dev.glob, _CARDS))):
        return "no driver of a graphics card is loaded"
    cards = all_cards(dev)
    return f"it has {', '.join(cards)}" if cards and device not in cards else ""


def _why_no_cores(cores: range) -> str:
    from mesh.processes.processor import allowed_cores

    usable = allowed_cores()
    if usable is None:
        return "parts of its processor cannot be chosen on this platform"
    lacking = sorted(set(cores) - usable)
    return f"there is no core {lacking[0]} that may be used" if lacking else ""
