"""The checkpoints a node was told to hold: from configuration to facts.

Reads files, so it runs in a thread. Knows nothing of processes or the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from mesh.config import Config
from mesh.errors import BadValue, NotEnoughMemory, nobody_asks
from mesh.models.builtin import checkpoint_dir
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.models.hub_cache import checkpoint_name
from mesh.models.manifest import Manifest, read_manifest
from mesh.paths import absolute
from mesh.types import LayerRange, ModelId

BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What people are told of a checkpoint: `format` is ``safetensors`` or ``gguf``, `dtype` that
    of most of the weights as stored, as in `Manifest`; `parameters` and `bytes` are those of all
    its tensors, `modified_at` is the ISO time of its newest file of weights."""

    format: str
    family: str
    dtype: str
    parameters: int
    bytes: int
    modified_at: str


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checkpoint this node holds on disk, with the layers it serves of it (None: only asks)."""

    model_id: ModelId
    directory: str
    weights_sha256: str
    total_layers: int
    context: int | None
    layers: LayerRange | None
    layers_mb: int = 0
    """What all layers take as stored; the ends come on top."""
    quant: str = ""
    """The number format that its deployment says, '' for that of this node's settings."""
    facts: CheckpointFacts | None = None
    cuts: Cuts = ANYWHERE

    @classmethod
    def of(cls, manifest: Manifest, directory: Path, layers: LayerRange | None = None) -> Self:
        """The checkpoint of this manifest, which was read from there."""
        return cls(
            manifest.model_id, str(directory), manifest.weights_sha256, manifest.total_layers,
            manifest.max_positions, layers, sum(manifest.layer_bytes) >> 20,
            facts=checkpoint_facts(manifest), cuts=manifest.cuts,
        )  # fmt: skip


def find_local_models(
    config: Config, cache_dir: Path, *, is_hashed: bool = True
) -> list[LocalModel]:
    """Read every configured checkpoint's manifest, see `read_manifest` for `is_hashed`.

    Raises:
        ModelNotFound: nothing is there.
        BadCheckpoint: a directory cannot be used.
        BadValue: layers outside the model, two models of one id, a shard over the memory limit.
    """
    found: list[LocalModel] = []
    for text, layers in _wanted(config):
        path, _, name = text.partition("=")
        directory = local_directory(path)
        model_id = _model_id(path, name, directory)
        if any(model.model_id == model_id for model in found):
            raise BadValue(
                f"two models are called {model_id!r}.",
                fix="Give one its own id: --model PATH=ID.",
                param="model",
            )
        manifest = read_manifest(
            directory, model_id=model_id, cache_dir=cache_dir, is_hashed=is_hashed
        )
        span = _span(manifest, layers)
        _check_size(manifest, span, config.distributed.host.shard_max_vram_mb)
        found.append(LocalModel.of(manifest, directory, span))
    return found


def checkpoint_facts(manifest: Manifest) -> CheckpointFacts:
    """What there is to tell of a checkpoint on this disk; blocks."""
    tensors = manifest.tensors.values()
    times = [file.stat().st_mtime for file in {each.file for each in tensors} if file.exists()]
    return CheckpointFacts(
        format="safetensors" if manifest.gguf is None else "gguf",
        family=manifest.model_type,
        dtype=manifest.dtype,
        parameters=sum(math.prod(each.shape) for each in manifest.weights.values()),
        bytes=sum(each.nbytes for each in tensors),
        modified_at=datetime.fromtimestamp(max(times, default=0.0), UTC).isoformat(),
    )


def local_directory(text: str) -> Path:
    """Where the checkpoint lies that is called so in the configuration."""
    return checkpoint_dir() if text == BUILTIN else absolute(Path(text))


def local_manifest(
    models: Mapping[ModelId, LocalModel], model_id: ModelId, cache_dir: Path
) -> Manifest:
    """The manifest of a model that this node holds. Raises ModelNotFound and BadCheckpoint."""
    local = models.get(model_id)
    if local is None:
        raise nobody_asks(model_id, models)
    return read_manifest(Path(local.directory), model_id=model_id, cache_dir=cache_dir)


def require_within(model: LocalModel, limit_mb: int, layers: LayerRange) -> None:
    """Raise NotEnoughMemory when these layers are more than one shard may take here."""
    size_mb = model.layers_mb * len(layers) // model.total_layers
    if size_mb > limit_mb:
        raise NotEnoughMemory(
            f"layers {layers} of {model.model_id} take {size_mb} MiB; the limit is {limit_mb} MiB.",
            fix="Let other nodes hold its layers, or raise shard_max_vram_mb.",
        )


def _model_id(path: str, name: str, directory: Path) -> ModelId:
    if name or path == BUILTIN:
        return ModelId(name or BUILTIN)
    return checkpoint_name(directory)


def _wanted(config: Config) -> Iterator[tuple[str, str]]:
    serve = config.distributed.host.serve_shards
    for index, text in enumerate(config.model):
        if not config.layers:
            layers = ""
        elif len(config.layers) == 1:
            layers = config.layers[0]
        else:
            layers = config.layers[index]
        yield text, "none" if serve is False else layers


def _span(manifest: Manifest, layers: str) -> LayerRange | None:
    if layers == "none":
        return None
    whole = LayerRange(0, manifest.total_layers)
    span = LayerRange.parse(layers) if layers else whole
    if not whole.covers(span):
        raise BadValue(
            f"layers {span} were asked for; {manifest.model_id} has layers {whole}.",
            fix=f"Use --layers within {whole}, or none to hold no layers.",
            param="layers",
        )
    if not manifest.cuts.allow(span):
        why, fix = manifest.cuts.refusal(span, manifest.total_layers)
        raise BadValue(
            f"layers {span} of {manifest.model_id} cannot be held by themselves: {why}.",
            fix=fix,
            param="layers",
        )
    return span


def _check_size(manifest: Manifest, span: LayerRange | None, limit_mb: int) -> None:
    if span is None:
        return
    size_mb = sum(manifest.layer_bytes[span.start : span.stop]) >> 20
    if size_mb > limit_mb:
        raise BadValue(
            f"layers {span} of {manifest.model_id} take {size_mb} MiB; the limit is"
            f" {limit_mb} MiB.",
            fix="Hold fewer layers, or raise research.distributed_inference.host."
            "shard_max_vram_mb.",
            param="layers",
        )
