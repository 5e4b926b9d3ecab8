"""The model as a job has it: real ends, decoder layers without weights, wrapped as nnsight does.

An unmodified client's payload names modules by path (``Module:model.model.layers.0.mlp``), so the
tree must be the one that transformers builds at the client. Reading files happens in
`load_skeleton`, before the process is locked down; `job_model` reads none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import GenerationConfig

from mesh.interventions.channel import SpanChannel
from mesh.interventions.gradients import watch_gradients
from mesh.interventions.hooks import SpanInterleaver
from mesh.interventions.hop import JobHop
from mesh.interventions.spans import Log, RemoteSpans
from mesh.interventions.unread import watch_transforms
from mesh.interventions.unseen import watch_memory
from mesh.interventions.weights import KEPT_BYTES
from mesh.models import load
from mesh.models.anatomy import base_of
from mesh.models.around import around
from mesh.models.manifest import Manifest
from mesh.models.tokenizer_files import load_tokenizer
from mesh.shard.views import layer_list_name
from mesh.types import LayerRange

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without its layers, as nnsight sees it. `layers` names their list in its module."""

    model: TransformersModel
    layers: str


def load_skeleton(manifest: Manifest, *, dtype: torch.dtype) -> Skeleton:
    """Read ends, tokenizer and configs. Raises as `mesh.models.load.load_ends` does."""
    watch_gradients()
    watch_memory()
    watch_transforms()
    text: Any = load.load_skeleton(manifest, dtype=dtype, device=CPU)
    _, base = base_of(text)
    module = around(text, manifest)
    directory = Path(manifest.directory)
    module.config._name_or_path = str(manifest.gguf or directory)
    if manifest.gguf is None:
        with contextlib.suppress(OSError):  # a checkpoint need not have one
            module.generation_config = GenerationConfig.from_pretrained(directory)
    # nnsight's pipeline moves a model to its device unless it is placed already.
    module.hf_device_map = {"": "cpu"}
    base_name = next(name for name, part in module.named_modules() if part is base)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = getattr(text.config, "tie_word_embeddings", False)
    if tied and head.weight.data_ptr() == embedding.weight.data_ptr():
        head.weight = embedding.weight  # one weight in all respects, as transformers ties them
    model = TransformersModel(
        module,
        task="text-generation",
        tokenizer=load_tokenizer(manifest),
        interleaver=SpanInterleaver(),
    )
    return Skeleton(model, f"{base_name}.{layer_list_name(base)}")


def job_model(
    skeleton: Skeleton,
    channel: SpanChannel,
    hops: Sequence[LayerRange],
    log: Log,
    *,
    kept_bytes: int = KEPT_BYTES,
) -> TransformersModel:
    """The nnsight model of a job: hop i of `channel` runs the layers ``hops[i]``; of weights that
    were read so many bytes are kept for the next time.

    There is one at a time: whoever had the skeleton before has it no more.
    """
    model = skeleton.model
    spans = [JobHop(channel, number, layers) for number, layers in enumerate(hops)]
    module, layers = model._module, skeleton.layers
    RemoteSpans(module, layers, model.interleaver, spans, log, kept_bytes=kept_bytes)
    return model
