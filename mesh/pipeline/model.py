"""What an asker holds of a model: its ends, its tokenizer, its name. Interfaces only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mesh.errors import WeightsMissing
from mesh.models.call_forms import CallMarks
from mesh.models.candidates import CANDIDATES
from mesh.models.channels import ChannelMarks
from mesh.models.constraint import Constraint
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.models.detokenize import IncrementalDecoder
from mesh.models.pooling import NO_POOLING, Pooling
from mesh.models.reasoning import ReasoningMarks
from mesh.pipeline.remote_ends import RemoteEnds
from mesh.types import GenerationRequest, ModelId

if TYPE_CHECKING:
    from mesh.shard.ends import ModelEnds


class Text(Protocol):
    """The model's tokenizer as the pipeline needs it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def reasoning_marks(self) -> ReasoningMarks | ChannelMarks | None:
        """How the model's thinking begins and ends in a chat; None when it has no way to say."""

    @property
    def call_marks(self) -> CallMarks | None:
        """How the model writes calls of functions; None when it knows none, or in no known form.

        Renders the template when it is read first, which `prompt_ids` does for a chat with tools.
        """

    def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        """The token ids a request stands for. Raises BadRequest, ContextTooLong beyond `most`.

        A long text takes seconds of a processor.
        """

    def constraint(self, request: GenerationRequest) -> Constraint | None:
        """What the answer to a request is bound to; None where it may say anything.

        Takes up to seconds of a processor. Raises BadRequest where it cannot be bound so.
        """

    def decoder(self, *, continues: bool) -> IncrementalDecoder:
        """A fresh decoder for one answer, which `continues` a text or is one."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in the middle of a text: UTF-8, maybe half a character."""

    def hides(self, token_id: int) -> bool:
        """Whether a decoder leaves this token out, as special ones are."""

    def vocabulary(self) -> Mapping[str, int]:
        """Every token and its id."""


class TextReader(Protocol):
    """A draft model that reads one answer; see `mesh.pipeline.draft_model.DraftReader`."""

    def prepare(self, text: Sequence[int]) -> None:
        """Read `text` while something else is waited for."""

    async def guess(self, text: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that `text` may go on with; none where it cannot, or is too slow."""

    def close(self) -> None:
        """Guess no more."""


class Drafting(Protocol):
    """A draft model; see `mesh.pipeline.draft_model.DraftModel`."""

    def read_along(self) -> TextReader | None:
        """A reader for one more answer, or None; it is to be closed."""

    def close(self) -> None:
        """Guess no more."""


@dataclass(frozen=True, slots=True)
class AskerModel:
    """What the asker holds of a model."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    ends: ModelEnds | None
    """Embedding and head; None where hops run them."""
    text: Text
    routed: bool = False
    """Whether rows go to experts, so that honest machines may differ after a near tie, or states
    keep what was rounded: in bf16 single rows are 16 % from chunks for Qwen 3.5, 2 % for Llama."""
    head_rows: int = 1
    """Of how many rows, a power of two, the head may compute the logits at once: each has the bits
    that it has alone."""
    keeps_states: bool = False
    """Whether layers keep a running state, so that sessions cannot be cut anywhere."""
    draft: Drafting | None = None
    """What guesses how answers go on, beside what they said before."""
    pooling: Pooling = NO_POOLING
    """How it makes one vector of a text."""
    inputs_size: int = 0
    """How many numbers go from hop to hop behind each hidden state: what the model's layers are
    given of the token that stands there, and other hidden states of that position, where there are
    such (`mesh.models.row_form`)."""

    short_positions: int = 0
    """Texts of up to so many positions are turned otherwise than longer ones; 0 where that is no
    matter (`mesh.models.rope`)."""
    cuts: Cuts = ANYWHERE
    """Before which layers it may be cut; any other is computed behind those before it only."""

    @property
    def row_size(self) -> int:
        """How many numbers go from hop to hop for one position."""
        return self.hidden_size + self.inputs_size

    def abilities(self) -> tuple[str, ...]:
        """What it can beside chatting: ``tools`` where it can call functions, ``thinking`` where
        its reasoning is told apart, ``embedding`` where it was made for that. Renders its chat
        template."""
        found = {
            "tools": self.text.call_marks,
            "thinking": self.text.reasoning_marks,
            "embedding": self.pooling.kind or None,
        }
        return tuple(name for name, marks in found.items() if marks is not None)

    @property
    def own_ends(self) -> ModelEnds:
        """The ends, for what needs them here. Raises WeightsMissing."""
        if self.ends is None:
            raise WeightsMissing(
                f"this node computes no embedding and no head of {self.model_id}: others do.",
                fix=f"Fetch them (`hearthnet pull {self.model_id} --layers none`), with"
                " research.distributed_inference.thin not `always`; then start the node again.",
            )
        return self.ends

    def remote_ends(
        self, candidates: int = CANDIDATES, *, normed: bool = False, **rows: int
    ) -> RemoteEnds | None:
        """What hops are to run of them, as `RemoteEnds` has it; None where they are here."""
        if self.ends is not None:
            return None
        sizes = self.total_layers, self.hidden_size, self.vocab_size
        inputs = self.inputs_size
        return RemoteEnds(*sizes, candidates, normed=normed, inputs_size=inputs, **rows)
