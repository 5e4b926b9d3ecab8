"""Answers that must look like something, with OpenAI's own client over a real socket.

The model is scripted, and would say something else; what it must say it says.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from tests.api.test_tools import (
    ASK,
    CHANNELS,
    HARMONY,
    HERMES,
    LLAMA,
    LOOK,
    MISTRAL,
    THINKS,
    asking,
    whole,
)

NOISE = torch.Generator().manual_seed(1)


class Weather(BaseModel):
    """What is wanted: every path through it is short."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "grey", "dark"]
    degrees: list[Literal[10, 20, 30]] = Field(min_length=2, max_length=3)


SCHEMA = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
FORMAT: Any = {"type": "json_schema", "json_schema": SCHEMA}
PLAIN: dict[str, Any] = {"tools": openai.omit}
STRICT: Any = {
    "type": "function",
    "function": {
        "name": "set",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"sky": {"enum": ["clear", "grey"]}},
            "required": ["sky"],
            "additionalProperties": False,
        },
    },
}


async def test_a_schema_is_followed_and_openais_client_reads_it() -> None:
    async with asking(HERMES, "Well, I think it is fine.") as (client, asker):
        answer = await client.chat.completions.parse(
            model="toy", messages=ASK, temperature=0, response_format=Weather
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"
        # What is allowed is said as it would be said anyway.
        said = '{"sky": "grey", "degrees": [30, 10]}'
        asker.says(said)
        choice = await whole(client, **PLAIN, response_format=FORMAT)
        assert choice.message.content == said


async def test_a_seed_gives_the_same_answer_with_guesses_and_when_a_host_is_lost() -> None:
    async with asking(HERMES, "Well.") as (client, asker):
        asker.script.rivals = torch.randn(asker.script.vocab, generator=NOISE) * 2
        answers = {}
        for seed in range(6):
            more: Any = {"temperature": 1.0, "seed": seed, "response_format": FORMAT, **PLAIN}
            told = []
            for draft in (True, False):
                choice = await whole(client, **more, extra_body={"hearthnet": {"draft": draft}})
                told.append(choice.message.content)
            assert told[0] == told[1]
            Weather.model_validate_json(told[0])
            answers[seed] = more, told[0]
        assert len({said for _, said in answers.values()}) > 2
        more, said = answers[0]
        asker.dies_after(4)
        again = await client.chat.completions.create(model="toy", messages=ASK, **more)
        assert again.model_extra is not None
        assert again.model_extra["hearthnet"]["failovers"] == 1
        assert again.choices[0].message.content == said


async def test_openais_helpers_read_calls_and_schemas_that_are_streamed() -> None:
    class Look(BaseModel):
        """Looks it up."""

        city: str

    tool = openai.pydantic_function_tool(Look)  # strict
    call = 'So. <tool_call>\n{"name": "Look", "arguments": {"city": "Köln"}}\n</tool_call>'
    async with asking(HERMES, call) as (client, asker):
        asked: Any = {"model": "toy", "messages": ASK, "temperature": 0}
        async with client.chat.completions.stream(**asked, tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
        assert "tool_calls.function.arguments.done" in kinds
        message = (await stream.get_final_completion()).choices[0].message
        assert message.content == "So."
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == Look(city="Köln")
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
        asker.says("nothing of the kind")
        again: Any = {**asked, "messages": [*ASK, message, result]}
        parsed = (await client.chat.completions.parse(**again, response_format=Weather)).choices[0]
        again["messages"] += [parsed.message.model_dump(warnings=False), *ASK]
        await client.chat.completions.create(**again)
        async with client.chat.completions.stream(**asked, response_format=Weather) as stream:
            assert [event.type async for event in stream][-1] == "content.done"
        parsed = (await stream.get_final_completion()).choices[0].message.parsed
        assert isinstance(parsed, Weather)


async def test_any_object_will_do_for_json_object() -> None:
    async with asking(HERMES, '[1] {"a": "b"}') as (client, _):
        choice = await whole(client, **PLAIN, response_format={"type": "json_object"}, max_tokens=9)
        assert choice.message.content.startswith("{")
        text = await whole(client, **PLAIN, response_format={"type": "text"})
        assert text.message.content == '[1] {"a": "b"}'


_ONE_OF = ["grey / dark", "clear\nand cold", "3+4"]
_VLLM: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": _ONE_OF}, "|".join(map(re.escape, _ONE_OF))),
    "regex": ({"regex": r"[a-f]{2}/[0-9]{3}\n"}, r"[a-f]{2}/[0-9]{3}\n"),
    "json": ({"json": {"items": {"enum": [1]}, "type": "array", "maxItems": 1}}, r"\[\s*(1\s*)?\]"),
    "any object": ({"json_object": True}, r"\{(.|\n)*"),
}  # fmt: skip


@pytest.mark.parametrize("what", _VLLM)
async def test_what_vllms_clients_ask_for_binds_chats_and_completions(what: str) -> None:
    asked, expected = _VLLM[what]
    more: Any = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
    more["extra_body"] = {"structured_outputs": asked}
    async with asking(HERMES, "Well, I think it is fine.") as (client, asker):
        asker.script.rivals = torch.randn(asker.script.vocab, generator=NOISE) * 2
        chat = await whole(client, **PLAIN, **more)
        completion = await client.completions.create(model="toy", prompt="It is", **more)
        for text in (chat.message.content, completion.choices[0].text):
            assert re.fullmatch(expected, text)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "a(b"}, "structured_outputs: the answer's grammar cannot be followed"),
        ({"regex": ".?" * 2049}, "regex: String should have at most 4096 characters"),
        ({"json": {"not": {}}}, "structured_outputs.json: this JSON schema cannot be followed"),
        ({"grammar": "start: A"}, "structured_outputs.grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a"], "regex": "a"}, "send one of json, json_object, choice and regex"),
    ],
)
async def test_what_vllms_clients_ask_for_and_cannot_have_is_refused(
    asked: dict[str, Any], said: str
) -> None:
    one: Any = {"extra_body": {"structured_outputs": {"choice": ["a"]}}, "response_format": FORMAT}
    async with asking(HERMES, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match=re.escape(said)):
            await whole(client, **PLAIN, extra_body={"structured_outputs": asked})
        with pytest.raises(openai.BadRequestError, match="either response_format or structured"):
            await whole(client, **PLAIN, **one)


