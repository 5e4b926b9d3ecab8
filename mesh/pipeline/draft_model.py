"""A smaller model of the same vocabulary that guesses how an answer goes on.

It is whole on the asker's machine and computes on a thread of its own, so that other answers go on
meanwhile. What it guesses is never taken unseen (see `mesh.pipeline.drafting`): how exact its
layers are, or whether it runs at all, changes no answer. Knows no hops and no sampler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mesh.errors import BadValue, MeshError
from mesh.models.manifest import read_manifest
from mesh.models.progress import Progress
from mesh.pipeline.checkpoint import DEFAULT_MAX_POSITIONS, load_asker, taking
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.model import AskerModel
from mesh.pipeline.sessions import common_prefix
from mesh.processes.lifecycle import LoadNeed
from mesh.shard.commands import ShardRequest
from mesh.shard.device import choose_device
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import StepInput
from mesh.shard.settings import ShardSettings
from mesh.types import Endpoint, LayerRange, ModelId, NodeId

if TYPE_CHECKING:
    from mesh.shard.runtime import KeyValueCache, Runtime

logger = logging.getLogger(__name__)

DRAFT_MODEL_ID = ModelId("draft")
_SMALLER = "Take a smaller one, or none (research.distributed_inference.draft_model)."
MAX_TEXTS = 4
"""Answers that it reads along with at the same time; others get no guesses."""

READ_ROWS = 256
"""Positions of a text that it computes at once; in between it looks whether anybody wants them."""

PATIENCE_S = 5.0
"""A guess that takes longer is of no use, and there are no more for that answer."""


class DraftModel:
    """The model, for the answers of one asker. `vocab_size` is that of the model it guesses for."""

    def __init__(self, model: AskerModel, runtime: Runtime, vocab_size: int) -> None:
        self.texts = 0
        self.readings: set[Future[list[int]]] = set()
        """Texts that are read, or are to be, before anything is guessed."""
        self._model = model
        self._runtime = runtime
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft-model")

    def read_along(self) -> DraftReader | None:
        """A reader for one more answer, or None; it is to be closed."""
        if self.texts >= MAX_TEXTS:
            return None
        self.texts += 1
        return DraftReader(self, self._thread)

    def close(self) -> None:
        """Guess no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # What follows blocks, and runs on the thread.

    def new_cache(self, positions: int) -> KeyValueCache:
        """For one text, of so many at most."""
        return self._runtime.new_cache(positions)

    def read(self, cache: KeyValueCache, ids: Sequence[int]) -> torch.Tensor:
        """The logits (vocab,) of what follows `ids`, entered behind what `cache` holds."""
        hidden = self._model.own_ends.embed(torch.tensor([ids]), cache.length)
        hidden = hidden.to(self._runtime.dtype)
        (hidden,) = self._runtime.forward([StepInput(cache, cache.length, hidden)])
        return self._model.own_ends.logits(hidden[:, -1:])[0, 0]

    def likeliest(self, logits: torch.Tensor) -> int:
        """The token that it would say."""
        return int(logits[: self._vocab_size].argmax())

    def positions_for(self, text: Sequence[int]) -> int:
        """How long a text may become that is turned as this one is: where short texts are turned
        otherwise than long ones (`mesh.models.rope`), a short one stays short."""
        short = self._model.short_positions
        return short if len(text) <= short else self._model.max_positions

    def can_read(self, text: Sequence[int], more: int = 0) -> bool:
        """Whether `text` may have `more` tokens behind it, and none that this model does not know:
        larger ones of a family may have a few."""
        fits = len(text) + more <= self.positions_for(text)
        return fits and max(text) < self._model.vocab_size


