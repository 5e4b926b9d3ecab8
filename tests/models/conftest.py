"""Checkpoints made once per run, and torch kept to one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.checkpoints import make_checkpoint

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`make_checkpoint` into a directory of its own; the same arguments give the same directory.

    Read only: tests that damage a checkpoint copy it first.
    """
    made: dict[str, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return make
