"""The built-in model: where its checkpoint lies.

Knows a path. Does not load anything, so that importing it costs nothing.
"""

from __future__ import annotations

from pathlib import Path


def checkpoint_dir() -> Path:
    """The packaged Hugging Face checkpoint directory of the built-in model."""
    return Path(__file__).parent / "checkpoint"
