"""How many graphics cards this machine has, without importing what computes on them."""

from __future__ import annotations

from pathlib import Path

from mesh.config.variables import visible_cards

_DEV = Path("/dev")


def card_files(dev: Path = _DEV) -> list[str]:
    """The names of what NVIDIA's driver makes there, one for each card. Blocks for a moment."""
    return sorted(path.name for path in dev.glob("nvidia[0-9]*"))


def all_cards(dev: Path = _DEV) -> tuple[str, ...]:
    """The devices that they are as torch numbers them; none where only torch itself could say."""
    count, visible = len(card_files(dev)), visible_cards()
    shown = count if visible is None else min(count, visible)
    return tuple(f"cuda:{number}" for number in range(shown))
