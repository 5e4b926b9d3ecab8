"""Functions that a chat's answer may call, with OpenAI's own client over a real socket.

Real are the server, the asker, tokenizers and chat templates; what the model says is scripted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from mesh.api.app import create_app
from mesh.api.server import serve_api
from tests.api.conftest import SETTINGS
from tests.fakes import ScriptedView
from tests.pipeline.scripted_asker import ScriptedAsker, tokenizer_with

MESSAGES = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.name }} {{ m.tool_call_id }}){% endif %}\n{% endfor %}"
    "<|turn|>assistant: "
)
HERMES = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + MESSAGES
THINKS = HERMES + "{# <think></think> #}"
LLAMA = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1]['content'] }}<|python_tag|>"
MISTRAL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids of 9') }}"
    "{% endif %}[TOOL_CALLS]{% endfor %}{% endfor %}"
)
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
HARMONY = (
    "{{ strftime_now('%Y') }} {{ reasoning_effort }} {% for t in tools or [] %}"
    "{{ t.function.name + ' // ' + t.function.description }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
UNKNOWN = "{{ tools }}{{ messages[-1]['content'] }}"

ASK: list[Any] = [{"role": "user", "content": "How warm is it?"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln"}}\n</tool_call>'


@asynccontextmanager
async def asking(
    template: str, says: str, special: tuple[str, ...] = ()
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedAsker]]:
    """A client of a model with this template that answers so."""
    asker = ScriptedAsker(tokenizer_with(template, special=special))
    asker.says(says)
    server = await serve_api(create_app(asker, ScriptedView(), SETTINGS), "127.0.0.1", 0, None)
    client = openai.AsyncOpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
    try:
        yield client, asker
    finally:
        await client.close()
        await server.close()
        await asker.close()


async def whole(client: openai.AsyncOpenAI, **more: Any) -> Any:
    asked = {"messages": ASK, "tools": [LOOK], "temperature": 0, **more}
    answer = await client.chat.completions.create(model="toy", **asked)
    return answer.choices[0]


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> tuple[str, list[list[str]], str]:
    """The text, what each call's news said (name and id first), and why it ended."""
    asked = {"messages": ASK, "tools": [LOOK], "temperature": 0, **more}
    stream = await client.chat.completions.create(model="toy", stream=True, **asked)
    text, calls, reason = "", list[list[str]](), ""
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        told = choice.delta.tool_calls or []
        assert len({news.index for news in told}) == len(told)
        for news in told:
            assert news.function is not None
            if news.id:
                assert (news.type, news.index) == ("function", len(calls))
                calls.append([news.id, news.function.name or ""])
            calls[news.index].append(news.function.arguments or "")
    return text, calls, reason


async def test_a_call_and_its_result_go_round_through_the_template() -> None:
    async with asking(HERMES, f"I look.\n{CALL}") as (client, asker):
        choice = await whole(client)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "look")
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        assert asker.prompt().startswith('[{"type": "function", "function": {"name": "look",')
        asker.says("It is 21 degrees.")
        again = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
        choice = await whole(client, messages=again)
        assert (choice.finish_reason, choice.message.content) == ("stop", "It is 21 degrees.")
        assert choice.message.tool_calls is None
        assert (
            'I look.<tool_call>{"name": "look", "arguments": {"city": "Köln"}}</tool_call>'
            f"<|turn|>tool: 21(look {call.id})<|turn|>assistant: "
        ) in asker.prompt()


async def test_a_stream_of_a_call_alone_has_no_text_before_it() -> None:
    async with asking(HERMES, CALL) as (client, _):
        asked: Any = {"model": "toy", "messages": ASK, "tools": [LOOK], "temperature": 0}
        stream = await client.chat.completions.create(stream=True, **asked)
        first, *_ = deltas = [chunk.choices[0].delta async for chunk in stream]
        assert first.role == "assistant"
        assert any(delta.tool_calls for delta in deltas)
        # Vercel's AI SDK makes a part of a message of it, an empty one too.
        assert {delta.content for delta in deltas} == {None}


