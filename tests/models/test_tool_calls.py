"""Calls in an answer are told apart from its text, however it is cut into tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.models.call_forms import (
    APERTUS,
    APRIEL,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_PLAIN,
    FUNCTION_GEMMA,
    FUNCTIONARY,
    GEMMA,
    GIGACHAT,
    GLM_TAGS,
    GRANITE,
    HARMONY,
    HERMES,
    HUNYUAN,
    HUNYUAN_3,
    HUNYUAN_3_OPEN,
    KIMI,
    LFM,
    LLAMA,
    MINICPM_TAGS,
    MINIMAX_TAGS,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    OLMO,
    PHI,
    QWEN_TAGS,
    SEED_TAGS,
    SOLAR,
    CallForm,
    form_in,
)
from mesh.models.tool_calls import CallReader
from mesh.types import ToolUse

NAMES = ("look", "add", "plain-name")
ARGUMENTS = {
    "$defs": {"Unit": {"type": "string", "enum": ["1", "2"]}},
    "properties": {
        "a": {"type": "integer"},
        "city": {"type": "string"},
        "any": {},
        "flag": {"type": ["boolean", "null"]},
        "list": {"type": ["object", "array"]},
        "kind": {"enum": ["1", "2"]},
        "odd": {"type": 5, "enum": None},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"oneOf": [{"type": "string"}, {"type": "number"}]},
        "unit": {"$ref": "#/$defs/Unit"},
        "lost": {"$ref": "#/nowhere/Unit"},
    },
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in NAMES
)
Call = tuple[str, str]

CITY = '{"city": "Köln", "deep": {"brace": "}{ \\" </tool_call>"}}'


def read(
    form: CallForm, pieces: list[str], *, in_pieces: bool = True, parallel: bool = True
) -> tuple[str, list[Call], CallReader]:
    reader = CallReader(form, ToolUse(TOOLS, parallel=parallel, in_pieces=in_pieces))
    said, names, arguments, ids = "", dict[int, str](), dict[int, str](), set[str]()
    for text, told in [*map(reader.push, pieces), reader.flush()]:
        said += text
        for news in told:
            if news.name:
                assert news.index == len(names)
                assert not news.arguments
                names[news.index] = news.name
                ids.add(news.id)
            arguments[news.index] = arguments.get(news.index, "") + news.arguments
    assert len(ids) == len(names) == reader.count
    return said, [(names[index], arguments[index]) for index in names], reader


CASES: list[tuple[CallForm, str, str, list[Call]]] = [
    (HERMES, "just text < and <tool", "just text < and <tool", []),
    (
        HERMES,
        f'I look.\n<tool_call>\n{{"name": "look", "arguments": {CITY}}}\n</tool_call>',
        "I look.",
        [("look", CITY)],
    ),
    (
        HERMES,
        '<tool_call>{"name":"look","arguments":{}}</tool_call>\n'
        '<tool_call>{"name":"add","arguments":{"a":[1,{"b":2}]}}</tool_call>\nso it is \n',
        "so it is \n",
        [("look", "{}"), ("add", '{"a":[1,{"b":2}]}')],
    ),
    # Arguments first, as Hermes' own schema has them; and as a text.
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (HERMES, '<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
    # A function that there is not is for whoever calls it to refuse.
    (HERMES, '<tool_call>{"name":"x","arguments":{}}</tool_call>', "", [("x", "{}")]),
    # A missing brace loses nothing; a line end in a string is made JSON.
    (
        HERMES,
        '<tool_call>{"name":"add","arguments":{"a":"1\n2"}</tool_call> then',
        "then",
        [("add", '{"a":"1\\n2"}')],
    ),
    # What is no call stays as it was.
    (HERMES, "a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (HERMES, "a \n<tool_call></tool_call>", "a \n<tool_call></tool_call>", []),
    (HERMES, ' <tool_call> {"name": ', ' <tool_call> {"name": ', []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (
        LLAMA,
        '\n<|python_tag|>{"name":"add","parameters":{}}; {"name":"look","parameters":{"a":1}}',
        "",
        [("add", "{}"), ("look", '{"a":1}')],
    ),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    (LLAMA, '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
    (LLAMA, '{"name": "add"}', '{"name": "add"}', []),
    (LLAMA, '<|python_tag|>look.call(q="x")', '<|python_tag|>look.call(q="x")', []),
    (LLAMA, 'So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
    (
        MISTRAL,
        'On it.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, '
        '{"name": "look", "arguments": {}}]',
        "On it.",
        [("add", '{"a": 1}'), ("look", "{}")],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS]plain-name[ARGS]{"a": "["}[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("plain-name", '{"a": "["}'), ("look", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS] are marks", "[TOOL_CALLS] are marks", []),
    (
        PHI,
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
        "",
        [("add", '{"a": 1}')],
    ),
    (PHI, '<|tool_call|>[{"name": "add", "arguments": {}}]', "", [("add", "{}")]),
    # Between tags a value is what its schema says.
    (
        QWEN_TAGS,
        "I look.\n<tool_call>\n<function=look>\n<parameter=city>\n 12 <b>\nKöln\n</parameter>\n"
        "<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("look", '{"city": " 12 <b>\\nKöln", "a": 12}')],
    ),
    (
        QWEN_TAGS,
        "<tool_call><function=add><parameter=any>[1, 2]</parameter><parameter=any>x</parameter>"
        "<parameter=flag>True</parameter><parameter=kind>1</parameter>"
        "<parameter=new>2</parameter><parameter=odd>{}</parameter></function></tool_call>\n"
        "<tool_call><function=look></function></tool_call> so",
        "so",
        [
            (
                "add",
                '{"any": [1, 2], "any": "x", "flag": true, "kind": "1", "new": "2", "odd": {}}',
            ),
            ("look", "{}"),
        ],
    ),
    (
        QWEN_TAGS,
        "<tool_call><function=add><parameter=a>1</parameter></tool_call> then <tool_call>",
        "then <tool_call>",
        [("add", '{"a": 1}')],
    ),
    # The opening mark is left out at times, and not of functions that there are not.
    (
        QWEN_TAGS,
        "I look.\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "I look.",
        [("look", '{"a": 1}'), ("add", "{}")],
    ),
    (
        QWEN_TAGS,
        "In <function=main>\n<parameter=a>1</parameter> \n<func",
        "In <function=main>\n<parameter=a>1</parameter> \n<func",
        [],
    ),
    (QWEN_TAGS, "<tool_call>\n<function=>x", "<tool_call>\n<function=>x", []),
    (QWEN_TAGS, '<tool_call>{"name": "add"}', '<tool_call>{"name": "add"}', []),
    (
        SEED_TAGS,
        "Ok\n<seed:tool_call>\n<function=look>\n<parameter=city>\n Bad\nEms </parameter>\n"
        "<parameter=a>3</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=add>\n</function>\n</seed:tool_call>",
        "Ok",
        [("look", '{"city": "\\n Bad\\nEms ", "a": 3}'), ("add", "{}")],
    ),
    (
        MINIMAX_TAGS,
        '\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Köln\n\n</parameter>\n'
        '<parameter name="any">{"b": [1]}</parameter>\n</invoke>\n<invoke name="add">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("look", '{"city": "Köln\\n\\n", "any": {"b": [1]}}'), ("add", "{}")],
    ),
    # As Pydantic says what they may be.
    *(
        (
            QWEN_TAGS,
            f"<tool_call><function=add><parameter={key}>{said}</parameter></function></tool_call>",
            "",
            [("add", json.dumps({key: value}))],
        )
        for key, said, value in (
            ("maybe", "12345", "12345"),
            ("maybe", "null", None),
            ("maybe", '"a"', '"a"'),
            ("either", "12", 12),
            ("either", "1.5", 1.5),
            ("either", "true", "true"),
            ("unit", "1", "1"),
            ("lost", "1", 1),
        )
    ),
    # As Python prints them.
    (
        SEED_TAGS,
        "<seed:tool_call><function=add><parameter=list>{'a': [1, None]}</parameter>"
        "<parameter=any>{'a': 1}</parameter></function></seed:tool_call>",
        "",
        [("add", json.dumps({"list": {"a": [1, None]}, "any": "{'a': 1}"}))],
    ),
    (MINIMAX_TAGS, "<minimax:tool_call> no", "<minimax:tool_call> no", []),
    (
        GLM_TAGS,
        "I look.\n<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Köln <b></arg_value>\n"
        "<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n"
        "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        "I look.",
        [("look", '{"city": "Köln <b>", "flag": true}'), ("add", '{"a": 2}')],
    ),
    (GLM_TAGS, "<tool_call>look\n</tool_call><|observation|>", "", [("look", "{}")]),
    (GLM_TAGS, "<tool_call>add</tool_call> and <|obs", "and <|obs", [("add", "{}")]),
    # What no client could read as JSON is a text.
    *(
        (
            QWEN_TAGS,
            f"<tool_call><function=add><parameter=any>{odd}</parameter></function></tool_call>",
            "",
            [("add", json.dumps({"any": odd}))],
        )
        for odd in ("NaN", '["\\ud83d"]')
    ),
    (GLM_TAGS, "<tool_call>are <b>marks</b>", "<tool_call>are <b>marks</b>", []),
    (GLM_TAGS, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (
        DEEPSEEK,
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"city": "Köln"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n'
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "I look.",
        [("look", '{"city": "Köln"}'), ("add", '{"a": 1}')],
    ),
    (
        DEEPSEEK_PLAIN,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>plain-name<｜tool▁sep｜>{"a": [1]}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
        [("look", "{}"), ("plain-name", '{"a": [1]}')],
    ),
    (
        DEEPSEEK,
        "a <｜tool▁calls▁begin｜>function<｜tool▁sep｜>look",
        "a <｜tool▁calls▁begin｜>function<｜tool▁sep｜>look",
        [],
    ),
    (
        KIMI,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"city": "<a>"}<|tool_call_end|><|tool_call_begin|>'
        "functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        [("look", '{"city": "<a>"}'), ("add", "{}")],
    ),
    (
        KIMI,
        'So:<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "So:",
        [("look", '{"a": 1}'), ("add", "{}")],
    ),
    (KIMI, "a <|tool_call_begin|> b", "a <|tool_call_begin|> b", []),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_argument_begin|>{}",
        "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_argument_begin|>{}",
        [],
    ),
    (
        COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"city":'
        ' "Köln"}},\n    {"tool_name": "add", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("look", '{"city": "Köln"}'), ("add", "{}")],
    ),
    (
        COHERE,
        '<|START_ACTION|>[{"parameters": {"a": 1}, "tool_name": "add"}]<|END_ACTION|>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        NEMOTRON,
        'So:\n\n<TOOLCALL>[{"name": "look", "arguments": {"city": "Köln"}}, '
        '{"name": "add", "arguments": "{\\"a\\": 1}"}]</TOOLCALL>',
        "So:",
        [("look", '{"city": "Köln"}'), ("add", '{"a": 1}')],
    ),
    (
        HARMONY,
        'I look.<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city":'
        ' "Köln"}<|call|> not read',
        "I look.",
        [("look", '{"city": "Köln"}')],
    ),
    (
        HARMONY,
        "<|channel|>commentary to=python <|constrain|>json<|message|>print(1)<|call|>",
        "<|channel|>commentary to=python <|constrain|>json<|message|>print(1)<|call|>",
        [],
    ),
    (
        GEMMA,
        'So.\n<|tool_call>call:look{city:<|"|>Bad "Ems",\n{x}<|"|>,any:{b:[1,-2.5,true,None],<|"|>c'
        '<|"|>:<|"|><|"|>}}<tool_call|><|tool_call>call:add{}<tool_call|><|tool_response>more',
        "So.",
        [
            (
                "look",
                '{"city": "Bad \\"Ems\\",\\n{x}", "any": {"b": [1, -2.5, true, null], "c": ""}}',
            ),
            ("add", "{}"),
        ],
    ),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:look{city:<escape>Bad <Ems>\n<escape>,a:12}<end_function_call>"
        "<start_function_call>call:add{}<end_function_call><start_function_response>more",
        "",
        [("look", '{"city": "Bad <Ems>\\n", "a": 12}'), ("add", "{}")],
    ),
    (
        HUNYUAN,
        'So.<tool_calls><tool_call>look\n```json\n{"city": "Köln"}\n```</tool_call>\n'
        "<tool_call>add\n```json\n{}\n```</tool_call></tool_calls>",
        "So.",
        [("look", '{"city": "Köln"}'), ("add", "{}")],
    ),
    (HUNYUAN, "<tool_calls><tool_call>no", "<tool_calls><tool_call>no", []),
    (
        HUNYUAN_3,
        "So.<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Bad <Ems>\n</arg_value>\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>add<tool_sep>\n</tool_call>\n</tool_calls>",
        "So.",
        [("look", '{"city": "Bad <Ems>\\n", "a": 3}'), ("add", "{}")],
    ),
    (
        HUNYUAN_3_OPEN,
        "<tool_calls:opensource><tool_call:opensource>look<tool_sep:opensource><arg_key:opensource>"
        "list</arg_key:opensource><arg_value:opensource>[1]</arg_value:opensource>"
        "</tool_call:opensource></tool_calls:opensource>",
        "",
        [("look", '{"list": [1]}')],
    ),
    (HUNYUAN_3, "<tool_calls><tool_call>a b<tool_sep>", "<tool_calls><tool_call>a b<tool_sep>", []),
    (
        APERTUS,
        'So.<|tools_prefix|>[{"look": {"city": "Köln", "any": {"b": []}}}, {"add": {}}]'
        "<|tools_suffix|>",
        "So.",
        [("look", '{"city": "Köln", "any": {"b": []}}'), ("add", "{}")],
    ),
    (APERTUS, '<|tools_prefix|>[{"look": 1}]', '<|tools_prefix|>[{"look": 1}]', []),
    (
        FUNCTIONARY,
        'So. <function=look>{"city": "<a>"}</function><function=add>{}</function>\n',
        "So.",
        [("look", '{"city": "<a>"}'), ("add", "{}")],
    ),
    (FUNCTIONARY, "<function=look> no", "<function=look> no", []),
    (
        SOLAR,
        "So.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>look<|tool_call:args|>"
        '{"a": 1}<|tool_call:end|>'
        "<|tool_call:begin|>b<|tool_call:name|>add<|tool_call:args|>{}"
        "<|tool_call:end|><|calls|>",
        "So.",
        [("look", '{"a": 1}'), ("add", "{}")],
    ),
    (SOLAR, "<|tool_calls|><|tool_call:begin|>a", "<|tool_calls|><|tool_call:begin|>a", []),
    (
        GIGACHAT,
        'So.<|function_call|>{"name": "look", "arguments": {"a": 1}}',
        "So.",
        [("look", '{"a": 1}')],
    ),
    (
        MINICPM_TAGS,
        '<function name="look"><param name="city">Köln</param><param name="a">3</param></function>'
        '\n<function name="add"><param name="city"><![CDATA[<b>\n</param>]]></param></function>',
        "",
        [("look", '{"city": "Köln", "a": 3}'), ("add", '{"city": "<b>\\n</param>"}')],
    ),
    (MINICPM_TAGS, "a <function name= b", "a <function name= b", []),
    (GEMMA, "<|tool_call>call:add{a:1}<tool_call|>\nso", "so", [("add", '{"a": 1}')]),
    (GEMMA, "<|tool_call>call me", "<|tool_call>call me", []),
    (
        LFM,
        "<|tool_call_start|>[look(city='Bad \\'Ems\\'', any={'b': [1, -2.5, True, null]}), add()]"
        "<|tool_call_end|>\nChecking.",
        "Checking.",
        [("look", '{"city": "Bad \'Ems\'", "any": {"b": [1, -2.5, true, null]}}'), ("add", "{}")],
    ),
    (
        LFM,
        "<|tool_call_start|> [look(city=\"a)\nb, 'c'\", kind='2',)]<|tool_call_end|>",
        "",
        [("look", '{"city": "a)\\nb, \'c\'", "kind": "2"}')],
    ),
    # As JSON writes what Python writes otherwise.
    (
        LFM,
        r"<|tool_call_start|>[look(city='K\u00f6ln \ud83d\ude00')]<|tool_call_end|>",
        "",
        [("look", '{"city": "Köln 😀"}')],
    ),
    (LFM, "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>", []),
    (LFM, "<|tool_call_start|>[are marks]", "<|tool_call_start|>[are marks]", []),
    (
        OLMO,
        "I look.\n<function_calls>\nlook(city='Köln', flag=true)\nadd(a=12)\n</function_calls>",
        "I look.",
        [("look", '{"city": "Köln", "flag": true}'), ("add", '{"a": 12}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
@given(data=st.data())
def test_what_is_read_does_not_depend_on_where_the_text_is_cut(
    form: CallForm, text: str, said: str, calls: list[Call], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for in_pieces in (False, True):
        assert read(form, pieces, in_pieces=in_pieces)[:2] == (said, calls)
    assert read(form, list(text))[:2] == (said, calls)


WRITTEN = [
    *(
        '{"name": "add", "arguments": {}}',
        '{"a": "b"}',
        "look",
        "(a=1)",
        "{",
        "}",
        '"',
        " ",
        "\n",
        "<",
    ),
    *("<function=look>", '<invoke name="look">', "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    *("functions.look:0<|tool_call_argument_begin|>", "call:look{", "functions.look "),
]


@pytest.mark.parametrize("form", dict.fromkeys(case[0] for case in CASES))
@given(data=st.data())
def test_marks_in_any_order_are_read_alike_however_they_are_cut_and_lose_nothing(
    form: CallForm, data: st.DataObject
) -> None:
    bits = [*form.marks, *form.between, *WRITTEN]
    text = form.opening + "".join(data.draw(st.lists(st.sampled_from(bits), max_size=9)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for in_pieces in (False, True):
        said, calls, _ = read(form, [text], in_pieces=in_pieces)
        for cut in (pieces, list(text)):
            assert read(form, cut, in_pieces=in_pieces)[:2] == (said, calls)
        assert calls or said == text


def test_arguments_are_told_while_they_are_written_or_once_they_are_whole() -> None:
    pieces = ['<tool_call>{"name": "add", ', '"arguments": {"a', '": ', "1}", "}</tool_call>"]
    told = {}
    for in_pieces in (True, False):
        reader = CallReader(HERMES, ToolUse(TOOLS, in_pieces=in_pieces))
        told[in_pieces] = [[news.arguments for news in reader.push(p)[1]] for p in pieces]
    assert told[True] == [[], ["", '{"a'], ['": '], ["1}"], []]
    assert told[False] == [[], [], [], [], ["", '{"a": 1}']]


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "add", "arguments": {"a": None}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "never closed}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a',
    ],
)
def test_broken_arguments_are_text_unless_they_were_told_already(broken: str) -> None:
    assert read(HERMES, [broken], in_pieces=False)[:2] == (broken, [])
    said, ((name, arguments),), _ = read(HERMES, [broken])
    assert (said, name) == ("", "add")
    assert arguments.startswith('{"a')


@pytest.mark.parametrize(
    "broken",
    [
        "add(a=1 + 2)",
        "add(a=f(2))",
        "add('sed -n '1,2p' x')",
        "add(a=1e999)",
        "add(a=)",
        "add(**x)",
        "add(a=1]",
        "add(a=" + "(" * 500 + ")" * 500 + ")",
        "add(a={1: {2}})",
        r"add(a='\ud83d')",
    ],
)
def test_what_is_no_literal_is_no_argument(broken: str) -> None:
    said = f"<|tool_call_start|>[{broken}]<|tool_call_end|>"
    assert read(LFM, [said], in_pieces=False)[:2] == (said, [])


@pytest.mark.parametrize(
    "broken",
    ["call:add{a:New York}", "call:add{a:1<tool_call|>", 'call:add{a:<|"|>x'],
)
def test_what_makes_no_json_of_gemmas_is_text(broken: str) -> None:
    said = f"<|tool_call>{broken}"
    assert read(GEMMA, list(said), in_pieces=False)[:2] == (said, [])


def test_kimis_calls_keep_their_ids_which_are_counted_by_the_model() -> None:
    call = "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    reader = CallReader(KIMI, ToolUse(TOOLS))
    told = reader.push(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>")[1]
    first, second = (news.id for news in told if news.id)
    assert first == "functions.add:3"
    assert second.startswith("call_")


def test_a_parameter_that_is_cut_off_is_text_unless_its_call_was_told() -> None:
    cut = "<tool_call><function=add><parameter=a>1</parameter><parameter=city>Kö"
    assert read(QWEN_TAGS, [cut], in_pieces=False)[:2] == (cut, [])
    assert read(QWEN_TAGS, list(cut))[:2] == ("", [("add", '{"a": 1')])


def test_an_answer_without_parallel_calls_ends_with_the_first() -> None:
    call = '<tool_call>{"name":"add","arguments":{}}</tool_call>'
    said, calls, reader = read(HERMES, [call, "\n", call, "more"], parallel=False)
    assert (said, calls, reader.is_full) == ("", [("add", "{}")], True)
    assert not read(HERMES, [call], parallel=False)[2].is_full


def test_ids_have_the_length_that_mistrals_templates_want() -> None:
    def id_of(form: CallForm, text: str) -> str:
        return CallReader(form, ToolUse(TOOLS)).push(text)[1][0].id

    assert id_of(HERMES, '<tool_call>{"name":"add","arguments":{}}').startswith("call_")
    call_id = id_of(MISTRAL, '[TOOL_CALLS][{"name":"add","arguments":{}}]')
    assert len(call_id) == 9
    assert call_id.isalnum()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{{ t | tojson }}</tool_call>{% endif %}", HERMES),
        ("<tool_call><function=name><parameter=p>", QWEN_TAGS),
        ("<tool_call>name<arg_key>k</arg_key>", GLM_TAGS),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>```json",
            DEEPSEEK,
        ),
        ("<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>", DEEPSEEK_PLAIN),
        ("<|channel|>commentary json<|message|>{{ arguments }}<|call|>", HARMONY),
        ("'<|tool_call>call:' + function['name']", GEMMA),
        ("<|tool_call_start|>[", LFM),
        ("List of tools: <|tool_list_start|>[", LFM),
        ('{%- set keep_past_thinking = false -%}{{ "List of tools: [" }}', LFM),
        ("within <tool_call></tool_call> XML tags: <tool_calls>[{", APRIEL),
        ("<start_function_call>call:", FUNCTION_GEMMA),
        ("print <tool_calls> <tool_call>function_name\n```json\n```</tool_call>", HUNYUAN),
        (
            "set t = ':opensource' '<tool_calls{}>'.format(t) '<tool_sep{}>'.format(t)",
            HUNYUAN_3_OPEN,
        ),
        ("set t = '' '<tool_calls{}>'.format(t) '<tool_call{}>json <tool_sep>'", HUNYUAN_3),
        ("'<tool_calls{}>'.format(t) '<tool_sep{}>'.format(t)", None),
        ("set token = '<|tools_prefix|>' set end = '<|tools_suffix|>'", APERTUS),
        ('<function=example_function_name>{"a": 1}</function> <|python_tag|>', FUNCTIONARY),
        ('function_call="<|function_call|>"', GIGACHAT),
        ("'<|begin|>assistant<|tool_calls|>' '<|tool_call:begin|>'", SOLAR),
        ('<function name="f"><param name="p">v</param></function>', MINICPM_TAGS),
        ("set ns = ']<]minimax[>[' <tool_call>", None),
        ("wrapped in <function_calls></function_calls>", OLMO),
        ("<|tool_calls_section_begin|>", KIMI),
        ("{{ '<|im_system|>tool_declare<|im_middle|>' }}{{ tools | tojson }}", KIMI),
        ("write <|START_ACTION|> followed by a list", COHERE),
        ("<seed:tool_call>\\n<function=example>", SEED_TAGS),
        ("{%- set begin = '<minimax:tool_call>' -%}<invoke name=", MINIMAX_TAGS),
        ("<AVAILABLE_TOOLS>[]</AVAILABLE_TOOLS><TOOLCALL>[]</TOOLCALL>", NEMOTRON),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", MISTRAL),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]", MISTRAL_NAMED),
        ("respond with <|tool_call|>{}<|/tool_call|>", PHI),
        ("respond with <|tool_call|>", GRANITE),
        ("<|python_tag|>", LLAMA),
        ('in the format {"name": function name, "parameters": dictionary of', LLAMA),
        ("""{{- '{"name": "' + tool.name + '", ' }}{{- '"parameters": ' }}""", None),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_known_by_the_template(template: str, form: CallForm | None) -> None:
    assert form_in(template) == form


def test_arguments_are_what_json_reads() -> None:
    value: dict[str, Any] = {"text": 'ß\n"quoted" \\ {x}', "list": [1.5, None, True]}
    said = json.dumps({"name": "add", "arguments": value})
    ((_, arguments),) = read(HERMES, list(f"<tool_call>{said}</tool_call>"))[1]
    assert json.loads(arguments) == value
