"""A checkpoint's ends and tokenizer as the pipeline uses them. Loading blocks; use a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mesh.errors import BadRequest, ContextTooLong, NotEnoughMemory, UnsupportedFamily
from mesh.models.call_forms import CallMarks
from mesh.models.channels import ChannelMarks
from mesh.models.constraint import Constraint
from mesh.models.detokenize import IncrementalDecoder
from mesh.models.families import family_of
from mesh.models.in_use import use
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.pooling import NO_POOLING, Pooling, read_pooling
from mesh.models.progress import Progress
from mesh.models.rope import short_positions
from mesh.models.thinking import Thinking
from mesh.models.tokenizer import Tokenizer
from mesh.models.turns import speaks_of_calls
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.model import AskerModel
from mesh.processes.headroom import ram
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.memory_budget import MemoryCaps, over_cap
from mesh.shard.device import (
    choose_device,
    choose_dtype,
    headroom,
    memory_budget,
    short_dtype_name,
)
from mesh.shard.ends import EndsPlan, LoadedEnds, load_computed, maps_inputs
from mesh.shard.footprint import ends_mb, keeps_states
from mesh.shard.threads import kept_threads
from mesh.types import GenerationRequest, ModelId

_LESS = (
    "End something else on this machine, or compute in another number format (--dtype); it is"
    " tried again."
)
_THIN = "thin: embedding and head are run by the nodes with the first and the last layers"

DEFAULT_MAX_POSITIONS = 4096
"""Where a checkpoint does not say how long its context is."""


class CheckpointText:
    """`mesh.pipeline.model.Text` over a checkpoint's tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, pooling: Pooling = NO_POOLING
    ) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.end_id if pooling.adds_end else None
        self._vocab_size = vocab_size
        self.eos_ids = tokenizer.eos_ids
        self.reasoning_marks = tokenizer.reasoning_marks()
        self._grammars = tokenizer.grammars(vocab_size)

    def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        """The token ids of a request. Raises BadRequest, ContextTooLong beyond `most`."""
        ids = self._ids(request, most)
        self._require_known(ids, "prompt")
        self._require_known([token for token, _ in request.sampling.logit_bias], "logit_bias")
        return ids

    @cached_property
    def call_marks(self) -> CallMarks | None:
        """How the model writes calls of functions; None when it knows none, or in no known form."""
        return self._tokenizer.call_marks() if self._takes_tools else None

    def constraint(self, request: GenerationRequest) -> Constraint | None:
        """What the answer to a request is bound to, if to anything. Raises BadRequest."""
        marks, thinks = self.call_marks if request.tools is not None else None, self.reasoning_marks
        thinks_with = None if thinks is None else self._tokenizer.id_of(thinks.opens_with)
        # An answer that has begun is in its channel already.
        is_whole = request.messages is not None and not request.begun
        channels = thinks if isinstance(thinks, ChannelMarks) and is_whole else None
        return self._grammars.constraint(request, marks, thinks_with, channels)

    def decoder(self, *, continues: bool) -> IncrementalDecoder:
        """A fresh decoder for one answer, which `continues` a text or is one."""
        return self._tokenizer.decoder(continues=continues)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in the middle of a text."""
        return self._tokenizer.token_bytes(token_id)

    def hides(self, token_id: int) -> bool:
        """Whether a text has nothing of this token."""
        return self._tokenizer.hides(token_id)

    def vocabulary(self) -> Mapping[str, int]:
        """Every token and its id."""
        return self._tokenizer.vocabulary()

    # Private

    def _require_known(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            index = next(i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise BadRequest(
                f"token {ids[index]} at index {index} is outside the vocabulary of "
                f"{self._vocab_size}.",
                fix="Send ids of this model's own tokenizer.",
                param=param,
            )

    def _ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        if request.prompt_ids is None and request.messages is not None:
            tools = self._tools(request)
            self._require_thinks(request)
            thinking = Thinking(request.think, request.effort, request.keeps_thoughts)
            return self._tokenizer.encode_chat(
                request.messages, most, request.begun, tools, thinking
            )
        if request.prompt_ids is None and request.prompt is not None:
            if request.embeds and self._end is not None:
                return self._ended(request.prompt, most, self._end)
            return self._tokenizer.encode(request.prompt, most)
        ids = list(request.prompt_ids or ())
        if most is not None and len(ids) > most:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens; this model's maximum context length is {most}"
                " tokens.",
                fix="Shorten the prompt.",
                param="prompt",
            )
        return ids

    def _ended(self, prompt: str, most: int | None, end: int) -> list[int]:
        ids = self._tokenizer.encode(prompt, None if most is None else most - 1)
        return ids if ids[-1:] == [end] else [*ids, end]

    def _require_thinks(self, request: GenerationRequest) -> None:
        """Raise BadRequest where it is to think, or so hard, and its template knows of no such."""
        if request.think and self.reasoning_marks is None:
            raise BadRequest(
                f"{request.model} does not support thinking: its chat template marks none.",
                fix="Leave `think` or `enable_thinking` out, or ask a model that thinks before it"
                " answers.",
                param="think",
            )
        if request.effort and not self._tokenizer.takes_effort():
            raise BadRequest(
                f"{request.model} cannot be told how hard to think: its chat template does not"
                " ask.",
                fix="Leave the effort out, or ask a model that has levels of it, as gpt-oss does.",
                param="reasoning_effort",
            )

    @cached_property
    def _takes_tools(self) -> bool:
        return self._tokenizer.takes_tools()

    def _tools(self, request: GenerationRequest) -> tuple[dict[str, Any], ...]:
        """Those for the template. Raises BadRequest where the model was taught none."""
        messages = request.messages or ()
        if request.tools is None and not any(map(speaks_of_calls, messages)):
            return ()
        param = "messages" if request.tools is None else "tools"
        if not self._takes_tools:
            raise BadRequest(
                f"{request.model} knows no tools: its chat template has no place for them.",
                fix="Ask a model that was taught to call functions, or send none.",
                param=param,
            )
        if self.call_marks is None:
            raise BadRequest(
                f"the form in which {request.model} writes calls is not known here.",
                fix="Ask a model of a family that docs/how-to/tools.md has, or send no tools.",
                param=param,
            )
        return () if request.tools is None else request.tools.tools


def _is_routed(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or {}
    return any("expert" in key and value for key, value in {**config, **text}.items())


def _said(head_rows: int) -> str:
    if head_rows == 1:
        return "head: row by row, other last bits in a batch on this machine"
    return f"head: {head_rows} rows at once, the same bits in any batch"


@contextmanager
def taking(
    who: str, need_mb: int, device: torch.device, caps: MemoryCaps | None, fix: str = _LESS
) -> Iterator[None]:
    """The block may load what takes so much there; where it raises, that is given back.

    Raises NotEnoughMemory, in which `who` is "the ends need" or the like.
    """
    have = headroom(device, ram())
    if need_mb > have.free_mb:
        raise NotEnoughMemory(
            f"{who} {need_mb} MiB; {have.free_mb} MiB are free of {have.total_mb} MiB"
            f" ({have.bound}).",
            fix=fix,
        )
    budget = memory_budget(caps, device)
    claim = budget.take(need_mb) if budget is not None else None
    if budget is not None and claim is None:
        raise over_cap(f"{who} {need_mb} MiB", budget.standing())
    try:
        yield
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def load_asker(
    directory: Path,
    model_id: ModelId,
    options: AskerOptions,
    begins: Callable[[LoadNeed, Progress], object] = lambda loading, progress: None,
) -> tuple[AskerModel, list[str]]:
    """The ends and the tokenizer, with the reasons of what was chosen.

    Sets torch's thread count. `begins` is told what it takes, before any of it is taken, and where
    it is counted. No node removes the directory while this process lives. Raises BadCheckpoint,
    UnsupportedFamily, BadValue, NotEnoughMemory, Busy.
    """
    use(directory)
    manifest = read_manifest(directory, model_id=model_id, cache_dir=options.cache_dir)
    pooling = read_pooling(manifest)
    text = CheckpointText(Tokenizer.load(manifest), manifest.vocab_size, pooling)
    if _is_thin(manifest, options):
        return _model(manifest, text, pooling, None), [_THIN]
    device = choose_device(options.device)
    stored = short_dtype_name(manifest.dtype)
    dtype = choose_dtype(options.dtype, stored, device.value)
    quant = options.deployed_quant if device.value.type == "cpu" else ""
    quant = quant or options.quant
    maps = maps_inputs(manifest, device.value, options.dtype, dtype.value, quant)
    need_mb = ends_mb(manifest, dtype.value.itemsize, maps_inputs=maps)
    who = f"the ends of {model_id} (embedding and head) need"
    with taking(who, need_mb, device.value, options.caps):
        progress = Progress()
        begins(LoadNeed(model_id, need_mb, ram().free_mb), progress)
        threads = kept_threads(options.threads, device.value, options.threads_dir)
        torch.set_num_threads(threads.value)
        plan = EndsPlan(
            manifest, device.value, options.dtype, dtype, quant, threads.value, options.cache_dir
        )
        loaded = load_computed(plan, progress)
    model = _model(manifest, text, pooling, loaded)
    return model, [device.reason, threads.reason, *loaded.reasons, _said(model.head_rows)]


def _is_thin(manifest: Manifest, options: AskerOptions) -> bool:
    """Whether hops are to run the ends."""
    if options.thin == "auto":
        return not manifest.has_ends
    return options.thin == "always"


def _model(
    manifest: Manifest, text: CheckpointText, pooling: Pooling, loaded: LoadedEnds | None
) -> AskerModel:
    try:
        config = family_of(manifest).config
    except UnsupportedFamily:
        config = None  # nor does anybody serve it then, which is said where it would be
    # What a config leaves out its class says: Gemma 3's leave out how long a text may be.
    most = manifest.max_positions or getattr(config, "max_position_embeddings", None)
    return AskerModel(
        model_id=manifest.model_id,
        weights_sha256=manifest.weights_sha256,
        total_layers=manifest.total_layers,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        max_positions=most or DEFAULT_MAX_POSITIONS,
        ends=loaded.ends if loaded is not None else None,
        text=text,
        routed=_is_routed(manifest.config) or keeps_states(manifest),
        head_rows=loaded.rows if loaded is not None else 1,
        keeps_states=keeps_states(manifest),
        pooling=pooling,
        inputs_size=manifest.row_size - manifest.hidden_size,
        short_positions=short_positions(config),
        cuts=manifest.cuts,
    )
