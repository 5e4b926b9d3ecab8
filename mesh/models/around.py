"""What transformers makes of a checkpoint of a model for images and text, around its half for text.

Clients that name parts of a model name those of the whole. What computes text is the half that was
loaded; the rest has no weights, stays on the meta device and refuses to compute.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from mesh.errors import BadRequest, UnsupportedFamily
from mesh.models.anatomy import base_of
from mesh.models.families import whole_config
from mesh.models.manifest import Manifest


def around(text: Any, manifest: Manifest) -> Any:
    """What `AutoModelForCausalLM` makes of the checkpoint, with the causal model `text` in the
    places of its text; `text` itself where it makes that.

    Raises UnsupportedFamily where what it makes takes packages that are not here.
    """
    if manifest.gguf is not None:
        return text
    config = whole_config(manifest)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001
    if kind is None or isinstance(text, kind):
        return text
    attention = text.config._attn_implementation  # noqa: SLF001 - it has no other name
    try:
        with torch.device("meta"), no_init_weights():
            whole = kind._from_config(config, dtype=text.dtype, attn_implementation=attention)  # noqa: SLF001
    except ImportError as error:  # of what computes images, in Gemma 3n
        lacking = ", ".join(re.findall(r"requires the (\S+) library", str(error))) or str(error)
        raise UnsupportedFamily(
            f"Clients of nnsight see a {kind.__name__}, and this node cannot lay one out: it lacks"
            f" {lacking}.",
            fix="Install that where hearthnet is installed, and start the node again.",
        ) from error
    _put(whole, base_of(text)[1], text.get_output_embeddings())
    for key in whole.config.sub_configs:
        if type(getattr(whole.config, key)) is type(text.config):
            setattr(whole.config, key, text.config)  # what is asked of one is asked of the other
    ours = set(text.modules())
    for part in whole.modules():
        if part not in ours and any(True for _ in part.parameters(recurse=False)):
            part.register_forward_pre_hook(_refuse)
    return whole.eval().requires_grad_(requires_grad=False)


def _put(whole: Any, base: nn.Module, head: nn.Module) -> None:
    named = list(whole.named_modules())
    place = next(name for name, module in named if type(module) is type(base))
    head_place = next(name for name, each in named if each is whole.get_output_embeddings())
    whole.set_submodule(place, base)
    whole.set_submodule(head_place, head)
    # First of all, as transformers takes a model to be where its first weight is.
    owner, _, name = place.rpartition(".")
    parts = whole.get_submodule(owner)._modules  # noqa: SLF001 - named_children() is a copy
    parts.update({other: parts.pop(other) for other in list(parts) if other != name})


def _refuse(part: nn.Module, _args: object) -> None:
    raise BadRequest(
        f"The model's {type(part).__name__} is not for text, and only text is served.",
        fix="Leave out images and sounds.",
    )