async def test_a_stream_tells_of_a_call_by_its_name_and_then_its_arguments() -> None:
    async with asking(HERMES, f"I look.\n{CALL}\n{CALL}") as (client, _):
        text, calls, reason = await streamed(client)
        assert (text, reason) == ("I look.", "tool_calls")
        assert [name for _, name, *_ in calls] == ["look", "look"]
        assert calls[0][0] != calls[1][0]
        for _, _, *pieces in calls:
            assert len(pieces) > 3
            assert json.loads("".join(pieces)) == {"city": "Köln"}


async def test_a_call_alone_has_no_content_and_calls_need_not_be_parallel() -> None:
    async with asking(HERMES, f"{CALL}\n{CALL} and on it goes") as (client, _):
        choice = await whole(client, parallel_tool_calls=False)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(choice.message.tool_calls) == 1
        assert len((await whole(client)).message.tool_calls) == 2


async def test_without_tools_or_with_the_choice_none_a_call_is_text() -> None:
    async with asking(HERMES, CALL) as (client, asker):
        for more in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
            choice = await whole(client, **more)
            assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
            assert "Looks it up." not in asker.prompt()


async def test_what_is_no_call_is_text() -> None:
    broken = '<tool_call>{"name": "look", "arguments": {"city": Köln}}</tool_call>'
    async with asking(HERMES, broken) as (client, _):
        choice = await whole(client)
        assert (choice.finish_reason, choice.message.content) == ("stop", broken)


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"city": "\\ud800"}, "name": "look"}',
        '{"name": "look", "arguments": {"city": NaN}}',
        '{"name": "look", "arguments": {"city": 1e999}}',
        '{"arguments": {}, "name": "\\ud800"}',
    ],
)
async def test_a_call_that_no_client_could_read_is_text(call: str) -> None:
    said = f"<tool_call>{call}</tool_call>"
    async with asking(HERMES, said) as (client, _):
        choice = await whole(client)
        assert (choice.finish_reason, choice.message.content) == ("stop", said)


async def test_arguments_that_are_written_as_a_text_are_json_for_the_client() -> None:
    said = '<tool_call>{"name": "look", "arguments": "{\\"city\\": \\"Bad\nEms\\"}"}</tool_call>'
    async with asking(HERMES, said) as (client, _):
        (call,) = (await whole(client)).message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Bad\nEms"}


async def test_an_answer_that_is_cut_in_a_call_says_so() -> None:
    async with asking(HERMES, CALL) as (client, _):
        choice = await whole(client, max_tokens=45)
        assert choice.finish_reason == "length"
        assert CALL.startswith(choice.message.content)
        text, ((_, name, *pieces),), reason = await streamed(client, max_tokens=45)
        assert (text, name, reason) == ("", "look", "length")
        assert '{"city": "Köln"'.startswith("".join(pieces))
        choice = await whole(client, max_tokens=60)  # inside of the closing mark
        assert (choice.finish_reason, choice.message.content) == ("length", None)
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}


@pytest.mark.parametrize("end", ["</think>\n\n", ""])
async def test_reasoning_stands_before_calls_which_end_it(end: str) -> None:
    async with asking(THINKS, f"<think>\nhow?{end}{CALL}") as (client, _):
        choice = await whole(client)
        assert (choice.message.reasoning_content, choice.message.content) == ("how?", None)
        assert choice.message.tool_calls[0].function.name == "look"
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("special", [(), ("<|python_tag|>",)])
async def test_llamas_calls_are_json_alone_or_behind_a_tag(special: tuple[str, ...]) -> None:
    said = '{"name": "look", "parameters": {"city": "Köln"}}'
    for text in (said, f"<|python_tag|>{said}"):
        async with asking(LLAMA, text, special) as (client, _):
            (call,) = (await whole(client)).message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Köln"}
            assert (await streamed(client))[1][0][1] == "look"


@pytest.mark.parametrize(
    "said",
    [
        '[TOOL_CALLS] [{"name": "look", "arguments": {"city": "Köln"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]look[ARGS]{"city": "Köln"}',
    ],
)
@pytest.mark.parametrize("special", [(), ("[TOOL_CALLS]", "[ARGS]")])
async def test_mistrals_calls_have_ids_that_its_template_takes(
    said: str, special: tuple[str, ...]
) -> None:
    async with asking(MISTRAL, said, special) as (client, asker):
        message = (await whole(client)).message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        asker.says("Done.")
        result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
        assert (await whole(client, messages=[*ASK, message, result])).message.content == "Done."


