"""A checkpoint's tokenizer: prompts and chats to ids, ids to text.

Reads files of the checkpoint only, never the network, and never runs code that came with
them. It knows nothing of weights or layers.

What a text may become, and the most bytes that one token stands for, are bounds that refuse it
before it is tokenised (`mesh.models.text_lengths`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from mesh.errors import BadRequest, ContextTooLong
from mesh.models.bounded import Bounds, within
from mesh.models.call_forms import CallForm, CallMarks, form_in
from mesh.models.channels import ChannelMarks
from mesh.models.constraint import Grammars
from mesh.models.detokenize import IncrementalDecoder, TokenSpelling, decoder_for
from mesh.models.manifest import Manifest
from mesh.models.reasoning import ReasoningMarks, marks_in
from mesh.models.splitting import without
from mesh.models.text_lengths import MAX_GROWN_BYTES, longest_token_bytes, most_growth
from mesh.models.thinking import AS_IT_IS, Thinking, takes_effort
from mesh.models.tokenizer_files import load_tokenizer
from mesh.models.tool_places import PROBE, Place, as_tools, handed_to, place_in
from mesh.models.turns import Wants, in_parts, plain_transcript, turned, wants_of

WHITE_SPACE = tuple(sign for sign in map(chr, range(0x3001)) if sign.isspace())
"""What a tokenizer may leave out: at the ends of a text, in rows, beside special tokens."""


_WORDS, _ANSWER = "tell_whether_words_are_known", "tell_what_ends_an_answer"
_GREETING = [{"role": "user", "content": _WORDS}]
_OBJECTIONS = (
    TemplateError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError,
    RecursionError,
)  # fmt: skip
"""What a template raises that does not take a conversation."""


class Tokenizer:
    """Text to ids and back, as the checkpoint's authors meant it."""

    def __init__(
        self, tokenizer: Any, eos_ids: frozenset[int], bounds: Bounds | None = None
    ) -> None:
        """`bounds` are those of its chat template. Raises BadCheckpoint for what makes too much of
        any text."""
        self._tokenizer = tokenizer
        self._bounds = bounds or Bounds()
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._growth = most_growth(self._backend)
        self._longest: tuple[int | None] | None = None
        self._spelling: TokenSpelling | None = None
        self.eos_ids = eos_ids
        """Ids that end a generation: from generation_config.json, config.json, the tokenizer, and
        where there is a chat template from that."""

    @classmethod
    def load(cls, manifest: Manifest) -> Tokenizer:
        """The tokenizer of the checkpoint; BadCheckpoint when there is none to use."""
        tokenizer = load_tokenizer(manifest)
        own = tokenizer.eos_token_id
        made = cls(tokenizer, frozenset((*manifest.eos_ids, *([] if own is None else [own]))))
        made.eos_ids |= made._ends_of_answers()
        return made

    @property
    def end_id(self) -> int | None:
        """The id of the token that ends a text, by the tokenizer alone."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` follows the model's own template or the plain one."""
        return bool(self._tokenizer.chat_template)

    def reasoning_marks(self) -> ReasoningMarks | ChannelMarks | None:
        """The marks of what the model thinks, where its template has some."""
        marks = marks_in(str(self._tokenizer.chat_template or ""))
        return None if marks is None else replace(marks, unseen=self._unseen(marks.tokens))

    def takes_effort(self) -> bool:
        """Whether the chat template asks how hard the model is to think."""
        return takes_effort(str(self._tokenizer.chat_template or ""))

    def takes_tools(self) -> bool:
        """Whether the chat template says to the model which functions it may call."""
        return self._place is not None

    def call_marks(self) -> CallMarks | None:
        """How the model writes calls of functions, where its template's form is known."""
        form = self._form
        return None if form is None else CallMarks(form, self._unseen(form.marks))

    def grammars(self, vocab_size: int) -> Grammars:
        """What binds answers of a model with logits for so many tokens to grammars."""
        return Grammars(self._backend, vocab_size, self.eos_ids)

    def id_of(self, token: str) -> int | None:
        """The id of a token, by its spelling; None where there is none."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return None if found == self._tokenizer.unk_token_id else found

    def encode(self, prompt: str, most: int | None = None) -> list[int]:
        """The ids of a plain prompt, with the special tokens the model starts with.

        Raises ContextTooLong for more than `most` of them, without any work where its length in
        bytes says so. A long text takes seconds; other threads run meanwhile.
        """
        return self._encode(prompt, most, special=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        begun: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: Thinking = AS_IT_IS,
    ) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer behind what it has `begun`,
        which may call the `tools` where the template takes them. `thinking` is for templates that
        have switches for that.

        A model without a chat template gets a plain transcript: ``role: content`` per message, an
        empty line after each, then ``assistant:``. Raises BadRequest when the template refuses the
        messages (roles that do not alternate, a role it does not know) or they lack a field, and
        ContextTooLong as `encode`.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise BadRequest(
                    f"Message {number} needs a role and a content, both text.",
                    fix="Send messages as {role, content} objects.",
                    param=f"messages[{number}]",
                )
        if not self.has_chat_template:
            return self.encode(plain_transcript(messages) + begun, most)
        has_calls = any("tool_calls" in message for message in messages)
        shown = turned(messages, self._wants if has_calls else Wants())
        text = self._render(shown, tools, thinking)
        if begun and (marks := self.reasoning_marks()) is not None:
            if marks.are_open_in(text) and not begun.lstrip().startswith(marks.opens_with):
                text = self._render(shown, tools, replace(thinking, wanted=False))
                text += f"{marks.closing}\n\n" if marks.are_open_in(text) else ""
            text += marks.answers_with
        return self._encode(text + begun, most, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens and without any tidying up."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token, special or not, stands for in the middle of a text: UTF-8, maybe half a
        character."""
        if self._spelling is None:
            self._spelling = TokenSpelling(self._backend, self._decode_all, self._some_text())
        return self._spelling.of(token_id)

    def hides(self, token_id: int) -> bool:
        """Whether a text has nothing of this token."""
        return token_id in self._special

    def vocabulary(self) -> dict[str, int]:
        """Every token, those that were added included, and its id."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def decoder(self, *, continues: bool = False) -> IncrementalDecoder:
        """A fresh decoder for one generation's ids; its parts joined equal `decode` of them all.

        Where it `continues` a text they equal what the ids add to that: many tokenizers drop the
        space that a text begins with.
        """
        return decoder_for(self._backend, self.decode, self._some_text() if continues else ())

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        thinking: Thinking = AS_IT_IS,
    ) -> str:
        switches = thinking.told_to(str(self._tokenizer.chat_template or ""))
        place = as_tools if not tools or self._place is None else self._place
        has_several = isinstance(self._tokenizer.chat_template, dict)
        shown, handed = handed_to(place, messages, [*map(self._described, tools)], has_several)
        return self._rendered(shown, handed, **switches)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], handed: Mapping[str, Any], **switches: Any
    ) -> str:
        try:
            return self._applied(messages, add_generation_prompt=True, **handed, **switches)
        except _OBJECTIONS as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}.",
                fix="Start with the user (or one system message) and let roles alternate.",
                param="messages",
            ) from error

    def _applied(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """What the chat template makes of them. Raises what it raises, and BadRequest beyond its
        bounds."""
        return self._made(in_parts(messages) if self._wants_parts else messages, **more)

    def _made(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        chat = [dict(message) for message in messages]

        def apply() -> str:
            text: str = self._tokenizer.apply_chat_template(chat, tokenize=False, **more)
            return text

        return within(self._bounds, "The model's chat template", apply)

    def _ends_of_answers(self) -> frozenset[int]:
        """The special token that the chat template has behind an answer, if it is all that it has
        around it: files of models that others trained on, or converted, often name another."""
        if not self.has_chat_template:
            return frozenset()
        answered = [*_GREETING, {"role": "assistant", "content": _ANSWER}]
        try:
            prompt = self._applied(_GREETING, add_generation_prompt=True)
            before, _, behind = self._applied(answered).rpartition(_ANSWER)
        except (*_OBJECTIONS, BadRequest):
            return frozenset()
        # Behind what has parts, as gpt-oss's answers have, the token may end but one of those.
        marks = self.reasoning_marks()
        bare = [without(text, () if marks is None else marks.tokens) for text in (prompt, before)]
        found = self.id_of(behind.strip().removesuffix(self._tokenizer.eos_token or "").strip())
        if found is None or bare[0] != bare[1] or (marks and found == self.id_of(marks.closing)):
            return frozenset()  # what ends a thought ends no answer
        return self._special & {found}

    def _described(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """A tool as the template takes it."""
        function = tool["function"]
        if "description" not in function and self._trips_over_the_undescribed:
            function = {**function, "description": ""}
        return {**tool, "function": function}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the chat template shows what is said only in a list of parts."""
        for greeting, wants_parts in ((_GREETING, False), (in_parts(_GREETING), True)):
            with contextlib.suppress(*_OBJECTIONS):
                if _WORDS in self._made(greeting, add_generation_prompt=True):
                    return wants_parts
        return False

    @cached_property
    def _trips_over_the_undescribed(self) -> bool:
        function = {key: said for key, said in PROBE["function"].items() if key != "description"}
        try:
            self._applied(_GREETING, tools=[{**PROBE, "function": function}])
        except (*_OBJECTIONS, BadRequest):
            return True
        return False

    @cached_property
    def _place(self) -> Place | None:
        """Where the chat template takes functions from; None where it knows of none."""

        def shows(place: Place) -> bool:
            try:
                text = self._rendered(*place(_GREETING, [self._described(PROBE)]))
            except BadRequest:
                return False
            return str(PROBE["function"]["name"]) in text

        return place_in(template, shows) if (template := self._template([PROBE])) else None

    @cached_property
    def _form(self) -> CallForm | None:
        return form_in(self._template([PROBE]))

    @cached_property
    def _wants(self) -> Wants:
        template = self._template([PROBE])
        return wants_of(lambda tried: self._render(tried, [PROBE]), template, self._form)

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of the template for chats with these tools; empty where there is none."""
        if not self.has_chat_template:
            return ""
        try:
            return str(self._tokenizer.get_chat_template(tools=[*tools]))
        except ValueError:  # several, and none of them for chats
            return ""

    def _unseen(self, marks: Sequence[str]) -> dict[int, str]:
        """Those of the marks whose tokens decode to no text, by their ids."""
        ids = [(self._tokenizer.convert_tokens_to_ids(mark), mark) for mark in marks]
        return {token_id: mark for token_id, mark in ids if self._is_unseen(token_id)}

    def _some_text(self) -> list[int]:
        """An id that a text may begin with."""
        return self._encode("a", None, special=False)[:1]

    def _decode_all(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def _is_unseen(self, token_id: int | None) -> bool:
        unknown = self._tokenizer.unk_token_id
        return token_id is not None and token_id != unknown and not self.decode([token_id])

    def _encode(self, text: str, most: int | None, *, special: bool) -> list[int]:
        if most is not None:
            self._require_fits(text, most)
        if (size := len(text.encode()) * self._growth) > MAX_GROWN_BYTES:
            raise ContextTooLong(
                f"the model's tokenizer may make {size} bytes of the prompt; {MAX_GROWN_BYTES} are"
                " the most.",
                fix="Shorten the prompt, or begin a new conversation.",
                param="prompt",
            )
        if self._backend is None:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
            count = len(ids)
        else:
            # Of the library's ways only those of a batch let other threads run meanwhile; and the
            # ids are made into a list only if they fit.
            with _refused_where_it_panics():
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
            count = len(encoding)
            ids = encoding.ids if most is None or count <= most else []
        if most is not None and count > most:
            raise _too_long(f"{count} tokens", most)
        return ids

    def _require_fits(self, text: str, most: int) -> None:
        """Raise ContextTooLong when a text has more bytes than so many tokens can stand for."""
        size = len(text.encode())
        if size <= most:
            return
        if self._longest is None:
            self._longest = (longest_token_bytes(self._backend),)
        (longest,) = self._longest
        if longest is None or size <= longest * most:
            return
        # White space may be left out altogether. Counted sign by sign: one long call would keep
        # all other threads waiting.
        size -= sum(text.count(sign) * len(sign.encode()) for sign in WHITE_SPACE)
        if size > longest * most:
            raise _too_long(f"{size} bytes, which are at least {-(-size // longest)} tokens", most)


@contextlib.contextmanager
def _refused_where_it_panics() -> Iterator[None]:
    """Raises BadRequest for a text that the library gives up on: one at which a pattern of the
    model goes back and forth, for example."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which nothing exports, and is no Exception
            raise
        raise BadRequest(
            f"The model's tokenizer cannot read this text: {str(error)[:200]}.",
            fix="Send another text, or use another revision of the model.",
            param="prompt",
        ) from error


def _too_long(what: str, most: int) -> ContextTooLong:
    return ContextTooLong(
        f"the prompt has {what}; this model's maximum context length is {most} tokens.",
        fix="Shorten the prompt, or begin a new conversation.",
        param="prompt",
    )
