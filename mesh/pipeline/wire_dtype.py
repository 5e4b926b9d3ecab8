"""Finds out how narrow a model's activations may travel, once per checkpoint.

fp16 halves the traffic of fp32 but not every model survives it: some overflow it, some change their
most likely token. So fixed prompts are run over the real hops with each candidate and compared with
fp32; the narrowest that changes nothing but rounding is kept with the checkpoint's hash.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mesh.models.hashing import read_cached, write_json_atomically
from mesh.pipeline.failover import Failover, FailoverSettings
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.terms import SessionTerms
from mesh.routing.router import ShardRouter
from mesh.types import GenerationRequest, WireDtype

PROMPTS = 3
PROMPT_ROWS = 12
_MOST_TEXT_ROWS = 64
_TEXT = '1. The river froze; nobody crossed.\n\n2. "Why?" - because (they said) 40 % was ice.\n'
"""Sentence ends, line breaks and digits are where models keep their largest activations."""

MAX_RELATIVE_ERROR = 1e-2
"""Of the logits, as the ratio of norms. Rounding to fp16 costs about 1e-3, to bf16 about 1e-2 only
where the hops compute more precisely than bf16 themselves."""


@dataclass(frozen=True, slots=True)
class WireVerdict:
    """The dtype to use and what was seen of each candidate, in words a person can read."""

    dtype: WireDtype
    reason: str


async def probe(model: AskerModel, sessions: Sessions, router: ShardRouter) -> WireVerdict:
    """Compare candidates with fp32 over the hops there are now. Raises as a generation would."""
    reference, _ = await _logits(model, sessions, router, WireDtype.FP32)
    seen: list[str] = []
    for candidate in (WireDtype.FP16, WireDtype.BF16):
        logits, widened = await _logits(model, sessions, router, candidate)
        fault, error = _compare(reference, logits, widened)
        seen.append(f"{candidate}: {fault or 'fine'} (relative error {error:.1e})")
        if not fault:
            return WireVerdict(candidate, "; ".join(seen))
    return WireVerdict(WireDtype.FP32, "; ".join(seen))


async def exercise(
    model: AskerModel, sessions: Sessions, router: ShardRouter, dtype: WireDtype
) -> None:
    """Run the fixed prompts once, for whoever watches the hops. Raises as a generation would."""
    await _logits(model, sessions, router, dtype)


def read_verdict(cache_dir: Path, weights_sha256: str) -> WireVerdict | None:
    """What an earlier probe of this checkpoint found; None when there was none."""
    return read_cached(_path(cache_dir, weights_sha256), WireVerdict)


def write_verdict(cache_dir: Path, weights_sha256: str, verdict: WireVerdict) -> None:
    """Keep a verdict for the next start."""
    write_json_atomically(_path(cache_dir, weights_sha256), asdict(verdict))


async def _logits(
    model: AskerModel, sessions: Sessions, router: ShardRouter, dtype: WireDtype
) -> tuple[torch.Tensor, int]:
    """(prompts, vocab) last-row logits in fp32, and how many tensors overflowed."""
    prompts = _prompts(model)
    terms = SessionTerms(
        model.model_id,
        model.weights_sha256,
        max(map(len, prompts)),
        dtype,
        remote_ends=model.remote_ends(),
    )
    rows: list[torch.Tensor] = []
    session = await sessions.open_fresh(terms, model.total_layers)
    try:
        failover = Failover(session, router, model.row_size, FailoverSettings(), None)
        feed = TokenFeed(model, session, failover)
        for ids in prompts:
            session.cut(0)
            async for _ in feed.advance(ids):
                pass  # a hop that is lost here is replaced as in any generation
            rows.append((await feed.logits()).float())
    finally:
        sessions.release(session, keep=False)
    return torch.stack(rows), session.route.widened


def _prompts(model: AskerModel) -> list[list[int]]:
    """Tokens from all over the vocabulary, and a text as the tokenizer begins it."""
    spread = [
        [(7919 * (number * PROMPT_ROWS + i + 1)) % model.vocab_size for i in range(PROMPT_ROWS)]
        for number in range(PROMPTS)
    ]
    text = model.text.prompt_ids(GenerationRequest("probe", model.model_id, prompt=_TEXT), None)
    return [*spread, text[:_MOST_TEXT_ROWS]] if text else spread


def _compare(reference: torch.Tensor, logits: torch.Tensor, widened: int) -> tuple[str, float]:
    error = float((logits - reference).norm() / reference.norm().clamp_min(1e-12))
    if widened:
        return f"{widened} tensors overflow", error
    if not error <= MAX_RELATIVE_ERROR:
        return "too coarse", error
    best = reference.topk(2, dim=-1).values
    spread = (reference.amax(-1) - reference.amin(-1)).clamp_min(1e-12)
    clear = (best[:, 0] - best[:, 1]) / spread > MAX_RELATIVE_ERROR
    flipped = (reference.argmax(-1) != logits.argmax(-1)) & clear
    return ("changes the most likely token" if bool(flipped.any()) else ""), error


def _path(cache_dir: Path, weights_sha256: str) -> Path:
    return cache_dir / "wire-dtype" / f"{weights_sha256}.json"