async def test_a_model_may_think_before_it_follows_a_schema() -> None:
    said = '{"sky": "dark", "degrees": [10, 20]}'
    special = ("<think>", "</think>")
    async with asking(THINKS, f"<think>Dark?</think>{said}", special) as (client, asker):
        message = (await whole(client, **PLAIN, response_format=FORMAT)).message
        assert (message.reasoning_content, message.content) == ("Dark?", said)
        asker.says(f"Yes <think>Dark?</think>{said}")  # it has to begin with it
        message = (await whole(client, **PLAIN, response_format=FORMAT)).message
        assert not hasattr(message, "reasoning_content")
        Weather.model_validate_json(message.content)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_who_thinks_does_not_end_before_what_is_wanted(temperature: float) -> None:
    special = ("<think>", "</think>")
    async with asking(THINKS, "<think>Well", special) as (client, asker):
        asker.script.rivals[asker.text.vocabulary()["</think>"]] = 6.0
        more: Any = {**PLAIN, "response_format": FORMAT, "temperature": temperature, "seed": 1}
        choice = await whole(client, **more)
        assert choice.finish_reason == "stop"
        assert choice.message.reasoning_content.startswith("Well")
        Weather.model_validate_json(choice.message.content)


async def test_a_template_that_opens_the_reasoning_leaves_it_free() -> None:
    said = '{"sky": "dark", "degrees": [10, 20]}'
    async with asking(THINKS + "<think>\n", f"Dark {{?\n</think>{said}") as (client, _):
        message = (await whole(client, **PLAIN, response_format=FORMAT)).message
        assert (message.reasoning_content, message.content) == ("Dark {?\n", said)


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (HERMES, ()),
        (HERMES, ("<tool_call>", "</tool_call>")),
        (LLAMA, ("<|python_tag|>",)),
        (MISTRAL, ("[TOOL_CALLS]",)),
        (MISTRAL + "[ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
        ("{{ tools | tojson }}<|tool_call|>", ("<|tool_call|>",)),
        ("{{ tools | tojson }}<|tool_call|><|/tool_call|>", ()),
        ("{{ tools | tojson }}<TOOLCALL></TOOLCALL>", ()),
        ("{{ tools | tojson }}<|START_ACTION|>", ("<|START_ACTION|>",)),
        ("{{ tools | tojson }}<｜tool▁calls▁begin｜>", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
        ("{{ tools | tojson }}<｜tool▁calls▁begin｜>```json", ("<｜tool▁calls▁begin｜>",)),
        ("{{ tools | tojson }}<|tool_calls_section_begin|>", ("<|tool_call_argument_begin|>",)),
    ],
)
async def test_a_call_that_is_required_comes_in_every_form(
    template: str, special: tuple[str, ...]
) -> None:
    async with asking(template, "No.", special) as (client, _):
        once: Any = {"tools": [LOOK, STRICT], "parallel_tool_calls": False}
        named = {"type": "function", "function": {"name": "set"}}
        choice = await whole(client, **{**once, "tools": [STRICT]}, tool_choice="required")
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls[0].function.name == "set"
        choice = await whole(client, **once, tool_choice=named)
        (call,) = choice.message.tool_calls
        assert call.function.name == "set"
        assert json.loads(call.function.arguments)["sky"] in ("clear", "grey")


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
async def test_strict_functions_bind_arguments_and_no_text(special: tuple[str, ...]) -> None:
    begun = 'So be it. <tool_call>{"name": "set", "arguments": {"sky": '
    async with asking(HERMES, f'{begun}"pink"}}}}</tool_call>', special) as (client, asker):
        choice = await whole(client, tools=[STRICT])
        assert choice.message.content.startswith("So be it.")
        assert json.loads(choice.message.tool_calls[0].function.arguments)["sky"] != "pink"
        asker.says("Nothing is to be set { here.")
        choice = await whole(client, tools=[STRICT])
        assert choice.message.content == "Nothing is to be set { here."


