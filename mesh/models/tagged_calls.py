"""Calls whose parameters stand between tags, one by one: no JSON, but what the schema says they
are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mesh.models.python_calls import json_of
from mesh.models.value_kinds import kind_of, kinds_of
from mesh.models.written_calls import Schemas, WrittenCall, as_json

_LONGEST_HEAD = 600
"""Characters; names have 256."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A `head` with the name, then one `parameter` after the other, then `end`.

    The first group of `head` is the name; those of `parameter` are key and value. `lead` is what a
    head begins with, where that is no name; `opens` is what a parameter begins with, and `shuts`
    what it ends with; `inner` are the texts between. A call ends at `closing` as well, which is not
    read.
    """

    lead: str
    head: re.Pattern[str]
    opens: str
    parameter: re.Pattern[str]
    shuts: str
    end: str
    closing: str
    inner: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that a tokenizer may have special tokens for."""
        found = (self.lead, self.opens, *self.inner, self.shuts, self.end)
        return tuple(mark for mark in found if mark)

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        """The call that `held` begins, and how many characters of that it does not read."""
        is_call = held.startswith(self.lead) if self.lead else re.match(r"\w", held) is not None
        return (0, TaggedCall(self, schemas)) if is_call else None

    def may_begin(self, held: str) -> bool:
        """Whether more text may make a call of what begins so, which is none yet."""
        return self.lead.startswith(held)

    def around(self, name: str) -> tuple[str, str] | None:
        """None: the arguments are no JSON."""
        del name
        return None


QWEN = Tagged(
    lead="<function=",
    head=re.compile(r"<function=([^>\n]+)>\s*"),
    opens="<parameter=",
    parameter=re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
    shuts="</parameter>",
    end="</function>",
    closing="</tool_call>",
)
SEED = Tagged(
    lead="<function=",
    head=re.compile(r"<function=([^>\n]+)>\s*"),
    opens="<parameter=",
    parameter=re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL),
    shuts="</parameter>",
    end="</function>",
    closing="</seed:tool_call>",
)
MINIMAX = Tagged(
    lead="<invoke name=",
    head=re.compile(r'<invoke name="([^"\n]+)">\s*'),
    opens="<parameter name=",
    parameter=re.compile(r'<parameter name="([^"\n]+)">(.*?)</parameter>\s*', re.DOTALL),
    shuts="</parameter>",
    end="</invoke>",
    closing="</minimax:tool_call>",
)
MINICPM = Tagged(
    lead='"',
    head=re.compile(r'"([^"\n]+)">\s*'),
    opens="<param name=",
    parameter=re.compile(
        r'<param name="([^"\n]+)">(<!\[CDATA\[.*?\]\]>|(?!<!\[CDATA\[).*?)</param>\s*', re.DOTALL
    ),
    shuts="</param>",
    end="</function>",
    closing="</function>",
)
GLM = Tagged(
    lead="",
    head=re.compile(r"([\w.-]{1,256})\s*(?=<arg_key>|</tool_call>)"),
    opens="<arg_key>",
    parameter=re.compile(
        r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
    ),
    shuts="</arg_value>",
    end="",
    closing="</tool_call>",
)


def hunyuan_tags(suffix: str) -> Tagged:
    """Hunyuan 3's, all of which end with a suffix, which is empty or its maker's."""
    lead, sep = f"<tool_call{suffix}>", f"<tool_sep{suffix}>"
    key, key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
    value, value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
    return Tagged(
        lead=lead,
        head=re.compile(rf"{lead}\s*([\w.-]{{1,256}})\s*{sep}\s*"),
        opens=key,
        parameter=re.compile(rf"{key}([^<\n]+){key_end}\s*{value}(.*?){value_end}\s*", re.DOTALL),
        shuts=value_end,
        end=f"</tool_call{suffix}>",
        closing=f"</tool_calls{suffix}>",
        inner=(sep, key_end, value),
    )


class TaggedCall(WrittenCall):
    """One call so written: a parameter is told when it is whole.

    A value is a text where the function's schema says so, or where it is no JSON. The call ends as
    well where something else stands between the parameters.
    """

    def __init__(self, tags: Tagged, schemas: Schemas) -> None:
        super().__init__()
        self._tags = tags
        self._schemas = schemas
        self._left = ""
        self._searched = 0

    def found(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it may be one."""
        is_whole = self.arguments.endswith("}") and self.is_ended
        return (self.name, self.arguments) if is_whole else None

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""
        self.text += text
        self._left += text
        if not self.name:
            head = self._tags.head.match(self._left)
            if head is None:
                return self._none()
            self.name, self.arguments, self._left = head[1], "{", self._left[head.end() :]
        while (parameter := self._parameter()) is not None:
            self._left = self._left[parameter.end() :]
            separator = "" if self.arguments == "{" else ", "
            value = self._value(parameter[1], parameter[2])
            self.arguments += f"{separator}{json.dumps(parameter[1])}: {value}"
        left, opens = self._left, self._tags.opens
        may_go_on = opens.startswith(left) or left.startswith(opens)
        return "" if may_go_on or self._may_end(left) else self._end()

    def _may_end(self, left: str) -> bool:
        """Whether an end is there, but for its last signs."""
        ends = (self._tags.end, self._tags.closing)
        return any(end.startswith(left) and end != left for end in ends)

    def _parameter(self) -> re.Match[str] | None:
        """The next one, if it is whole. No text is searched for its end twice."""
        self._left = self._left.lstrip()
        shuts = self._tags.shuts
        if self._left.find(shuts, self._searched) < 0:
            self._searched = max(0, len(self._left) - len(shuts))
            return None
        self._searched = 0
        return self._tags.parameter.match(self._left)

    def _end(self) -> str:
        rest = self._left.removeprefix(self._tags.end)
        self.text = self.text[: len(self.text) - len(rest)]
        self.arguments += "}"
        self.is_ended, self._left = True, ""
        return rest

    def _none(self) -> str:
        """What stands behind a tag that has no name, or names nothing else can have."""
        _, mark, rest = self._left.removeprefix(self._tags.lead).partition(">")
        self.is_ended = bool(mark) or len(self._left) > _LONGEST_HEAD
        self.text = self.text[: len(self.text) - len(rest)]
        return rest

    def _value(self, key: str, text: str) -> str:
        if text.startswith(_CDATA) and text.endswith("]]>"):
            text = text[len(_CDATA) : -len("]]>")]
        kinds = kinds_of(self._schemas.get(self.name, {}), key)
        if kinds == {"string"}:
            return json.dumps(text, ensure_ascii=False)
        try:
            value = json.loads(_PYTHON.get(text, text))
            if "string" in kinds and kind_of(value) not in kinds - {"string"}:
                value = text
            return as_json(value)
        except (ValueError, RecursionError):
            # Templates print objects and lists of earlier calls as Python does, and models follow.
            literal = json_of(text) if kinds and "string" not in kinds else None
            return literal or json.dumps(text, ensure_ascii=False)


_CDATA = "<![CDATA["
"""As XML has text with signs of its own in it."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""As some models write them."""