async def test_qwens_calls_between_tags_are_json_for_the_client() -> None:
    template = HERMES + "{# <function=name> #}"
    said = (
        "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    async with asking(template, said) as (client, asker):
        (call,) = (await whole(client)).message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        text, ((_, name, *pieces),), reason = await streamed(client)
        assert (text, name, reason) == ("", "look", "tool_calls")
        assert json.loads("".join(pieces)) == {"city": "Köln"}
        # What comes behind a broken call is read, also where a stop text had it wait.
        asker.says(f"<tool_call><function=>{said}")
        choice = await whole(client, stop=f"<tool_call><function=>{said[:30]}!")
        assert len(choice.message.tool_calls) == 1
        with pytest.raises(openai.BadRequestError, match="between tags") as refused:
            await whole(client, tool_choice="required")
        assert refused.value.param == "tools"


async def test_an_answer_in_channels_comes_in_its_parts_and_goes_back_as_them() -> None:
    plan = "<|channel|>analysis<|message|>How?<|end|><|start|>assistant"
    first = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Köln"}'
    async with asking(HARMONY, f"{plan}{first}{call}<|call|>and on it", CHANNELS) as (
        client, asker,
    ):  # fmt: skip
        bare = {"type": "function", "function": {"name": "look", "parameters": {}}}
        choice = await whole(client, tools=[bare], reasoning_effort="high")
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.reasoning_content, choice.message.content) == ("How?", "I look.")
        assert asker.prompt()[4:].startswith(" high look // <|start|>user")
        text, ((_, name, *pieces),), reason = await streamed(client)
        assert (text, name, reason) == ("I look.", "look", "tool_calls")
        assert len(pieces) > 3
        assert json.loads("".join(pieces)) == {"city": "Köln"}
        asker.says("<|channel|>final<|message|>It is warm.")
        (done,) = choice.message.tool_calls
        other = {**done.model_dump(), "id": "other"}
        said = {**choice.message.model_dump(), "tool_calls": [done.model_dump(), other]}
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": call_id}
            for call_id in (done.id, "other")
        ]
        choice = await whole(client, messages=[*ASK, said, *results])
        assert (choice.finish_reason, choice.message.content) == ("stop", "It is warm.")
        spelt = 'to=functions.look<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
        assert f"<|message|>How?\n\nI look.<|end|><|start|>assistant {spelt}" in asker.prompt()
        assert f"{spelt}<|start|>tool<|message|>other<|end|><|start|>assistant" in asker.prompt()
        asker.says(f"{plan}{call}<|call|>")
        assert (await whole(client, tools=openai.omit)).message.content == '{"city": "Köln"}'
        asker.says(f"{plan}<|channel|>fi")
        assert (await whole(client, tools=openai.omit)).message.reasoning_content == "How?"
    async with asking(HERMES, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match="how hard") as refused:
            await whole(client, reasoning_effort="low")
        assert refused.value.param == "reasoning_effort"
        assert (await whole(client, reasoning_effort="none")).message.content == "hi"


async def test_what_vllm_hands_to_a_template_says_whether_to_think() -> None:
    switched = THINKS + "{% if enable_thinking is false %}no thoughts{% endif %}"
    async with asking(switched, "<think>how?</think>so.") as (client, asker):
        for switch, told in (({"enable_thinking": False}, True), ({"thinking": True}, False)):
            await whole(client, extra_body={"chat_template_kwargs": switch})
            assert ("no thoughts" in asker.prompt()) is told
        await whole(client, extra_body={"enable_thinking": False})  # pi's, and Alibaba's own
        assert "no thoughts" in asker.prompt()
        both = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
        await whole(client, extra_body=both)
        assert "no thoughts" in asker.prompt()
        before = {"role": "assistant", "content": "so.", "reasoning": "how?"}
        await whole(client, messages=[*ASK, before, *ASK])
        with pytest.raises(openai.BadRequestError, match="mood") as refused:
            await whole(client, extra_body={"chat_template_kwargs": {"mood": "good"}})
        assert refused.value.param == "chat_template_kwargs.mood"
    keeps = THINKS + "{% if preserve_thinking %}all thoughts{% endif %}"
    async with asking(keeps, "so.") as (client, asker):
        for kept in (True, False):
            kwargs = {"enable_thinking": False, "preserve_thinking": kept}
            await whole(client, extra_body={"chat_template_kwargs": kwargs})
            assert ("all thoughts" in asker.prompt()) is kept
    async with asking(HERMES, "so.") as (client, _):
        with pytest.raises(openai.BadRequestError, match="does not support thinking"):
            await whole(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})