async def test_an_answer_may_be_a_call_or_follow_the_schema() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with asking(HERMES, call) as (client, asker):
        choice = await whole(client, response_format=FORMAT, parallel_tool_calls=False)
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        asker.says('{"sky": "dark", "degrees": [10, 20]}')
        choice = await whole(client, response_format=FORMAT)
        assert choice.message.content == '{"sky": "dark", "degrees": [10, 20]}'


async def test_an_answer_in_channels_is_bound_in_them_and_thinks_before() -> None:
    plan = "<|channel|>analysis<|message|>{How?<|end|><|start|>assistant"
    said = '{"sky": "dark", "degrees": [10, 20]}'
    async with asking(HARMONY, f"{plan}<|channel|>final<|message|>{said}", CHANNELS) as (
        client, asker,
    ):  # fmt: skip
        message = (await whole(client, **PLAIN, response_format=FORMAT)).message
        assert (message.reasoning_content, message.content) == ("{How?", said)
        asker.says(f"{plan}<|channel|>final<|message|>no")
        message = (await whole(client, **PLAIN, response_format=FORMAT)).message
        assert message.reasoning_content == "{How?"
        Weather.model_validate_json(message.content)
        choice = await whole(client, tools=[STRICT])
        assert (choice.finish_reason, choice.message.content) == ("stop", "no")
        begun = '<|channel|>commentary to=functions.set <|constrain|>json<|message|>{"sky": "pink"}'
        asker.says(f"{plan}<|channel|>commentary<|message|>So.<|end|><|start|>assistant{begun}")
        for more in ({}, {"tool_choice": "required"}):
            choice = await whole(client, tools=[STRICT], **more)
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments)["sky"] in ("clear", "grey")
        asker.says(f"{plan}{begun}")
        choice = await whole(client, tools=[STRICT], response_format=FORMAT)
        assert choice.message.reasoning_content == "{How?"
        assert choice.message.tool_calls[0].function.name == "set"


