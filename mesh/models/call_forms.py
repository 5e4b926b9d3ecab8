"""The forms in which families of models write calls of functions, and which one a chat template
teaches. What is written so is read by `mesh.models.tool_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.models.channels import CALL, CHANNEL, CONSTRAIN, MESSAGE, call_to
from mesh.models.gemma_calls import GemmaCalls
from mesh.models.python_calls import PythonCalls
from mesh.models.tagged_calls import GLM, MINICPM, MINIMAX, QWEN, SEED, hunyuan_tags
from mesh.models.template_marks import spelled_out
from mesh.models.written_calls import NamedObjects, Objects, Writing


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls: `opening`, one or several as `writing` has them, `closing`.

    `is_bare`: an answer that begins with a brace may be a call without `opening`. `separator`
    stands between several calls behind one `opening`, which with a comma are a JSON list; None
    where each has its own. `head` is what a call of a known function begins with whose `opening`
    the model has left out; empty where none is read without. `between` are texts that may stand
    between calls and mean nothing, `ends` those with which an answer with calls is over, be they
    end tokens or not. Ids of calls are `id_chars` letters and digits where the template wants that.
    """

    opening: str
    closing: str = ""
    writing: Writing = Objects()  # noqa: RUF009 - it is frozen
    is_bare: bool = False
    separator: str | None = None
    head: str = ""
    between: tuple[str, ...] = (",", ";", "[", "]")
    ends: tuple[str, ...] = ()
    id_chars: int = 0

    @property
    def openings(self) -> tuple[str, ...]:
        """What calls may begin with behind a text."""
        return (self.opening, self.head) if self.head else (self.opening,)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the form that a tokenizer may have special tokens for."""
        between = (mark for mark in self.between if len(mark) > 1)
        found = (self.opening, self.closing, *self.writing.marks, *between, *self.ends)
        return tuple(mark for mark in found if mark)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The form of a model's calls; `unseen` has the marks whose token ids decode to no text,
    because they are special."""

    form: CallForm
    unseen: Mapping[int, str] = field(default_factory=dict)


HERMES = CallForm("<tool_call>", "</tool_call>")
"""Hermes 2 and its followers: Qwen 2.5 and 3, SmolLM 3, Granite 4, ERNIE 4.5."""
QWEN_TAGS = CallForm("<tool_call>", "</tool_call>", QWEN, head=QWEN.lead)
"""Qwen 3 Coder, which leaves the first mark out at times, and Qwen from 3.5 on."""
SEED_TAGS = CallForm("<seed:tool_call>", "</seed:tool_call>", SEED)
"""Seed OSS."""
MINIMAX_TAGS = CallForm("<minimax:tool_call>", "</minimax:tool_call>", MINIMAX)
"""MiniMax M2."""
GLM_TAGS = CallForm("<tool_call>", "</tool_call>", GLM, ends=("<|observation|>",))
"""GLM 4.5 to 4.7."""
LLAMA = CallForm(
    "<|python_tag|>",
    writing=Objects(arguments="parameters", needs_arguments=True),
    is_bare=True,
    between=(";",),
)
"""Llama 3.1 to 4."""
PHI = CallForm("<|tool_call|>", "<|/tool_call|>")
"""Phi 4 mini."""
GRANITE = CallForm("<|tool_call|>", separator=",")
"""Granite 3."""
NEMOTRON = CallForm("<TOOLCALL>", "</TOOLCALL>", separator=",")
"""Nemotron Nano 2, and Nemotron Super 1.5."""
APRIEL = CallForm("<tool_calls>", "</tool_calls>", separator=",")
"""Apriel 1.5 and 1.6."""
COHERE = CallForm(
    "<|START_ACTION|>", "<|END_ACTION|>", Objects("tool_name", "parameters"), separator=","
)
"""Command R7B and Command A."""

_MISTRAL = NamedObjects(
    re.compile(r"\s*(?P<name>[\w.-]{1,256})(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*(?=\{)"),
    re.compile(r"\s*[\w.-]{0,256}(?:\[[^{]*)?\s*"),
    "NAME[ARGS]",
    marks=("[ARGS]", "[CALL_ID]"),
    or_objects=True,
)
MISTRAL = CallForm(
    "[TOOL_CALLS]",
    writing=_MISTRAL,
    separator=",",
    id_chars=9,
)
"""Mistral up to its seventh tokenizer: mostly a list of objects."""
MISTRAL_NAMED = CallForm("[TOOL_CALLS]", writing=_MISTRAL, id_chars=9)
"""Mistral from its eleventh tokenizer on."""

