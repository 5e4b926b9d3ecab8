"""Attention over rows of different sessions, known to transformers as ``hearthnet``.

The linear layers of a model run over a batch of rows at once; here each row meets its own session's
keys, without padding. Instead of a mask tensor, models hand `CausalRule` from the mask function to
the attention: which keys a query sees is a rule, and only a chunk behind a past needs it spelt out.

Refuses what it does not compute: the name ``hearthnet-check`` runs the same code but raises
`NotExpressible` for masks that are not causal or sliding-window and for options that would change
the result (position biases). A model that passed once is run without the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from mesh.shard.device import cpu_has_amx

NAME = "hearthnet"
CHECKING_NAME = "hearthnet-check"

_IGNORED = frozenset(
    {
        "dropout", "sliding_window", "position_ids", "use_cache", "output_attentions", "is_causal",
        "output_hidden_states", "output_router_logits", "cache_position", "return_dict",
        "position_embeddings", "past_key_values", "past_key_value", "cache", "layer_idx",
        "head_mask",
    }
)  # fmt: skip
"""Keywords models pass to every attention that cannot change what this one computes."""

_COMPUTED = frozenset({"scaling", "softcap", "s_aux"})

_QUERY_BLOCK = 128
"""Rows computed at a time, at most, of a chunk whose score matrix is spelt out in full."""

_SPELT_OUT = 1 << 23
"""Scores of so many rows: 32 MiB, and several of them at once."""

SHORT_ROWS = 16
"""Rows of the longest step of a token and what is drafted behind it."""

_TILED_ROWS, _TILE = 64, 32
"""With so many rows torch's 16-bit kernel for matrix tiles packs them, and keeps what it compiled
for every shape of a tile that it ever met, for good: rows and keys are filled up to whole ones."""

_WIDENED = 1 << 20
"""Numbers of keys that are widened at a time: with the values' what one core's caches hold."""


class NotExpressible(Exception):
    """The model asks its attention for something that this one does not do; the text says what."""


class CausalRule:
    """A query sees itself and what stands before it, at most `window` keys in all (None: all)."""

    __slots__ = ("_chunk", "_mask", "window")

    def __init__(self, window: int | None) -> None:
        self.window = window
        self._chunk: tuple[int, ...] | None = None
        self._mask: torch.Tensor | None = None

    def mask(
        self, rows: int, keys: int, device: torch.device, more: tuple[int, int] = (0, 0)
    ) -> torch.Tensor:
        """(rows, keys) bool for the last `rows` of `keys` positions, and for `more` rows and keys
        behind these; kept for the next layer."""
        chunk = rows, keys, *more
        if self._mask is None or self._chunk != chunk:
            query = torch.arange(keys - rows, keys + more[0], device=device)[:, None]
            key = torch.arange(keys + more[1], device=device)[None, :]
            mask = key <= query
            if self.window is not None:
                mask &= key > query - self.window
            self._mask, self._chunk = mask, chunk
        return self._mask


_SINGLE_ROW: dict[int | None, CausalRule] = {}


def rule_mask(*, q_length: int, local_size: int | None = None, **_unused: Any) -> CausalRule:
    """The mask function: the rule itself, a fresh one per chunk so that its mask dies with it."""
    if q_length > 1:
        return CausalRule(local_size)
    rule = _SINGLE_ROW.get(local_size)
    if rule is None:
        rule = _SINGLE_ROW[local_size] = CausalRule(local_size)
    return rule


def checked_rule_mask(
    *,
    q_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    attention_mask: torch.Tensor | None = None,
    **_unused: Any,
) -> CausalRule:
    """As `rule_mask`, but raises NotExpressible when `mask_function` is another rule."""
    if attention_mask is not None:
        raise NotExpressible("a padding mask")
    # Both sides of every multiple of the window are where chunked and sliding rules part.
    edge = local_size or 64
    marks = sorted({max(0, k * edge + d) for k in range(4) for d in (-2, -1, 0, 1, 2)})
    query, key = torch.tensor(marks)[:, None], torch.tensor(marks)[None, :]
    zero = torch.tensor(0)
    found = torch.as_tensor(mask_function(zero, zero, query, key))
    expected = key <= query
    if local_size is not None:
        expected = expected & (key > query - local_size)
    if not torch.equal(found.expand_as(expected), expected):
        raise NotExpressible("a mask that is neither causal nor a sliding window")
    return rule_mask(q_length=q_length, local_size=local_size)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, heads, rows, width)
    key: torch.Tensor | list[torch.Tensor],  # (batch, kv heads, keys, width), or one per session
    value: torch.Tensor | list[torch.Tensor],
    attention_mask: CausalRule,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function; returns (batch, rows, heads, width)."""
    attend = attention_of(options.get("softcap"), options.get("s_aux"))
    if isinstance(key, list) or isinstance(value, list):
        outputs = [
            attend(query[i : i + 1], key[i], value[i], attention_mask, scaling)
            for i in range(len(key))
        ]
        return torch.cat(outputs).transpose(1, 2).contiguous(), None
    output = attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def checked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | list[torch.Tensor],
    value: torch.Tensor | list[torch.Tensor],
    attention_mask: CausalRule,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As `ragged_attention`, but raises NotExpressible for options that would change the result."""
    if not isinstance(attention_mask, CausalRule):
        raise NotExpressible("an attention mask of the model's own making")
    for name, option in options.items():
        if option is not None and name not in _IGNORED | _COMPUTED:
            raise NotExpressible(f"the attention option {name}")
    if options.get("is_causal") is False:
        raise NotExpressible("attention that looks ahead")
    return ragged_attention(module, query, key, value, attention_mask, **options)


def register() -> None:
    """Make both names known to transformers; safe to call twice."""
    AttentionInterface.register(NAME, ragged_attention)
    AttentionInterface.register(CHECKING_NAME, checked_attention)
    AttentionMaskInterface.register(NAME, rule_mask)
    AttentionMaskInterface.register(CHECKING_NAME, checked_rule_mask)


Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, CausalRule, float | None], torch.Tensor
]
"""Of (1, heads, rows, width) queries, (1, kv heads, keys, width) keys and values, the rule and the
scale: (1, heads, rows, width)."""


def attention_of(softcap: float | None, sinks: torch.Tensor | None = None) -> Attend:
    """The attention of one session. `sinks` (heads,) are scores that take weight and give nothing
    (arXiv:2309.17453, as gpt-oss learns them)."""
    return _attend if softcap is None and sinks is None else _spelt_out(softcap, sinks)


def row_exact_attention_of(softcap: float | None, sinks: torch.Tensor | None = None) -> Attend:
    """The same on a CPU, where each row of a step of at most `SHORT_ROWS` has the bits that it has
    in a step of its own: the kernels add up several rows in another order than one."""
    together, is_spelt_out = attention_of(softcap, sinks), softcap is not None or sinks is not None

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: CausalRule,
        scaling: float | None,
    ) -> torch.Tensor:
        rows = query.shape[2]
        if not 1 < rows <= SHORT_ROWS:
            return together(query, key, value, rule, scaling)
        dtype = query.dtype
        if not is_spelt_out and _is_widened(query, key):
            query, key, value = query.float(), key.float(), value.float()  # once for all rows
        past, alone = key.shape[2] - rows, rule_mask(q_length=1, local_size=rule.window)
        found = [
            together(
                query[:, :, row : row + 1],
                key[:, :, : past + row + 1],
                value[:, :, : past + row + 1],
                alone,
                scaling,
            )
            for row in range(rows)
        ]
        return torch.cat(found, 2).to(dtype)

    return attend


def _visible(
    rows: int, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the keys that at least one of the rows sees."""
    if window is None or key.shape[2] <= window + rows - 1:
        return key, value
    first = key.shape[2] - (window + rows - 1)
    return key[:, :, first:], value[:, :, first:]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: CausalRule,
    scaling: float | None,
) -> torch.Tensor:
    rows, heads = query.shape[2], query.shape[1]
    if rule.window is not None:
        key, value = _visible(rows, key, value, rule.window)
    kv_heads, keys = key.shape[1], key.shape[2]
    on_cpu = query.device.type == "cpu"
    if rows == 1 and on_cpu and heads > kv_heads:
        # Heads that share keys become rows that share keys: their keys are read once, not per head.
        grouped = query.reshape(len(query), kv_heads, heads // kv_heads, query.shape[3])
        together = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return together.reshape(len(query), heads, 1, value.shape[3])
    dtype = query.dtype
    if on_cpu and dtype != torch.float32 and not _half_is_fast():
        at_once = _WIDENED // (keys * key.shape[3]) or 1
        if rows == 1 and kv_heads > at_once:
            return _heads_in_turn(query, key, value, scaling, at_once)
        query, key, value = query.float(), key.float(), value.float()
    more = (0, 0)
    if on_cpu and query.dtype != torch.float32 and rows >= _TILED_ROWS:
        more = -rows % _TILE, -keys % _TILE
        query, key, value = _filled(query, more[0]), _filled(key, more[1]), _filled(value, more[1])
    # From the first position on the kernel's own causal flag says it all, and is the fastest.
    whole = rows == keys and (rule.window is None or rows <= rule.window)
    mask = None if rows == 1 or whole else rule.mask(rows, keys, query.device, more)
    shared = heads > kv_heads
    if shared and not on_cpu and (mask is not None or query.device.type == "mps"):
        # CUDA's fast kernels take shared heads only without a mask, older Apple ones not at all.
        key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
        shared = False
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=whole and rows > 1,
        enable_gqa=shared,
    )
    return output[:, :, :rows].to(dtype)


