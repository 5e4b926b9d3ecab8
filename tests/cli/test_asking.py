"""`hearthnet run` and `hearthnet chat`, piped and on a terminal."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from mesh.api.openai.schemas import ChatBody
from mesh.cli.conversation import Conversation
from mesh.cli.options import patiently
from tests.api.conftest import Served
from tests.cli.conftest import COMMAND, Run, answering
from tests.cli.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]


async def test_who_waits_for_a_signature_is_told_what_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await patiently(asyncio.sleep(0, "signed")) == "signed"
    assert capsys.readouterr().err == ""
    assert await patiently(asyncio.sleep(0.05, "signed"), 0.001) == "signed"
    assert "waited half a minute" in capsys.readouterr().err


async def test_answer_is_alone_on_stdout(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("run", "echo", "hello big world")
    assert (finished.code, finished.out) == (0, "hello big world\n")
    assert "attic 0-5 -> kitchen 6-11" in finished.err
    assert "5 prompt tokens (2 cached) · 3 tokens · first token 12 ms" in finished.err
    request = daemon.generations.requests[0]
    assert request.sampling.temperature == 0


async def test_piped_input_is_added_and_flags_arrive(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet(
        "run", "echo", "sum up:", "--system", "be brief", "--temperature", "0.5", "--seed", "3",
        "--max-tokens", "7", "--ignore-eos", "--wire-dtype", "fp32", stdin="some text\n",
    )  # fmt: skip
    assert finished.out == "sum up:\n\nsome text\n"
    request = daemon.generations.requests[0]
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "sum up:\n\nsome text"},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.5, 3, 7)
    assert (sampling.ignore_eos, request.wire_dtype) == (True, "fp32")
    assert (await hearthnet("run", "echo", stdin="only this")).out == "only this\n"


async def test_run_explains_on_stderr(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("run", "echo", "hello you", "--why", "--lens")
    assert finished.out == "hello you\n"
    assert "   2  ' you'            60.7 %   'ö' <0.1 %" in finished.err
    assert "token 2 of 2, ' you', by layer:\n   0   node 0  'llo' 36.8 %" in finished.err
    finished = await hearthnet("run", "echo", "hello you", "--lens", "--json")
    answer = json.loads(finished.out)
    assert [layer["node"] for layer in answer["lens"]["layers"]] == ["node 0", "node 1"]
    finished = await hearthnet("run", "echo", "hello you", "--lens", "--raw")
    assert finished.code == 2
    assert "Leave --raw out" in finished.err


async def test_raw_prompt_and_json(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("run", "echo", "Once upon", "--raw", "--json")
    answer = json.loads(finished.out)
    assert (answer["text"], answer["finish_reason"]) == ("Once upon", "stop")
    assert answer["hearthnet"]["token_ids"] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2
    assert daemon.generations.requests[0].prompt == "Once upon"


async def test_failover_is_told_on_stderr(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("run", "failover", "x")
    assert finished.out == "one two\n"
    assert "[kitchen dropped out (the connection ended); looking for others with" in finished.err
    assert "[layers 6-11 are asked elsewhere now, over layers 4-11]" in finished.err
    assert "1 failover(s)" in finished.err


async def test_control_characters_of_a_model_are_stripped(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("run", "ugly", "x")
    assert finished.out == "[31mred[0m\u2028next\tß\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no-route", "x"], 5, "[shard_unavailable]"),
        (["breaks", "x"], 1, "[pipeline_stalled]"),
        (["echo", "x", "--wire-dtype", "int8"], 2, "wire_dtype"),
        (["echo"], 2, "There is no prompt."),
    ],
)
async def test_errors_have_codes_and_fixes(
    hearthnet: Run, daemon: Served, arguments: list[str], code: int, said: str
) -> None:
    finished = await hearthnet("run", *arguments)
    assert finished.code == code
    assert said in finished.err
    assert "Traceback" not in finished.err
    assert finished.out in {"", "one\n"}


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
async def test_what_is_no_text_is_refused_and_not_altered(
    fresh: Run, daemon: Served, errors: str
) -> None:
    codec = {"PYTHONIOENCODING": f"utf-8:{errors}"}
    for finished in (
        await fresh("run", "echo", stdin="caf\udce9", **codec),
        await fresh("run", "echo", "caf\udce9", **codec),
        await fresh("chat", "echo", stdin="caf\udce9\n", **codec),
        await fresh("run", "ech\udce9", "x", **codec),
    ):
        assert (finished.code, finished.out) == (2, "")
        assert "not UTF-8" in finished.err
        assert "iconv" in finished.err
    assert daemon.generations.requests == []


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
async def test_numbers_that_are_none_are_refused_by_name(
    hearthnet: Run, daemon: Served, number: str
) -> None:
    finished = await hearthnet("run", "echo", "x", "--temperature", "1", f"--top-p={number}")
    assert finished.code == 2
    assert f"top_p is {number}" in finished.err
    lines = f"/set temperature {number}\nhi\n"
    finished = await hearthnet("chat", "echo", stdin=lines)
    assert (finished.code, finished.out) == (0, "hi\n")
    assert f"{number!r} is no value for temperature" in finished.err
    for verb in ("down", "pause"):
        finished = await hearthnet(verb, f"--timeout={number}")
        assert finished.code == 2
        assert "--timeout" in finished.err


async def test_debug_shows_the_traceback(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("--debug", "run", "nobody", "x")
    assert finished.code == 4
    assert "Traceback" in finished.err


async def test_piped_chat_answers_each_line_and_remembers(hearthnet: Run, daemon: Served) -> None:
    lines = [
        "hello there", "", "/set temperature 0.25", "/set sytem x", "/set system be kind",
        "/set seed x", "/set stop", '"""two', 'lines"""', "/route", "/clear", "fresh", "/bye",
        "never",
    ]  # fmt: skip
    finished = await hearthnet("chat", stdin="\n".join(lines))
    assert (finished.code, finished.out) == (0, "hello there\ntwo\nlines\nfresh\n")
    first, second, third = (request.messages for request in daemon.generations.requests)
    assert first == ({"role": "user", "content": "hello there"},)
    assert second == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "two\nlines"},
    )
    assert third == (second[0], {"role": "user", "content": "fresh"})
    temperatures = [r.sampling.temperature for r in daemon.generations.requests]
    assert temperatures == [0.0, 0.25, 0.25]
    assert "did you mean system?" in finished.err
    assert "'x' is no value for seed" in finished.err
    assert "'' is no value for stop" in finished.err
    assert "kitchen 6-11: 1.0 ms a step" in finished.err


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ("-0.1", "0", "2", "9")), ("top_p", ("-0.1", "0", "1", "1.5")),
        ("top_k", ("-2", "-1", str(2**31))), ("min_p", ("-1", "0", "2")),
        ("repetition_penalty", ("0", "0.01", "10", "11")), ("seed", (str(2**63), str(-(2**63)))),
        ("max_tokens", ("0", "1", str(2**31))),
        ("presence_penalty", ("-3", "-2", "2", "3")), ("frequency_penalty", ("-3", "2", "3")),
    ],
)  # fmt: skip
def test_a_chat_refuses_the_values_that_the_daemon_does_in_its_words(
    name: str, values: tuple[str, ...]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for value in values:
        conversation = Conversation("m")
        try:
            ChatBody.model_validate({**body, name: json.loads(value)})
            expected = f"{name} = {value}"
        except ValidationError as error:
            expected = f"{name}: {error.errors()[0]['msg']}."
        assert conversation.set(name, value) == expected
        if " = " not in expected:
            assert conversation.options == {"temperature": 0.0}


async def test_chat_with_an_unknown_model_names_the_known(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("chat", "nobody", stdin="hi\n")
    assert finished.code == 4
    assert "echo, org/half" in finished.err


async def test_who_chats_right_after_up_has_the_model_that_is_loading(
    hearthnet: Run, daemon: Served
) -> None:
    daemon.view.is_loading = True
    finished = await hearthnet("chat", stdin="hi\n")
    assert (finished.code, finished.out) == (0, "hi\n")
    assert "echo is not all up here yet: an answer waits" in finished.err


async def test_piped_chat_stops_at_an_error(hearthnet: Run, daemon: Served) -> None:
    finished = await hearthnet("chat", "org/half", stdin="hi\nhi\n")
    assert finished.code == 4
    assert "org/half cannot answer now: missing layers 8-11" in finished.err
    assert len(daemon.generations.requests) == 1


async def test_interrupt_stops_the_answer_and_not_the_chat(
    environment: dict[str, str], daemon: Served
) -> None:
    async with Terminal(environment, "chat", "echo") as terminal:
        await terminal.until(">>> ")
        terminal.type("/set temperature\n")
        await terminal.until("is no value")
        await terminal.until(">>> ")
        terminal.type("hi you\n")
        await terminal.until("hi you\r\nhi you")
        await terminal.until(">>> ")
        daemon.generations.scripts["echo"] = "stuck"
        terminal.type("go on\n")
        await asyncio.wait_for(daemon.generations.started.wait(), 20)
        await terminal.until("one")
        daemon.generations.ended["echo"].clear()
        terminal.process.send_signal(signal.SIGINT)
        await asyncio.wait_for(daemon.generations.ended["echo"].wait(), 5)
        await terminal.until("(stopped")
        await terminal.until(">>> ")
        terminal.type("/bye\n")
        assert await asyncio.wait_for(terminal.process.wait(), 10) == 0


async def test_interrupted_run_is_exit_code_130(
    environment: dict[str, str], daemon: Served
) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "run", "stuck", "x",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(3), 20) == b"one"
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    assert b"Traceback" not in err
    await asyncio.wait_for(daemon.generations.ended["stuck"].wait(), 5)


async def test_an_interrupt_while_the_command_is_imported_is_no_traceback(
    environment: dict[str, str],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["hearthnet"].split(":")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "importtime", "-c", f"from {module} import {function}; {function}()",
        "status", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    await asyncio.wait_for(process.stderr.readuntil(b" typer\n"), 20)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130
    assert b"Traceback" not in err


async def test_a_pull_that_is_left_before_it_hears_how_it_goes_says_that_it_goes_on(
    environment: dict[str, str],
) -> None:
    asked = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST "):
            await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"pull": "toy"}')
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "pull", "toy", "--host", host,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        await asyncio.wait_for(asked.wait(), 20)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130
    assert b"The daemon goes on fetching toy" in err


async def test_two_nodes_of_one_name_are_told_apart_where_models_lie(hearthnet: Run) -> None:
    nodes = [
        {"node_id": f"hn1{start}", "name": "attic", "layers": ["0-1"], "ends": False}
        for start in ("abcdefgh", "bcdefghi")
    ]
    row = {"id": "toy", "weights_sha256": "ab" * 32, "nodes": nodes}
    empty: dict[str, list[object]] = {"models": [], "transfers": [], "pulls": []}
    async with answering(json.dumps({**empty, "neighbours": [row]}).encode()) as host:
        listed = await hearthnet("list", "--host", host)
        shown = await hearthnet("show", "toy", "--host", host)
    assert "on abcdef (attic), bcdefg (attic)" in listed.out
    assert "abcdef (attic) has 0-1" in shown.out
    assert "bcdefg (attic) has 0-1" in shown.out