_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _deepseek(spelled: str, tail: str) -> CallForm:
    """Either of DeepSeek's, of which both are read: with a type and a fence around the arguments,
    or without."""
    head = (
        rf"{_CALL}\s*(?:function{_SEP})?\s*(?P<name>[\w.-]{{1,256}})\s*(?:{_SEP})?\s*"
        r"(?:```json)?\s*(?=\{)"
    )
    writing = NamedObjects(
        re.compile(head), re.compile(rf"{_CALL}[^{{]{{0,600}}"), spelled, _CALL, tail,
        (_CALL, _SEP),
    )  # fmt: skip
    return CallForm(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", writing,
        separator="", between=("```", _CALL_END),
    )  # fmt: skip


DEEPSEEK = _deepseek(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}")
"""DeepSeek V3 and R1."""
DEEPSEEK_PLAIN = _deepseek(f"{_CALL}NAME{_SEP}", _CALL_END)
"""DeepSeek V3.1."""

_TAG, _TAG_END, _TAG_BEGUN = "<tool_call>", "</tool_call>", r"<tool_call>[^{]{0,600}"
HUNYUAN = CallForm(
    "<tool_calls>",
    "</tool_calls>",
    NamedObjects(
        re.compile(r"<tool_call>\s*(?P<name>[\w.-]{1,256})\s*(?:```json)?\s*(?=\{)"),
        re.compile(_TAG_BEGUN), f"{_TAG}NAME\n```json\n", _TAG, f"\n```{_TAG_END}", (_TAG,),
    ),
    separator="", between=("```", _TAG_END),
)  # fmt: skip
"""Hunyuan's small models; A13B writes as Apriel does."""


def _hunyuan_3(suffix: str) -> CallForm:
    return CallForm(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", hunyuan_tags(suffix))


HUNYUAN_3, HUNYUAN_3_OPEN = _hunyuan_3(""), _hunyuan_3(":opensource")
"""Hunyuan 3 (HY 3), whose marks end with what its tokenizer says."""
APERTUS = CallForm(
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    NamedObjects(
        re.compile(r'\{\s*"(?P<name>[^"\\]{1,256})"\s*:\s*(?=\{)'),
        re.compile(r'\{\s*(?:"[^"\\]{0,256}(?:"\s*:?\s*)?)?'),
        '{"NAME": ', "{", "}",
    ),
    separator=",", between=(",", "[", "]", "}"),
)  # fmt: skip
"""Apertus: the name is the one key of an object."""
FUNCTIONARY = CallForm(
    "<function=",
    writing=NamedObjects(
        re.compile(r"(?P<name>[\w.-]{1,256})>\s*(?=\{)"), re.compile(r"[\w.-]{0,256}(?:>\s*)?"),
        "NAME>", tail="</function>",
    ),
    between=("</function>",),
)  # fmt: skip
"""Functionary 3.1."""
_SOLAR_CALL, _SOLAR_END = "<|tool_call:begin|>", "<|tool_call:end|>"
_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
SOLAR = CallForm(
    "<|tool_calls|>",
    writing=NamedObjects(
        re.compile(
            r"<\|tool_call:begin\|>[^<{]{0,64}<\|tool_call:name\|>\s*(?P<name>[\w.-]{1,256})\s*"
            r"<\|tool_call:args\|>\s*(?=\{)"
        ),
        re.compile(r"<\|tool_call:begin\|>[^{]{0,600}"),
        f"{_SOLAR_CALL}a1b2c3d4e5{_SOLAR_NAME}NAME{_SOLAR_ARGUMENTS}",
        _SOLAR_CALL,
        _SOLAR_END,
        (_SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS),
    ),
    separator="",
    between=(_SOLAR_END,),
    ends=("<|calls|>",),
    id_chars=10,
)
"""Solar Open."""
GIGACHAT = CallForm("<|function_call|>")
"""GigaChat 3.1."""
MINICPM_TAGS = CallForm("<function name=", writing=MINICPM)
"""MiniCPM 5."""

_KIMI_CALL, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_KIMI_END = "<|tool_call_end|>"
KIMI = CallForm(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    NamedObjects(
        re.compile(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,256}):\d{1,9})\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        re.compile(r"<\|tool_call_begin\|>[^{]{0,600}"),
        f"{_KIMI_CALL}functions.NAME:0{_KIMI_ARGUMENTS}",
        _KIMI_CALL,
        _KIMI_END,
        (_KIMI_CALL, _KIMI_ARGUMENTS),
    ),
    separator="",
    head=_KIMI_CALL,
    between=(_KIMI_END,),
)
"""Kimi K2: a call's id has its name and which one of the conversation it is."""

