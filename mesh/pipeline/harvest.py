"""Running a batch of prompts through the hops while each writes down what its layers put out.

Nothing is sampled and no activation comes here but what has to travel from hop to hop. A hop that
is lost costs the batch, which is run again from its beginning: files of half a batch are never
sealed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mesh.errors import BadRequest, NoRoute
from mesh.pipeline.commands import HarvestOrder
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.prompts import Prompts
from mesh.pipeline.refusal import named
from mesh.pipeline.route import FULL_DELAYS_S, HopLost
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.terms import SessionTerms
from mesh.types import GenerationRequest, WireDtype

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 1.0, 4.0)
SEAL_TIMEOUT_S = 120.0


async def harvest(
    model: AskerModel, sessions: Sessions, prompting: Prompts, order: HarvestOrder
) -> dict[str, Any]:
    """``{"prompts": [token ids], "cut": [numbers of prompts that were longer], "files": [what a hop
    says of a file, and its node]}``.

    Values are those of fp32 between the hops, whatever chat uses. Raises BadRequest for texts
    without a token, NoRoute when no set of shards serves it, DiskFull when those that do give no
    disk, and the last hop's error when the batch failed again and again.
    """
    most = min(order.max_tokens, model.max_positions)
    whole = [
        await prompting.ids(GenerationRequest("harvest", model.model_id, prompt=text), None)
        for text in order.texts
    ]
    prompts = [ids[:most] for ids in whole]
    cut = [number for number, ids in enumerate(whole) if len(ids) > most]
    rows = sum(map(len, prompts))
    if not all(prompts):
        raise BadRequest("A text has no tokens.", fix="Leave empty lines out.", param="texts")
    batch = replace(order.batch, rows=rows)
    terms = SessionTerms(
        model.model_id,
        model.weights_sha256,
        max(map(len, prompts)),
        WireDtype.FP32,
        harvest=batch,
        remote_ends=model.remote_ends(candidates=0),
    )
    delays = iter(RETRY_DELAYS_S)
    lost: HopLost | None = None
    while True:
        try:
            files = await _run(model, sessions, terms, prompts)
        except (HopLost, NoRoute) as error:
            delay = next(delays, None)
            if isinstance(error, HopLost):
                lost = error
            if lost is None or delay is None:  # that nobody serves it is no passing matter
                raise (named(error) if isinstance(error, HopLost) else error) from None
            logger.info("run=%s batch=%d starts again: %s", batch.run, batch.batch, error)
            await asyncio.sleep(delay)
        else:
            return {"prompts": prompts, "cut": cut, "files": files}


async def _run(
    model: AskerModel, sessions: Sessions, terms: SessionTerms, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    session = await sessions.open_fresh(terms, model.total_layers, FULL_DELAYS_S)
    try:
        feed = TokenFeed(model, session)
        for prompt in prompts:
            session.cut(0)
            async for _ in feed.advance(prompt):
                pass
        return await session.route.seal(SEAL_TIMEOUT_S)
    finally:
        sessions.release(session, keep=False)
