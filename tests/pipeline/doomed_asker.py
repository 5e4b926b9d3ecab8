"""An asker's process whose accelerator is gone, for `mesh.processes.entry`.

Its ends are there, and raise what CUDA raises of everything after a device-side assert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mesh.models.progress import Progress
from mesh.pipeline import process
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.model import AskerModel
from mesh.processes.lifecycle import LoadNeed
from mesh.types import GenerationRequest, ModelId


class LostText:
    """What the request meets first stands for all that would use the device."""

    eos_ids: tuple[int, ...] = ()
    call_marks = reasoning_marks = None

    def prompt_ids(self, request: GenerationRequest, most: int) -> list[int]:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def load(
    directory: Path,
    model_id: ModelId,
    options: AskerOptions,
    begins: Callable[[LoadNeed, Progress], object],
) -> tuple[AskerModel, list[str]]:
    """As `load_asker`, but for the device."""
    model, reasons = load_asker(directory, model_id, options, begins)
    text = LostText()
    for name in ("decoder", "token_bytes"):
        setattr(text, name, getattr(model.text, name))
    return replace(model, text=text), reasons  # type: ignore[arg-type]


def main() -> None:
    """Be the process."""
    process.main(load)
