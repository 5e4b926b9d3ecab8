"""Giving memory back to the operating system, which allocators put off."""

from __future__ import annotations

import gc

import torch

from mesh.processes.heap import give_back
from mesh.processes.shared_pages import unmap_files


def settle() -> None:
    """Return what loading left over, and keep what is alive now out of later collections.

    Collections stop the loop during decode; what was loaded or imported is no garbage by then.
    """
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    shed()


def release_memory() -> None:
    """Return what was freed after weights were dropped. Takes a tenth of a second."""
    gc.unfreeze()
    settle()


def shed() -> None:
    """Return the heap's free pages and those of libraries that loading alone needed. Takes
    milliseconds."""
    unmap_files()
    give_back()