def called_with(arguments: str) -> list[Any]:
    """A question, the call that answered it, and its result."""
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    before = {"role": "assistant", "content": "", "tool_calls": calls}
    return [*ASK, before, {"role": "tool", "tool_call_id": "c1", "content": ""}]


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (
            "{% for c in m.tool_calls %}<｜tool▁calls▁begin｜>{{ c.type + '<｜tool▁sep｜>' +"
            " c.function.name + '```json' + c.function.arguments }}{% endfor %}",
            '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>look```json{"city": "Köln"}',
        ),
        ("{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments }}{% endfor %}",
         '<tool_call>{"city": "Köln"}'),
        ("<|tool_list_start|>", "<|tool_call_start|>[look(city='Köln')]<|tool_call_end|>"),
        ("{% for c in m.tool_calls %}<|tool_calls_section_begin|>{{ c.id }}{% endfor %}"
         "{{ m.tool_call_id }}", "<|tool_calls_section_begin|>functions.look:0functions.look:0"),
    ],
)  # fmt: skip
async def test_earlier_calls_go_through_a_template_as_it_wants_them(calls: str, shown: str) -> None:
    template = f"{{{{ tools }}}}{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}"
    async with asking(template, "Done.") as (client, asker):
        await whole(client, messages=called_with('{"city": "Köln"}'))
        assert shown in asker.prompt()


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Kö', "{'a': 1}", '{"a": -9223372036854775809}', '{"a": "\\ud800"}', "[]"],
)
async def test_an_earlier_call_that_cannot_be_read_is_shown_as_its_text(arguments: str) -> None:
    """An answer may have been cut off in it, and models write what is no JSON."""
    async with asking(HERMES, "Done.") as (client, asker):
        await whole(client, messages=called_with(arguments))
        assert json.dumps({"arguments": arguments}, ensure_ascii=False) in asker.prompt()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[-1]['content'] }}", "knows no tools"),
        ("{{ messages[-1]['content'] }}<tool_call>", "knows no tools"),
        ("", "knows no tools"),
        (UNKNOWN, "the form in which toy writes calls is not known"),
    ],
)
async def test_a_model_that_was_taught_no_tools_refuses_them(template: str, said: str) -> None:
    async with asking(template, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await whole(client)
        assert refused.value.param == "tools"
        assert "toy" in refused.value.message
        with pytest.raises(openai.BadRequestError, match=said):
            await streamed(client)
        called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        history: list[Any] = [*ASK, {"role": "assistant", "tool_calls": [called]}]
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await whole(client, messages=history, tools=[])
        assert refused.value.param == "messages"


async def test_a_template_is_shown_names_and_earlier_reasoning() -> None:
    template = "{% for m in messages %}{{ m.name }} {{ m.reasoning_content }}\n{% endfor %}"
    async with asking(template, "hi") as (client, asker):
        named = {**ASK[0], "name": "Ida"}
        before = {"role": "assistant", "content": "It is.", "reasoning_content": "Is it warm?"}
        await whole(client, messages=[named, before, *ASK], tools=openai.omit)
        assert asker.prompt() == "Ida \n Is it warm?\n \n"


async def test_a_template_that_trips_over_the_messages_says_so() -> None:
    template = HERMES + "{{ 'x' + messages[-1].tool_calls }}"
    async with asking(template, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match="refuses these messages"):
            await whole(client, tools=[])
