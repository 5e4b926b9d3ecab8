"""Conversations with calls become what each template wants, which is found by trying it."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.models.thinking import Thinking
from mesh.models.tokenizer import Tokenizer
from mesh.models.turns import Wants, turned
from tests.pipeline.scripted_asker import EOS, tokenizer_with


def call(call_id: str, name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(call_id: str, said: str) -> dict[str, Any]:
    return {"role": "tool", "content": said, "tool_call_id": call_id, "name": "look"}


CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [call("a"), call("b")]}
TALK = [{"role": "user", "content": "hi"}, CALLS, result("b", "2"), result("a", "1")]


def test_one_call_comes_with_its_result_before_the_next() -> None:
    thought = [*TALK[:1], {**CALLS, "reasoning_content": "How?"}, *TALK[2:]]
    shown = turned(thought, Wants(one_call=True))
    assert [m["content"] for m in shown] == ["hi", "I look.", "1", "", "2"]
    shown = turned(thought, Wants(one_call=True, joins_thoughts=True))
    assert [m["role"] for m in shown] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [[c["id"] for c in m["tool_calls"]] for m in shown[1::2]] == [["a"], ["b"]]
    assert [m["content"] for m in shown] == ["hi", "", "1", "", "2"]
    assert [m.get("thinking") for m in shown[1::2]] == ["How?\n\nI look.", None]


def test_ids_are_counted_where_they_are_not_yet() -> None:
    own = {"role": "assistant", "content": "", "tool_calls": [call("functions.look:9")]}
    shown = turned([*TALK, own, result("functions.look:9", "3")], Wants(counted_ids=True))
    ids = [c["id"] for m in shown for c in m.get("tool_calls", ())]
    assert ids == ["functions.look:0", "functions.look:1", "functions.look:9"]
    answered = [m["tool_call_id"] for m in shown if m["role"] == "tool"]
    assert answered == ["functions.look:1", "functions.look:0", "functions.look:9"]
    assert TALK[1]["tool_calls"][0]["id"] == "a"  # what was given is as it was


def test_results_stand_beside_their_calls() -> None:
    shown = turned(TALK, Wants(tool_responses=True))
    assert [m["role"] for m in shown] == ["user", "assistant"]
    assert shown[1]["tool_responses"] == [
        {"name": "look", "response": "2"}, {"name": "look", "response": "1"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "K"}'),
        ("{{ '<' + c.function.arguments }}", '<{"city": "K"}'),
        ("{{ c.function.arguments }}", '{"city": "K"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=K"),
        ("{{ raise_exception('no calls') }}", None),
    ],
)
def test_arguments_are_objects_or_texts(calls: str, shown: str | None) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        f"{{{{ c.function.name }}}}{calls}{{% endfor %}}{{% endfor %}}"
    )
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    said = [{"role": "assistant", "content": "", "tool_calls": [call("a", city="K")]}]
    if shown is not None:
        assert tokenizer.decode(tokenizer.encode_chat(said)) == f"look{shown}"
        return
    with pytest.raises(Exception, match="no calls"):
        tokenizer.encode_chat(said)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            "{% if m.tool_calls | length > 1 %}{{ raise_exception('single') }}{% endif %}look",
            "|hilook|I look.|1look||2",
        ),
        ("{{ m.tool_calls[0].id }}look", "|hialook|I look.|1blook||2"),
    ],
)
def test_a_template_with_one_call_in_a_message_gets_them_one_by_one(call: str, shown: str) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}"
        f"{call}{{% endif %}}|{{{{ m.content }}}}{{% endfor %}}"
    )
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == shown


def test_a_template_that_wants_descriptions_gets_them_and_no_other_does() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for template, shown in (
        ("{{ tools[0].function.name + '//' + tools[0].function.description }}", "look//"),
        (
            "{{ tools[0] | tojson }}",
            '{"type": "function", "function": {"name": "look", "parameters": {}}}',
        ),
    ):
        tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
        ids = tokenizer.encode_chat(TALK[:1], tools=[tool])
        assert tokenizer.decode(ids) == shown


def test_an_answer_that_has_begun_goes_on_in_its_channel() -> None:
    template = "{# <|channel|>analysis<|message|> #}{{ messages[0].content }}<|start|>assistant"
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    for begun, end in (("", ""), ("So", "<|channel|>final<|message|>So")):
        ids = tokenizer.encode_chat(TALK[:1], begun=begun)
        assert tokenizer.decode(ids) == f"hi<|start|>assistant{end}"


@pytest.mark.parametrize(
    ("switch", "shown"),
    [
        ("", "hi a:<think>\n</think>\n\nSo"),
        (
            "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}",
            "hi a:<think>\n\n</think>\n\nSo",
        ),
    ],
)
def test_an_answer_that_has_begun_goes_on_behind_its_thoughts(switch: str, shown: str) -> None:
    opened = f"{switch}<think>\n" + ("{% endif %}" if switch else "")
    template = f"{{{{ messages[0].content }}}} a:{opened}{{# </think> #}}"
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    assert tokenizer.decode(tokenizer.encode_chat(TALK[:1])) == "hi a:<think>\n"
    assert tokenizer.decode(tokenizer.encode_chat(TALK[:1], begun="So")) == shown


def test_a_template_whose_one_switch_is_a_level_is_told_whether_to_think() -> None:
    template = (
        "{% set t = ':opensource' %}{% if reasoning_effort is not defined %}{% set "
        "reasoning_effort = 'no_think' %}{% endif %}{{ messages[0].content + reasoning_effort }}"
        "{{ '<think{}>'.format(t) + ('</think{}>'.format(t) if reasoning_effort == 'no_think' "
        "else '') }}"
    )
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    for thinking, shown in (
        (Thinking(), "hino_think<think:opensource></think:opensource>"),
        (Thinking(wanted=True), "hihigh<think:opensource>"),
        (Thinking(wanted=True, effort="low"), "hilow<think:opensource>"),
        (Thinking(wanted=False), "hino_think<think:opensource></think:opensource>"),
    ):
        assert tokenizer.decode(tokenizer.encode_chat(TALK[:1], thinking=thinking)) == shown
    ids = tokenizer.encode_chat(TALK[:1], begun="So", thinking=Thinking(effort="low"))
    assert tokenizer.decode(ids).endswith("</think:opensource>\n\nSo")


def test_calls_that_a_template_leaves_out_are_written_into_the_text() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    for mark, spelt in (
        (
            "<|im_system|>tool_declare<|im_middle|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.look:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("<|tool_list_start|>", "<|tool_call_start|>[look(), look()]<|tool_call_end|>"),
        (
            "<tool_call>",
            '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
        ),
        (
            "<TOOLCALL>",
            '<TOOLCALL>[{"name": "look", "arguments": {}}, {"name": "look", "arguments": {}}]'
            "</TOOLCALL>",
        ),
    ):
        tokenizer = Tokenizer(tokenizer_with(f"{template}{{# {mark} #}}"), frozenset({EOS}))
        assert f"|I look.{spelt}|2|1" in tokenizer.decode(tokenizer.encode_chat(TALK))


SMOL = (
    "{% if xml_tools %}{% for t in xml_tools[:] %}{{ t | string }}{% endfor %}<tool_call>"
    "{% endif %}{% for m in messages %}|{{ m.content }}{% endfor %}"
)
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ message['content'] + '<|tool|>' + message['tools'] + "
    "'<|/tool|>' }}{% else %}{{ '|' + message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (SMOL, "{'name': 'look', 'parameters': {}}<tool_call>|hi"),
        (
            PHI,
            "You are a helpful assistant with some tools.<|tool|>"
            '[{"name": "look", "parameters": {}}]<|/tool|>|hi',
        ),
    ],
)
def test_functions_go_where_a_template_takes_them_from(template: str, shown: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    tokenizer = Tokenizer(tokenizer_with(template), frozenset({EOS}))
    assert tokenizer.takes_tools()
    assert tokenizer.call_marks() is not None
    asked = {"role": "user", "content": "hi"}
    assert tokenizer.decode(tokenizer.encode_chat([asked], tools=[tool])) == shown
    assert tokenizer.decode(tokenizer.encode_chat([asked])) == "|hi"
    said = {"role": "system", "content": "Be brief."}
    assert "Be brief." in tokenizer.decode(tokenizer.encode_chat([said, asked], tools=[tool]))


def test_of_several_templates_that_for_tools_is_given_earlier_calls() -> None:
    plain = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('role') }}"
    made = tokenizer_with("")
    made.chat_template = {
        "default": plain + "{% endif %}{{ m.content }}{% endfor %}",
        "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}<tool_call>"
        "{% for m in messages %}{{ m.role[0] }}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    }
    tokenizer = Tokenizer(made, frozenset({EOS}))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "<tool_call>ualook{}look{}tt"
    assert tokenizer.decode(tokenizer.encode_chat(TALK[:1])) == "hi"