class DraftReader:
    """One answer, as the draft model reads it: a cache, and the tokens that it holds."""

    def __init__(self, model: DraftModel, thread: ThreadPoolExecutor) -> None:
        self._model: DraftModel | None = model
        self._thread = thread
        self._cache: KeyValueCache | None = None
        self._held: list[int] = []
        self._positions = 0
        """For so long a text it has been read."""
        self._reading: Future[list[int]] | None = None

    def prepare(self, text: Sequence[int]) -> None:
        """Read `text` while something else is waited for; until that is done there is no guess."""
        if self._model is not None and self._model.can_read(text):
            self._positions = self._model.positions_for(text)
            reading = self._thread.submit(self._guess, self._model, list(text), 0)
            self._model.readings.add(reading)
            reading.add_done_callback(self._model.readings.discard)
            self._reading = reading

    async def guess(self, text: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that it would go on with; none where it cannot, or is too slow.

        None as well while it reads another text: that may take longer than the guess is worth.
        """
        model, reading = self._model, self._reading
        is_ready = reading is not None and reading.done()
        if model is None or not is_ready or not model.can_read(text, count):
            return []
        if model.readings - {reading}:
            return []
        if model.positions_for(text) != self._positions:  # as a long text it is to be read anew
            self.prepare(text)
            return []
        working = asyncio.wrap_future(self._thread.submit(self._guess, model, list(text), count))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await working
        except TimeoutError:
            logger.info("no more drafts for this answer: guessing took over %g s", PATIENCE_S)
        except (MeshError, RuntimeError) as error:  # of its device; no answer depends on it
            logger.warning("no more drafts for this answer: %s", error)
        self.close()
        return []

    def close(self) -> None:
        """Guess no more, and let others have the place."""
        if self._model is not None:
            self._model.texts -= 1
            self._model = self._cache = None
        if self._reading is not None:
            self._reading.cancel()

    def _is_closed(self) -> bool:
        return self._model is None

    def _guess(self, model: DraftModel, text: list[int], count: int) -> list[int]:
        """On the thread; stops soon after `close`."""
        if self._is_closed():
            return []
        if self._cache is None or self._cache.max_tokens != self._positions:
            self._cache, self._held = model.new_cache(self._positions), []
        cache, held = self._cache, self._held
        # The last token is entered anew where it is there already: the next one comes from it.
        known = cache.held(min(common_prefix(held, text), len(text) - 1))
        cache.cut(known)
        del held[known:]
        for start in range(known, len(text), READ_ROWS):
            if self._is_closed():
                return []
            part = text[start : start + READ_ROWS]
            logits = model.read(cache, part)
            held += part
        guessed: list[int] = []
        while len(guessed) < count and not self._is_closed():
            guessed.append(model.likeliest(logits))
            if len(guessed) < count:
                logits = model.read(cache, guessed[-1:])
                held += guessed[-1:]
        return guessed


def load_asker_and_draft(
    directory: Path,
    model_id: ModelId,
    options: AskerOptions,
    begins: Callable[[LoadNeed, Progress], object] = lambda loading, progress: None,
) -> tuple[AskerModel, list[str]]:
    """`load_asker`, with the draft model of the options; or why there is none among the reasons.

    Blocks. Raises as `load_asker`.
    """
    model, reasons = load_asker(directory, model_id, options, begins)
    if options.draft_model is None or options.draft_model == directory:
        return model, reasons
    try:
        draft, reason = _load_draft(options.draft_model, options, model)
    except MeshError as error:
        logger.warning("no draft model for %s: %s", model_id, error)
        return model, [*reasons, f"no draft model: {error.message}"]
    return replace(model, draft=draft), [*reasons, reason]


def _load_draft(
    directory: Path, options: AskerOptions, model: AskerModel
) -> tuple[DraftModel, str]:
    manifest = read_manifest(directory, model_id=DRAFT_MODEL_ID, cache_dir=options.cache_dir)
    device = choose_device(options.device).value
    request = ShardRequest(
        directory,
        DRAFT_MODEL_ID,
        LayerRange(0, manifest.total_layers),
        options.dtype,
        quant="auto",
        settings=ShardSettings(kv_tokens=manifest.max_positions or DEFAULT_MAX_POSITIONS),
        cache_dir=options.cache_dir,
    )
    host = HostedOn(NodeId(""), "", Endpoint(""), device, torch.get_num_threads())
    plan = plan_shard(request, host)
    need_mb = plan.need.total_mb + plan.ends_need.total_mb
    with taking("the draft model needs", need_mb, device, options.caps, fix=_SMALLER):
        own = replace(
            options, quant="auto", thin="never", caps=None, deployed_quant=""
        )  # its memory is taken with the layers
        ends, _ = load_asker(directory, DRAFT_MODEL_ID, own)
        if not _same_tokens(ends.text.vocabulary(), model.text.vocabulary()):
            raise BadValue(
                f"the tokens of {directory} are not those of {model.model_id}.",
                fix="Draft with a smaller model of the same family.",
                param="draft_model",
            )
        shard = load_shard(plan)
    reason = f"draft model {directory.name}: {ends.total_layers} layers in {shard.descriptor.dtype}"
    return DraftModel(ends, shard.load(), model.vocab_size), reason


def _same_tokens(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether all that both know is the same: models of a family differ in a few added ones."""
    small, large = sorted((one, other), key=len)
    return small.items() <= large.items()
