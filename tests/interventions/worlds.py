"""One checkpoint twice: whole on this machine, and as a skeleton over spans of real shard trees."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from mesh.interventions.skeleton import job_model, load_skeleton
from mesh.interventions.weights import KEPT_BYTES
from mesh.models.load import load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.shard.taps.session import TapLimits, TapSession
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint

torch.set_num_threads(1)

LAYERS = 6
WITH_IMAGES = "gemma3 with images"
CPU = torch.device("cpu")
_DIRECTORY = tempfile.TemporaryDirectory(prefix="hearthnet-interventions-")


@cache
def checkpoint(family: str) -> Manifest:
    """A random fp32 checkpoint of six layers."""
    directory = Path(_DIRECTORY.name) / family
    if family == WITH_IMAGES:
        return read_manifest(_with_images(directory, checkpoint("gemma3").directory))
    more: dict[str, Any] = {"embd_pdrop": 0.0} if family == "gpt2" else {}
    return read_manifest(make_checkpoint(directory, family, layers=LAYERS, **more))


def _with_images(directory: Path, text: Path) -> Path:
    """A checkpoint of a model for images and the text of another."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28}
    eye = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2}
    causal = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    config = Gemma3Config(text_config=causal.config.to_dict(), vision_config=eye)
    model = Gemma3ForConditionalGeneration(config)
    model.model.language_model, model.lm_head = causal.model, causal.lm_head
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(text).save_pretrained(directory)
    return directory


@cache
def whole(family: str) -> TransformersModel:
    """The reference: nnsight over the full model, frozen as a server has it."""
    directory = checkpoint(family).directory
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    module.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return TransformersModel(module, task="text-generation", tokenizer=tokenizer)


def module_of(model: Any) -> Any:
    """The module behind a part of a client's model, for which nnsight has no public name."""
    return model._module


@dataclass
class DirectChannel:
    """A `SpanChannel` to sessions in this process."""

    sessions: list[TapSession]
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    operations: list[str] = field(default_factory=list)

    def call(self, hop: int, message: bytes) -> bytes:
        self.messages += 1
        self.sent_bytes += len(message)
        answer = self.sessions[hop].exchange(message)
        while answer is None:
            answer = self.sessions[hop].go_on()
        self.received_bytes += len(answer)
        return answer


@dataclass
class Remote:
    """The same model with its layers on hops."""

    model: TransformersModel
    channel: DirectChannel
    log: list[str]


@cache
def tree(family: str, layers: LayerRange) -> SpanTree:
    """A shard's instrumented span; shared by every session, as on a shard."""
    return SpanTree(load_span(checkpoint(family), layers, dtype=torch.float32, device=CPU), CPU)


SPLITS: dict[int, tuple[tuple[LayerRange, LayerRange], ...]] = {
    # (what the hop runs, what its shard holds)
    1: ((LayerRange(0, 6), LayerRange(0, 6)),),
    2: ((LayerRange(0, 2), LayerRange(0, 4)), (LayerRange(2, 6), LayerRange(1, 6))),
    3: (
        (LayerRange(0, 1), LayerRange(0, 4)),
        (LayerRange(1, 4), LayerRange(1, 6)),
        (LayerRange(4, 6), LayerRange(4, 6)),
    ),
    4: (
        (LayerRange(0, 1), LayerRange(0, 4)),
        (LayerRange(1, 3), LayerRange(1, 6)),
        (LayerRange(3, 4), LayerRange(1, 6)),
        (LayerRange(4, 6), LayerRange(4, 6)),
    ),
}
"""Overlapping shards for two hops and more."""
JOINED = ((LayerRange(0, 1), LayerRange(0, 1)), (LayerRange(1, 6), LayerRange(0, 6)))
"""Two hops of a model whose later layers see keys of each other."""


def remote(
    family: str,
    hops: int,
    limits: TapLimits | None = None,
    over: Callable[[list[TapSession]], DirectChannel] | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> Remote:
    """A fresh job over `hops` hops, to whose sessions it speaks `over` that."""
    split = JOINED if family in ("gemma4_e", "gemma3n") else SPLITS[hops]
    sessions = [TapSession(tree(family, held), run, limits or TapLimits()) for run, held in split]
    channel = (over or DirectChannel)(sessions)
    log: list[str] = []
    skeleton = load_skeleton(checkpoint(family), dtype=torch.float32)
    runs = [run for run, _ in split]
    model = job_model(skeleton, channel, runs, log.append, kept_bytes=kept_bytes)
    return Remote(model, channel, log)


def layers_of(model: Any) -> Any:
    """The list of decoder layers' envoys."""
    return model.transformer.h if hasattr(module_of(model), "transformer") else model.model.layers


def equal(found: Any, expected: Any, tolerance: float) -> None:
    """Fail unless both are the same structure of the same values.

    Unless exact, numbers may differ by `tolerance` of the largest one expected in their tensor.
    """
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        if tolerance == 0.0 or not expected.is_floating_point():
            assert torch.equal(found, expected), f"differ by {(found - expected).abs().max()}"
        else:
            largest = float(expected.detach().abs().max())
            assert largest > 0.0, "nothing can be told from a tensor of zeros"
            torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance * largest)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            equal(found[key], expected[key], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            equal(one, other, tolerance)
    else:
        assert found == expected


def sequences(items: Sequence[Any]) -> list[Any]:
    return list(items)