def _filled(part: torch.Tensor, more: int) -> torch.Tensor:
    """With zeros in so many more positions behind it, which none of its own rows sees."""
    return F.pad(part, (0, 0, 0, more)) if more else part


def _heads_in_turn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, size: int
) -> torch.Tensor:
    """A row's attention, each `size` heads with their keys widened. The bits are those of all at
    once; with thousands of keys it takes half the time, as nothing wide goes through the memory."""
    found = [
        F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scaling)
        for q, k, v in zip(
            *(torch.split(each, size, 1) for each in (query, key, value)), strict=True
        )
    ]
    return torch.cat(found, 1).to(query.dtype)


def _is_widened(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a single row is computed in fp32 though it is not: heads that share keys are not."""
    is_shared = query.shape[1] > key.shape[1]
    return not is_shared and query.dtype != torch.float32 and not _half_is_fast()


@cache
def _half_is_fast() -> bool:
    # Without AMX, torch's 16-bit CPU attention takes two to four times as long as its fp32 one.
    return cpu_has_amx()


def _spelt_out(softcap: float | None, sinks: torch.Tensor | None) -> Attend:
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: CausalRule,
        scaling: float | None,
    ) -> torch.Tensor:
        rows, heads = query.shape[2], query.shape[1]
        key, value = _visible(rows, key, value, rule.window)
        kv_heads, keys = key.shape[1], key.shape[2]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = None if rows == 1 else rule.mask(rows, keys, query.device)
        blocks, at_once = [], max(1, min(_QUERY_BLOCK, _SPELT_OUT // (heads * keys)))
        for first in range(0, rows, at_once):
            block = slice(first, first + at_once)
            some = query[:, :, block]
            shape = len(some), heads, some.shape[2]
            # Heads that share keys become rows that share keys: their keys are read once.
            grouped = some.reshape(len(some), kv_heads, -1, some.shape[3])
            scores = (torch.matmul(grouped, key.transpose(2, 3)) * scale).view(*shape, keys)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if mask is not None:
                scores = scores.masked_fill(~mask[block], float("-inf"))
            if sinks is not None:
                beside = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*shape, 1)
                scores = torch.cat([scores, beside], -1)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            weights = weights[..., :keys].reshape(*grouped.shape[:3], keys)
            blocks.append(torch.matmul(weights, value).view(*shape, value.shape[3]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    return attend
