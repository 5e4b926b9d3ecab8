"""Prove that a model type nobody has tested can be cut: compare a small random twin with the whole.

The twin keeps the config's every layer and its pattern and shrinks only widths, so that whatever
depends on a layer's index or on its neighbours shows. It is saved as a checkpoint and loaded back
in spans, which also proves how its tensors are named. A verdict holds for one twin under one
version of transformers and of this package, which may cut by now what it could not; it is kept on
disk when there is a cache directory. A comparison that broke off gives none: what it lacked
(memory, room on a disk) may be there the next time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from mesh.errors import MeshError, UnsupportedFamily
from mesh.models.anatomy import base_of
from mesh.models.empty import Bounded
from mesh.models.families import Family, family_of, has_states, overrides
from mesh.models.filling import Placement
from mesh.models.mamba import name_of_cache
from mesh.models.manifest import read_manifest
from mesh.models.span import build_ends, build_span, empty_base
from mesh.models.span_cache import SpanCache
from mesh.models.verdicts import hash_of, settled_once
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_CHUNKS = (13, 7, 1, 1)
_TOLERANCE = 1e-4
_WIDTHS = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "ffn_hidden_size": 96,
    "n_inner": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "head_dim": 64, "max_position_embeddings": 256,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2,
    "moe_topk": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1, "intermediate_size_mlp": 48,
    "rotary_dim": 16, "sliding_window": 8, "attention_chunk_size": 8, "floor_scale": 8,
    "shared_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_heads": 4,
    "linear_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16, "chunk_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "moe_shared_expert_intermediate_size": 32, "window_size": 8,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 64, "index_topk": 6,
    "index_head_dim": 32, "index_n_heads": 16, "word_embed_proj_dim": 32, "ffn_dim": 96,
}  # fmt: skip
_QUERY = "qk_nope_head_dim", "qk_rope_head_dim"
_SUMS = (
    ("head_dim", _QUERY[1:]), ("head_dim", _QUERY), ("qk_head_dim", _QUERY),
    ("word_embed_proj_dim", ("hidden_size",)),
)  # fmt: skip
"""What some configs say a second time."""
_TELLING = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 1.0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), 0.1),
    "layer_norm_epsilon": 0.1,
}
"""What a few random rows would hardly show otherwise, and a model's own may show well."""
_HEADS, _HEADS_PER_LAYER = 4, "num_attention_heads_per_layer"
_KV_HEADS = "num_key_value_heads", "num_kv_heads"
_FIRST_POSITIONS, _FEW_POSITIONS = "original_max_position_embeddings", 8
settled: dict[str, str] = {}
"""The verdicts that this process has reached or read, by their keys; empty: none is settled."""


def require_proof(family: Family, cache_dir: Path | None) -> None:
    """Return if the family's models may be cut; otherwise raise UnsupportedFamily with the reason.

    Blocks for up to a few seconds the first time a model type outside `families.PROVEN` is seen.
    """
    if family.proven:
        return
    twin = twin_config(family.config)
    versions = f"{transformers.__version__}-{hash_of(sorted(Path(__file__).parent.glob('*.py')))}"
    key = f"{family.model_type}-{versions}-{structure_of(twin)}"
    file = cache_dir / f"proof-{key}.json" if cache_dir else None
    if reason := settled_once(settled, key, file, lambda: _verdict(family, twin)):
        raise _refused(family, reason)


def structure_of(config: Any) -> str:
    """What two configs have in common that say the same."""
    structure = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(structure.encode()).hexdigest()[:16]


