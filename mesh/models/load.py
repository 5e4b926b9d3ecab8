"""Load a span or the ends of a checkpoint: the entry for shards and askers.

Decides whether the family may be cut (`families`, and `proof` for those nobody has tested), then
leaves building and filling to `span`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.models.ends import Ends
from mesh.models.families import family_of
from mesh.models.filling import Placement
from mesh.models.manifest import Manifest
from mesh.models.progress import Progress
from mesh.models.proof import require_proof
from mesh.models.span import LoadedSpan, build_ends, build_skeleton, build_span
from mesh.types import LayerRange

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["Ends", "LoadedSpan", "load_ends", "load_skeleton", "load_span"]


def load_span(
    manifest: Manifest,
    layers: LayerRange,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str = "sdpa",
    progress: Progress | None = None,
    defer: bool = False,
) -> LoadedSpan:
    """These layers of the checkpoint, in `dtype` on `device`; reads their tensors and no others.

    With `defer`, linear layers whose weights are stored in GGUF's blocks, and experts, are left
    without them.
    Raises UnsupportedFamily (``bad_request``) with the reason when the model cannot be cut, and
    BadCheckpoint when the files do not hold what the config needs.
    """
    family = family_of(manifest)
    family.require_cuts(layers)
    require_proof(family, manifest.cache_dir)
    placement = Placement(dtype, device, attn_implementation)
    return build_span(manifest, family, layers, placement, progress, defer=defer)


def load_ends(
    manifest: Manifest,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    defer: bool = False,
) -> Ends:
    """Embedding, final norm and head of the checkpoint. Raises as `load_span` does.

    With `defer`, what is stored in GGUF's blocks stays in them: the embedding is decoded row by
    row as it is asked, and the head has no weight.
    """
    family = family_of(manifest)
    require_proof(family, manifest.cache_dir)
    return build_ends(manifest, family, Placement(dtype, device), progress, defer=defer)


def load_skeleton(
    manifest: Manifest, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The whole causal model with real ends and every decoder layer on the meta device.

    Raises as `load_span` does.
    """
    family = family_of(manifest)
    require_proof(family, manifest.cache_dir)
    model: PreTrainedModel = build_skeleton(manifest, family, Placement(dtype, device))
    return model