def _nested(depth: int) -> dict[str, Any]:
    return {"items": _nested(depth - 1)} if depth else {}


CHAIN = {f"n{number}": {"$ref": f"#/$defs/n{number + 1}"} for number in range(60)}
"""Some more would overflow the stack of whoever follows them."""


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        (
            {"response_format": {"schema": {"type": "strin"}}},
            "response_format.json_schema.schema",
            "Invalid type: strin",
        ),
        (
            {"response_format": {"schema": {"not": {"type": "string"}}}},
            "response_format.json_schema.schema",
            "Unimplemented keys",
        ),
        (
            {
                "tools": [
                    {**STRICT, "function": {**STRICT["function"], "parameters": {"type": "x"}}}
                ]
            },
            "tools.0.function.parameters",
            "arguments are an object",
        ),
        (
            {
                "response_format": {
                    "schema": {"$defs": {**CHAIN, "n60": _nested(40)}, **CHAIN["n0"]}
                }
            },
            "response_format.json_schema.schema",
            "name 60 places, and it is nested 43 deep",
        ),
        (
            {
                "response_format": {
                    "schema": {"allOf": [{"pattern": f"a{n}|b+"} for n in range(13)]}
                }
            },
            "response_format.json_schema.schema",
            "at most 12 patterns can hold together",
        ),
        (
            {"response_format": {"schema": {"$ref": "http://127.0.0.1:1/x"}}},
            "response_format.json_schema.schema",
            "not present",
        ),
        (
            {"tools": [{**STRICT, "function": {**STRICT["function"], "parameters": {"not": {}}}}]},
            "tools.0.function.parameters",
            "Unimplemented keys",
        ),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_refused(
    more: dict[str, Any], param: str, said: str
) -> None:
    if "response_format" in more:
        inner = {"name": "x", **more["response_format"]}
        more = {**PLAIN, "response_format": {"type": "json_schema", "json_schema": inner}}
    async with asking(HERMES, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await whole(client, **more)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"multipleOf": 999_983}, "least common multiple"),
        ({"pattern": ".?" * 2049}, "a pattern has 4098 letters"),
        ({"patternProperties": {f"^{n}-": {} for n in range(65)}}, "65 patternProperties"),
    ],
)
async def test_a_schema_that_would_take_gigabytes_is_refused(schema: Any, said: str) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with asking(HERMES, "hi") as (client, _):
        with pytest.raises(openai.BadRequestError, match=said):
            await whole(client, **PLAIN, response_format=wanted, max_tokens=1)


async def test_a_schema_that_cannot_be_followed_binds_no_function_that_is_not_strict() -> None:
    odd: Any = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    async with asking(HERMES, "hi") as (client, _):
        choice = await whole(client, tools=[odd], tool_choice="required", max_tokens=60)
        assert choice.finish_reason in ("length", "tool_calls")


@pytest.mark.parametrize(
    "schema", [{"properties": {"n": {"type": "integer"}}}, {"type": "integer"}]
)
async def test_what_is_called_is_called_with_an_object(schema: dict[str, Any]) -> None:
    tool: Any = {"type": "function", "function": {"name": "count", "parameters": schema}}
    number = '<tool_call>{"name": "count", "arguments": 5}</tool_call>'
    async with asking(HERMES, number) as (client, _):
        choice = await whole(client, tools=[tool], tool_choice="required", max_tokens=60)
        assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)


@pytest.mark.parametrize("named", [{}, {"parameters": {"type": "object", "properties": {}}}])
async def test_a_function_without_parameters_is_called_with_none(named: dict[str, Any]) -> None:
    tool: Any = {"type": "function", "function": {"name": "now", **named}}
    invented = '<tool_call>{"name": "now", "arguments": {"zone": "here"}}</tool_call>'
    async with asking(HERMES, invented) as (client, _):
        choice = await whole(client, tools=[tool], tool_choice="required", max_tokens=60)
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {}