def twin_config(config: Any, positions: int | None = None) -> Any:
    """A copy of `config` with the same layers and small widths.

    Of what it says of positions beyond the first so many, that which sessions of at most
    `positions` come to is to be seen in a few rows; None: all of it.
    """
    twin, own = copy.deepcopy(config), overrides(config)

    def said(name: str) -> Any:
        return vars(config).get(name) if own else getattr(config, name, None)

    heads = said("num_attention_heads") or _HEADS
    sizes = dict(_WIDTHS, num_attention_heads=_HEADS)
    for name in _KV_HEADS:
        sizes[name] = max(1, _HEADS * (said(name) or heads) // heads)
    sizes.update(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    each = said("head_dim")
    width = min(each, sizes["head_dim"]) if each else _narrow_head(config)
    # Some say how wide a head is, and count on what all of them are together (Helium).
    if not own and width and (not each or each * heads == said("hidden_size")):
        sizes["hidden_size"] = _HEADS * width
    for name, size in sizes.items():
        value = said(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            # A field that cannot be set follows from others that can.
            with contextlib.suppress(AttributeError):
                setattr(twin, name, size)
    if each_layer := said(_HEADS_PER_LAYER):
        alike = twin.num_key_value_heads
        fewer = (max(1, _HEADS * n // heads // alike) * alike for n in each_layer)
        setattr(twin, _HEADS_PER_LAYER, [*fewer])
    _add_up(said, twin)
    inner = (said("expand") or 0) * config.hidden_size
    if inner and inner == (said("num_heads") or 0) * (each or 0):  # Mamba 2
        twin.num_heads = said("expand") * twin.hidden_size // twin.head_dim
    if isinstance(said("eos_token_id"), list):
        twin.eos_token_id = [0]
    vars(twin).update({name: _TELLING[name] for name in _TELLING if vars(twin).get(name)})
    _turn_alike(config, twin, positions)
    if own:
        twin.per_layer_config = {
            layer: {
                name: _in_scale(value, said(name), sizes.get(name)) for name, value in each.items()
            }
            for layer, each in own.items()
        }
    return twin


def _add_up(said: Callable[[str], Any], twin: Any) -> None:
    """Let the twin say a second time what the config does."""
    for name, parts in _SUMS:
        widths = [said(part) for part in parts]
        if None not in widths and said(name) == sum(widths):
            with contextlib.suppress(AttributeError):
                setattr(twin, name, sum(getattr(twin, part) for part in parts))


def _turn_alike(config: Any, twin: Any, positions: int | None) -> None:
    """Let the twin, whose widths are set, turn its narrower heads; `positions` as above."""
    ropes = getattr(twin, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if not isinstance(rope, dict):
            continue
        first = rope.get(_FIRST_POSITIONS)
        if first and (positions is None or positions > first):
            rope[_FIRST_POSITIONS] = min(_FEW_POSITIONS, first)
            if getattr(twin, _FIRST_POSITIONS, None):  # some say it themselves, and hold to that
                setattr(twin, _FIRST_POSITIONS, rope[_FIRST_POSITIONS])
        rope.update(_fewer_numbers(rope, config, twin))


def _head_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads


def _narrow_head(config: Any) -> int:
    """How wide heads are to be of which a part turns that operators take, some of which take it by
    sixteen; 0 where they may be of any width."""
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    own = _head_width(config)
    if own % 16:
        return own
    if part >= 1 or int(own * part) % 16:
        return 0
    widths = range(16, own, 16)
    return next((n for n in widths if int(n * part) % 16 == 0 < int(n * part)), own)


def _fewer_numbers(rope: dict[str, Any], config: Any, twin: Any) -> dict[str, list[Any]]:
    """What is said for each frequency of a head, for those of the twin's heads: the factors of
    LongRoPE, and how many are for each side of an image, which a text has not."""

    def scaled(count: int) -> int:
        return count * _head_width(twin) // _head_width(config)

    fewer = {}
    for name in ("short_factor", "long_factor"):
        if isinstance(factors := rope.get(name), list) and factors:
            count = max(1, scaled(len(factors)))
            fewer[name] = [factors[index * len(factors) // count] for index in range(count)]
    if isinstance(sections := rope.get("mrope_section"), list) and sections:
        others = [scaled(each) for each in sections[1:]]
        fewer["mrope_section"] = [scaled(sum(sections)) - sum(others), *others]
    return fewer


def _in_scale(value: Any, general: Any, small: int | None) -> Any:
    """What a layer has otherwise, as small as what the others have is made."""
    if small is None or not isinstance(value, int) or not isinstance(general, int):
        return value
    return max(1, value * min(small, general) // general)


def _verdict(family: Family, twin: Any) -> str:
    """Why the family cannot be cut, or an empty string. Raises UnsupportedFamily without either."""
    try:
        with tempfile.TemporaryDirectory(prefix="hearthnet-proof-") as directory:
            difference = _compare(family, twin, Path(directory))
    except MeshError as error:
        reason = f"its twin could not be loaded in parts ({error.message.rstrip('.')})"
        raise _refused(family, reason) from error
    # Whatever foreign modelling code raises here means the same: this model is not proved.
    except Exception as error:
        reason = f"its twin failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}"
        raise _refused(family, reason) from error
    agrees = difference <= _TOLERANCE
    reason = "" if agrees else f"in parts it differs from the whole by {difference:.2g}"
    logger.info("proof model_type=%s verdict=%s", family.model_type, reason or "can be cut")
    return reason


def _refused(family: Family, reason: str) -> UnsupportedFamily:
    return UnsupportedFamily(
        f"Model type {family.model_type} cannot be cut into layer ranges: {reason}.",
        fix="It needs an entry in mesh/models/entries.py; or use a model of a tested type.",
    )


def _compare(family: Family, twin: Any, directory: Path) -> float:
    """The largest difference of logits between whole and parts, relative to the largest logit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with Bounded():
            whole = family.causal_class._from_config(twin, dtype=torch.float32).eval()  # noqa: SLF001
        for parameter in whole.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.1)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        ids = torch.randint(0, twin.vocab_size, (1, sum(_CHUNKS)))
    whole.save_pretrained(directory)
    found = []
    if has_states(twin):  # some are carried on into single rows only, some not as into others
        found += [_run_whole(whole, ids, chunks) for chunks in ([sum(_CHUNKS)], [1] * sum(_CHUNKS))]
    if family.entry.adapt is not None:
        family.entry.adapt(base_of(whole)[1])
    expected = _run_whole(whole, ids)
    count = twin.num_hidden_layers
    halves = [0, (count + 1) // 2, count]
    singles = list(range(count + 1))
    found += [_run_parts(directory, cuts, ids) for cuts in (halves, singles)]
    return max(largest_difference(each, expected) for each in found)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a part of the largest number expected; infinite where one is none."""
    largest = float((found - expected).abs().max() / expected.abs().max())
    return largest if largest == largest else float("inf")  # noqa: PLR0124 - NaN


@torch.no_grad()
def _run_whole(model: Any, ids: torch.Tensor, chunks: Sequence[int] = _CHUNKS) -> torch.Tensor:
    cache, position, parts = DynamicCache(config=model.config), 0, []
    for chunk in torch.split(ids, list(chunks), dim=1):
        # Not every model asks its cache where a chunk stands.
        places = torch.arange(position, position + chunk.shape[1]).unsqueeze(0)
        held = {name_of_cache(model): cache}
        parts.append(model(chunk, position_ids=places, **held).logits)
        position += chunk.shape[1]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def _run_parts(directory: Path, cuts: list[int], ids: torch.Tensor) -> torch.Tensor:
    manifest = read_manifest(directory)
    cuts = sorted({manifest.cuts.first(cut) for cut in cuts})
    family = family_of(manifest)
    placement = Placement(torch.float32, torch.device("cpu"))
    ends = build_ends(manifest, family, placement)
    ranges = [LayerRange(start, stop) for start, stop in pairwise(cuts)]
    whole = empty_base(family, placement)
    spans = [build_span(manifest, family, layers, placement, whole=whole) for layers in ranges]
    caches = [SpanCache(span.config) for span in spans]
    position, parts = 0, []
    for chunk in torch.split(ids, list(_CHUNKS), dim=1):
        hidden = ends.embed(chunk, position)
        places = torch.arange(position, position + chunk.shape[1]).unsqueeze(0)
        for span, cache in zip(spans, caches, strict=True):
            hidden = span.module(
                inputs_embeds=hidden, position_ids=places, past_key_values=cache, use_cache=True
            ).last_hidden_state
        parts.append(ends.logits(hidden))
        position += chunk.shape[1]
    return torch.cat(parts, dim=1)