_HARMONY_OPENING = f"{CHANNEL}commentary to="
HARMONY = CallForm(
    _HARMONY_OPENING,
    writing=NamedObjects(
        re.compile(
            r"(?:functions\.)?(?P<name>[\w.-]{1,256}) <\|constrain\|>json<\|message\|>\s*(?=\{)"
        ),
        re.compile(r"[\w.:-]{0,300}(?: [^{]{0,300})?"),
        call_to("functions.NAME").removeprefix(_HARMONY_OPENING),
        marks=(CHANNEL, CONSTRAIN, MESSAGE),
    ),
    between=(),
    ends=(CALL,),
)
"""gpt-oss, as `mesh.models.channels.Channels` hands calls on."""

GEMMA = CallForm("<|tool_call>", "<tool_call|>", GemmaCalls(), ends=("<|tool_response>",))
"""Gemma 4."""
FUNCTION_GEMMA = CallForm(
    "<start_function_call>",
    "<end_function_call>",
    GemmaCalls("<escape>"),
    ends=("<start_function_response>",),
)
"""FunctionGemma, which is of Gemma 3."""
LFM = CallForm("<|tool_call_start|>", "<|tool_call_end|>", PythonCalls())
"""LFM2 and LFM2.5."""
OLMO = CallForm("<function_calls>", "</function_calls>", PythonCalls())
"""Olmo 3."""

_LLAMA_SAYS = '{"name": function name, "parameters":'
"""What the templates without the mark tell the model."""

_TAUGHT: tuple[tuple[CallForm | None, tuple[str, ...]], ...] = (
    (None, ("]<]minimax[>[",)),  # MiniMax M3 has marks of others in its own
    (HARMONY, (CALL, CHANNEL)),
    (DEEPSEEK, (DEEPSEEK.opening, "```json")),
    (DEEPSEEK_PLAIN, (DEEPSEEK_PLAIN.opening,)),
    (HUNYUAN_3, (HUNYUAN_3.opening, "<tool_sep>")),
    (HUNYUAN_3_OPEN, (HUNYUAN_3_OPEN.opening,)),
    (APRIEL, (APRIEL.opening + "[",)),
    (HUNYUAN, (HUNYUAN.opening, _TAG, "json")),
    (QWEN_TAGS, (QWEN_TAGS.opening, "<function=")),
    (GLM_TAGS, (GLM_TAGS.opening, "<arg_key>")),
    (HERMES, (HERMES.opening,)),
    (MISTRAL_NAMED, (MISTRAL_NAMED.opening, "[ARGS]")),
    (MISTRAL, (MISTRAL.opening,)),
    (PHI, (PHI.opening, PHI.closing)),
    (PHI, ("<|tool|>", "<|/tool|>")),
    (GRANITE, (GRANITE.opening,)),
    (GEMMA, (GEMMA.opening + "call:",)),
    (FUNCTION_GEMMA, (FUNCTION_GEMMA.opening + "call:",)),
    (APERTUS, (APERTUS.opening, APERTUS.closing)),
    (SOLAR, (SOLAR.opening, _SOLAR_CALL)),
    (GIGACHAT, (GIGACHAT.opening,)),
    (MINICPM_TAGS, (MINICPM_TAGS.opening, MINICPM.opens)),
    (FUNCTIONARY, ("<function=example_function_name>{",)),
    (LFM, (LFM.opening,)),
    (LFM, ("<|tool_list_start|>",)),
    (LFM, ('"List of tools: ["', "keep_past_thinking")),
    (OLMO, (OLMO.opening,)),
    (KIMI, (KIMI.opening,)),
    (KIMI, ("<|im_system|>tool_declare<|im_middle|>",)),
    (COHERE, (COHERE.opening,)),
    (SEED_TAGS, (SEED_TAGS.opening,)),
    (MINIMAX_TAGS, (MINIMAX_TAGS.opening,)),
    (NEMOTRON, (NEMOTRON.opening,)),
    (LLAMA, (LLAMA.opening,)),
    (LLAMA, (_LLAMA_SAYS,)),
)
"""Each form with texts that are all in the templates which teach it, in the order in which they
are looked for."""


def form_in(template: str) -> CallForm | None:
    """The form that a chat template teaches; None where it is none of those known here."""
    template = spelled_out(template)
    found = (form for form, texts in _TAUGHT if all(text in template for text in texts))
    return next(found, None)
