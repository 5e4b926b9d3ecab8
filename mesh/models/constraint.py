"""Which tokens an answer may go on with, where it has to look like something.

The work is llguidance's (docs/decisions/structured-output.md), an optional library that is loaded
when the first request needs it. It reads the tokenizer, keeps where in the grammar each answer is,
and says for every token whether it may be next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh.errors import BadRequest
from mesh.models.call_forms import CallMarks
from mesh.models.channels import ChannelMarks
from mesh.models.grammar import grammar_of, is_bound, says_all
from mesh.models.schema_bounds import is_too_much
from mesh.types import GenerationRequest

if TYPE_CHECKING:
    import llguidance
    from numpy.typing import NDArray

_MAX_SHOWN = 200


class Constraint:
    """Where one answer is in its grammar.

    `thinks_with` is the token that the answer may begin with instead, to think before it says what
    the grammar wants; None where the model does not. `param` is the field that binds it, for
    errors.
    """

    def __init__(self, matcher: llguidance.LLMatcher, thinks_with: int | None, param: str) -> None:
        self.thinks_with = thinks_with
        self._matcher = matcher
        self._param = param

    def allowed(self) -> NDArray[np.bool_]:
        """(tokens,) what may be next, at least one of them; an end token is where all is said.

        Raises BadRequest where following the grammar has become too much work.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_well()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def certain(self) -> list[int]:
        """The tokens that must be next, as far as there is no choice."""
        return self._matcher.compute_ff_tokens()

    def take(self, token: int) -> None:
        """`token` is next, which must be allowed."""
        self._matcher.consume_token(token)
        self._require_well()

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow but an end token."""
        return self._matcher.is_stopped()

    def _require_well(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(
                f"the answer's grammar cannot be followed further: {_said(self._matcher)}.",
                fix="Ask for something simpler.",
                param=self._param,
            )


class Grammars:
    """What makes constraints for one tokenizer of `vocab_size` tokens and more."""

    def __init__(self, backend: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`backend` is a `tokenizers.Tokenizer`, or None where there is none."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None

    def constraint(
        self,
        request: GenerationRequest,
        marks: CallMarks | None,
        thinks_with: int | None,
        channels: ChannelMarks | None = None,
    ) -> Constraint | None:
        """For a request's answer; None where that may say anything.

        Takes a second for the first of a large vocabulary. Raises BadRequest where llguidance is
        not installed or cannot read the tokenizer, and for schemas that cannot be followed.
        """
        if not is_bound(request):
            return None
        library = _loaded(request)
        tokenizer = self._tokenizer or self._read(library)
        limits = library.LLParserLimits(verbose_errors=False)

        def matcher(grammar: str) -> llguidance.LLMatcher:
            made: llguidance.LLMatcher = library.LLMatcher(
                tokenizer, grammar, log_level=0, limits=limits
            )
            return made

        def objection(schema: Mapping[str, Any]) -> str:
            if why := is_too_much(schema):
                return why
            tried = matcher(library.LLMatcher.grammar_from_json_schema(dict(schema)))
            return _said(tried) if tried.is_error() else ""

        grammar = grammar_of(request, marks, objection, channels)
        made = matcher(library.LLMatcher.grammar_from_lark(grammar))
        param = _param(request)
        if made.is_error():
            raise BadRequest(
                f"{param}: the answer's grammar cannot be followed: {_said(made)}.",
                fix="Ask for something simpler.",
                param=param,
            )
        return Constraint(made, thinks_with, param)

    def _read(self, library: Any) -> llguidance.LLTokenizer:
        if self._backend is None:
            raise _unreadable("it is no fast one")
        size = max(self._vocab_size, self._backend.get_vocab_size())
        try:
            self._tokenizer = library.LLTokenizer(
                self._backend.to_str(), n_vocab=size, eos_token=self._eos_ids or None
            )
        except (ValueError, RuntimeError) as error:
            raise _unreadable(str(error)[:_MAX_SHOWN]) from error
        return self._tokenizer


def _loaded(request: GenerationRequest) -> Any:
    try:
        import llguidance
    except ImportError as error:
        param = _param(request)
        raise BadRequest(
            f"{param}: this node cannot bind what an answer looks like; llguidance is missing.",
            fix="Install it where the node runs (`pip install 'hearthnet[structured]'`), then start"
            " the node again; or ask without.",
            param=param,
        ) from error
    return llguidance


def _unreadable(why: str) -> BadRequest:
    return BadRequest(
        f"no answer can be bound to a form with this model's tokenizer: {why}.",
        fix="Ask without response_format, and with tool_choice auto.",
        param="response_format",
    )


def _param(request: GenerationRequest) -> str:
    if says_all(request):
        return request.bound_by.partition(".")[0]
    is_chosen = request.tools is not None and request.tools.required
    return "tool_choice" if is_chosen else "tools"


def _said(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split()).rstrip(".")[:_MAX_SHOWN]
