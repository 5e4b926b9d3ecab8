"""Memory that runs out, and giving it back to the operating system, which allocators put off."""

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
    empty_caches()
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


def empty_caches() -> None:
    """Return what of an accelerator's memory was freed, which its allocator keeps for itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():  # where it is the machine's own
        torch.mps.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, the device's or the machine's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Of Metal and of main memory torch raises no error of their own.
    said = ("MPS backend out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in said)
