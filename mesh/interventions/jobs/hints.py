"""What helps the author of a job on, behind an error that a library words for people who sit at the
machine."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterator, Sequence

from nnsight.intervention.envoy import Envoy

_NO_GRADIENT = ("does not require grad", "doesn't require grad", "has requires_grad=False")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_NO_DEVICE = (
    "CUDA enabled", "CUDA GPUs", "CUDA unknown error", "NVIDIA driver", "cudaGetDeviceCount",
    "mps devices", "MPS backend",
)  # fmt: skip
_MOST_NAMED = 40


def hints(errors: Sequence[BaseException], text: str, *, is_ours: bool) -> Iterator[str]:
    """Sentences for the first of `errors`, those that led to it behind it; `text` is what is told
    of them, and `is_ours` whether it says what to do itself."""
    raised = errors[0]
    said = "".join(traceback.format_exception_only(raised))  # whose own __str__ may raise
    if not is_ours and any(hint in said for hint in _NO_GRADIENT):
        yield (
            "The weights of a model on a mesh are frozen. Call requires_grad_(True) on the value"
            " that you want a gradient of, before what is computed from it."
        )
    if not is_ours and any(hint in said for hint in _NO_DEVICE):
        yield (
            "The code of a trace computes on a CPU, whatever its layers compute on. Leave .cuda()"
            " out, or write .to(x.device), where x is a value of the model's."
        )
    if isinstance(raised, MemoryError) or any(hint in text for hint in _NO_MEMORY):
        yield (
            "The job needed more memory than a job may use. Keep less at a time, or ask whoever"
            " runs this node to raise jobs.memory_mb."
        )
    if any(isinstance(error, PermissionError) for error in errors):
        yield (
            "A job has no network, no files and no other processes. Do outside of the trace what"
            " needs them, and give data loaders no workers."
        )
    if isinstance(raised, AttributeError) and isinstance(raised.obj, Envoy):
        yield from _parts(raised.obj, str(raised.name))


def _parts(part: Envoy, asked: str) -> Iterator[str]:
    """What is there in the place of what was `asked` for."""
    names = [name for name, _ in part.named_children()]
    if names and all(name.isdecimal() for name in names):
        yield f"{part.path} has {names[0]} to {names[-1]}."
    elif names:
        near = difflib.get_close_matches(asked, names, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        yield f"{meant}{part.path} has {', '.join(names[:_MOST_NAMED])}."
