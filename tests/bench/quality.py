"""What each format costs: the built-in model's loss on texts that it was not trained on."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer

from mesh.models.builtin import checkpoint_dir
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import read_manifest
from mesh.shard.compiled.formats import Quant
from mesh.shard.compiled.head import compile_head
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import quantised_span
from mesh.shard.runtime import Runtime, StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tools.builtin_model.corpus import held_out_documents
from tools.builtin_model.evaluate import held_out_loss

DOCUMENTS = 200
CPU = torch.device("cpu")


def measure() -> dict[str, Any]:
    """Nats per token and perplexity by format; ``difference`` is to fp32, in percent."""
    tokenizer = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
    documents = held_out_documents(DOCUMENTS)
    losses = {
        name: held_out_loss(partial(_forward, *_model(name)), tokenizer, documents)
        for name in ("fp32", "bf16", "int8", "int4")
    }
    perplexity = {name: math.exp(loss) for name, loss in losses.items()}
    return {
        name: {
            "nats": round(losses[name], 4),
            "perplexity": round(perplexity[name], 4),
            "difference": round(100 * (perplexity[name] / perplexity["fp32"] - 1), 2),
        }
        for name in losses
    }


def _model(name: str) -> tuple[Any, Runtime]:
    """Ends and layers of the built-in model in this format."""
    manifest = read_manifest(checkpoint_dir())
    layers = LayerRange(0, manifest.total_layers)
    if name in ("fp32", "bf16"):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
        ends = load_ends(manifest, dtype=dtype, device=CPU)
        loaded = load_span(manifest, layers, dtype=dtype, device=CPU)
        return ends, TorchRuntime(loaded, device=CPU, dtype=dtype)
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    quant: Quant = "int8" if name == "int8" else "int4"
    compile_head(ends, manifest.weights_sha256, None, 1, quant)
    loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    span = quantised_span(loaded, quant, "", None)
    return ends, CompiledRuntime(span, threads=1, positions=2048)


def _forward(ends: Any, runtime: Runtime, input_ids: torch.Tensor) -> Any:
    hidden = ends.embed(input_ids, 0).to(runtime.dtype)
    (output,) = runtime.forward([StepInput(runtime.new_cache(2048), 0, hidden)])
    return SimpleNamespace(logits=ends.logits(output))
