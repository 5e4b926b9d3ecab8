"""`hearthnet chat` on a real terminal, against one server for all of the file."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord
from tests.api.conftest import SHARED_LOOP, Served, serving, with_key
from tests.cli.conftest import Run
from tests.cli.terminal import ROWS, Terminal

pytestmark = SHARED_LOOP


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serving() as api:
        yield api


@pytest.fixture
def screen(environment: dict[str, str], served: Served) -> dict[str, str]:
    """An environment with a terminal that can do what terminals can."""
    known = {key: value for key, value in environment.items() if key not in {"COLUMNS", "NO_COLOR"}}
    return known | {
        "TERM": "xterm-256color",
        "HEARTHNET_HOST": served.url,
        "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
    }


def state(tmp_path: Path) -> Path:
    return tmp_path / ".local/state/hearthnet"


async def leave(terminal: Terminal) -> None:
    await terminal.prompt()
    terminal.type("/bye\r")
    assert await asyncio.wait_for(terminal.process.wait(), 20) == 0


async def test_what_was_typed_is_there_in_the_next_chat(
    screen: dict[str, str], served: Served, tmp_path: Path
) -> None:
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("first question\r")
        await leave(terminal)
    kept = state(tmp_path) / "chat-history"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert list(map(json.loads, kept.read_text().splitlines())) == ["first question", "/bye"]
    served.generations.requests.clear()
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("\x1b[A\x1b[A")
        await terminal.until_screen(">>> first question")
        terminal.type(" again\r")
        await terminal.until_screen("\nfirst question again\n")
        await leave(terminal)
    assert served.generations.requests[0].messages is not None
    assert served.generations.requests[0].messages[-1]["content"] == "first question again"


async def test_no_history_keeps_and_offers_nothing(screen: dict[str, str], tmp_path: Path) -> None:
    async with Terminal(screen, "chat", "echo", "--no-history") as terminal:
        await terminal.prompt()
        terminal.type("secret\r")
        await leave(terminal)
    assert not state(tmp_path).exists()


async def test_a_history_that_others_can_read_is_refused_and_done_without(
    screen: dict[str, str], tmp_path: Path
) -> None:
    kept = state(tmp_path) / "chat-history"
    kept.parent.mkdir(parents=True)
    kept.write_text('"x"\n')
    kept.chmod(0o644)
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.until("is open to others")
        await leave(terminal)
    assert kept.read_text() == '"x"\n'


async def test_several_lines_are_one_question(screen: dict[str, str], served: Served) -> None:
    served.generations.requests.clear()
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("one\x1b\rtwo\r")
        await terminal.until_screen("one\ntwo\n")
        await terminal.prompt()
        terminal.type('"""three\r')
        await terminal.until_screen("\n...")
        terminal.type('four"""\r')
        await terminal.until_screen("three\nfour\n")
        await terminal.prompt()
        terminal.type("\x1b[200~five\nsix\x1b[201~\r")
        await terminal.until_screen("five\nsix\n")
        await leave(terminal)
    contents = [r.messages[-1]["content"] for r in served.generations.requests if r.messages]
    assert contents == ["one\ntwo", "three\nfour", "five\nsix"]


async def test_commands_are_completed_and_listed(screen: dict[str, str]) -> None:
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("/sy")
        await terminal.until_screen("what the model is told first")
        terminal.type("\t")
        await terminal.until_screen(">>> /system\n")
        terminal.type(" be brief\r")
        await terminal.until_screen("system = be brief")
        await terminal.prompt()
        terminal.type("/model org")
        await terminal.until_screen("    org/half")
        terminal.type("\t")
        await terminal.until_screen(">>> /model org/half")
        terminal.type("\r")
        await terminal.until_screen("model = org/half")
        assert "missing layers 8-11" in terminal.shown()
        await terminal.prompt()
        terminal.type("/help\r")
        await terminal.until("Ctrl-C")
        for name in (
            "/system", "/model", "/set", "/route", "/why", "/save", "/load", "/retry", "/undo",
            "/clear", "/bye",
        ):  # fmt: skip
            assert name in terminal.everything
        await terminal.until_screen("Alt-Enter begins another one\nCtrl-C")
        await leave(terminal)


async def test_conversations_are_repeated_undone_saved_and_loaded(
    screen: dict[str, str], served: Served, tmp_path: Path
) -> None:
    served.generations.requests.clear()
    async with Terminal(screen, "chat", "echo") as terminal:
        for line, answer in (
            ("alpha", "\nalpha\n"),
            ("beta", "\nbeta\n"),
            ("/undo", "forgot: beta"),
            ("/system be kind", "system = be kind"),
            ("/retry", "(at temperature 0 the answer is the same"),
            ("/set ignore_eos on", "ignore_eos = on"),
            ("/set reasoning_effort x", "'x' is no value for reasoning_effort"),
            ("/set reasoning_effort low", "reasoning_effort = low"),
            ("/save tea", "tea.json"),
            ("/clear", "forgotten"),
            ("/save ../x", "is no name for a chat"),
            ("/load coffee", "No chat is saved as coffee; there are: tea."),
            ("/load tea", "tea: 2 turns with echo"),
            ("gamma", "\ngamma\n"),
            ("/etc is a path, /etc/passwd too", "There is no /etc"),
            ("/etc/passwd is one", "\n/etc/passwd is one\n"),
        ):
            await terminal.prompt()
            terminal.type(f"{line}\r")
            await terminal.until_screen(answer)
        await leave(terminal)
    kept = state(tmp_path) / "chats/tea.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    first, second, third, fourth, _ = served.generations.requests
    assert [r.messages[-1]["content"] for r in (first, second, third, fourth) if r.messages] == [
        "alpha", "beta", "alpha", "gamma",
    ]  # fmt: skip
    assert fourth.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "content": "alpha"},
        {"role": "user", "content": "gamma"},
    )
    assert (fourth.sampling.ignore_eos, fourth.effort) == (True, "low")


async def test_a_question_that_got_no_answer_is_the_last_one(
    screen: dict[str, str], served: Served
) -> None:
    try:
        async with Terminal(screen, "chat", "echo") as terminal:
            await terminal.prompt()
            terminal.type("alpha\r")
            await terminal.until_screen("\nalpha\n")
            await terminal.prompt()
            served.generations.scripts["echo"] = "busy"
            for line in ("beta", "/retry"):
                terminal.type(f"{line}\r")
                await terminal.until("4 generations run already")
                await terminal.prompt()
            del served.generations.scripts["echo"]
            terminal.type("/retry\r")
            await terminal.until_screen("\nbeta\n")
            await leave(terminal)
    finally:
        served.generations.scripts.clear()
    assert served.generations.requests[-1].messages == (
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "content": "alpha"},
        {"role": "user", "content": "beta"},
    )


async def test_where_a_conversation_is_too_long_it_may_be_forgotten(
    screen: dict[str, str], served: Served
) -> None:
    try:
        async with Terminal(screen, "chat", "echo") as terminal:
            await terminal.prompt()
            served.generations.scripts["echo"] = "too_long"
            terminal.type("all of a book\r")
            await terminal.until("Shorten the prompt")
            await terminal.prompt()
            served.generations.scripts.clear()
            terminal.type("alpha\r")
            await terminal.until_screen("\nalpha\n")
            await terminal.prompt()
            served.generations.scripts["echo"] = "too_long"
            terminal.type("beta\r")
            await terminal.until("`/clear` forgets the conversation")
            await leave(terminal)
    finally:
        served.generations.scripts.clear()


def record(file: Path, url: str, key: str) -> None:
    file.parent.mkdir(exist_ok=True)
    DaemonRecord.for_this_process(api_url=url, api_port=1, port=2, api_key=key).write(file)


@asynccontextmanager
async def recorded(file: Path, key: str) -> AsyncIterator[Served]:
    """A daemon with this key, on a port of its own, which can be found while it runs."""
    async with serving(with_key(key)) as api:
        await asyncio.to_thread(record, file, api.url, key)
        yield api
        await asyncio.to_thread(file.unlink)


async def test_a_chat_goes_on_with_a_daemon_that_was_started_again(
    screen: dict[str, str], tmp_path: Path
) -> None:
    flags = ("--state-dir", str(tmp_path))
    file = StatePaths(tmp_path).runtime_file
    async with AsyncExitStack() as stack:
        async with recorded(file, "first" * 4):
            terminal = await stack.enter_async_context(Terminal(screen, "chat", "echo", *flags))
            await terminal.prompt()
            terminal.type("alpha\r")
            await terminal.until_screen("\nalpha\n")
            await terminal.prompt()
        terminal.type("beta\r")
        await terminal.until("No hearthnet daemon runs")
        await terminal.prompt()
        async with recorded(file, "second" * 4) as api:
            terminal.type("/retry\r")
            await terminal.until_screen("\nbeta\n")
            await terminal.prompt()
            terminal.type("/model\r")
            await terminal.until("* echo")
            await leave(terminal)
    (asked,) = api.generations.requests
    assert [turn["content"] for turn in asked.messages or ()] == ["alpha", "alpha", "beta"]


async def test_an_answer_that_is_cut_off_says_so(screen: dict[str, str], served: Served) -> None:
    served.generations.scripts["echo"] = "narrow"
    try:
        async with Terminal(screen, "chat", "echo") as terminal:
            await terminal.prompt()
            terminal.type("more\r")
            await terminal.until("one")
            await terminal.until("[cut off: attic has no room")
            await leave(terminal)
    finally:
        del served.generations.scripts["echo"]


async def test_run_without_a_prompt_is_a_chat_with_what_its_flags_say(
    screen: dict[str, str], served: Served
) -> None:
    flags = ("--system", "be kind", "--temperature", "0.5", "--seed", "0", "--ignore-eos")
    async with Terminal(screen, "run", "echo", *flags) as terminal:
        await terminal.prompt()
        terminal.type("alpha\r")
        await terminal.until_screen("\nalpha\n")
        await leave(terminal)
    asked = served.generations.requests[-1]
    assert asked.messages is not None
    assert asked.messages[0] == {"role": "system", "content": "be kind"}
    sampling = asked.sampling
    assert (sampling.temperature, sampling.seed, sampling.ignore_eos) == (0.5, 0, True)
    async with Terminal(screen, "run", "echo", "--why") as terminal:
        await terminal.until_screen("Write the prompt after the model")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 2


async def test_why_tells_what_else_each_token_could_have_been(screen: dict[str, str]) -> None:
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("/why\r")
        await terminal.until_screen("No answer yet.")
        await terminal.prompt()
        terminal.type("hello you\r")
        await terminal.until_screen("\nhello you\n")
        await terminal.prompt()
        terminal.type("/why\r")
        await terminal.until_screen("   1  'hello'           60.7 %   'ö' <0.1 %")
        await terminal.until_screen("   2  ' you'            60.7 %   'ö' <0.1 %")
        await terminal.prompt()
        terminal.type(f"{'a' * 55}\r")  # what else could have been has no room beside it
        await terminal.until_screen(f"\n{'a' * 55}\n")
        await terminal.prompt()
        terminal.type("/why\r")
        await terminal.until_screen(f"   1  '{'a' * 55}'  60.7 %\n>>>")
        await leave(terminal)


async def test_why_lens_tells_what_each_layer_would_have_said(
    screen: dict[str, str], served: Served
) -> None:
    async with Terminal(screen, "chat", "echo") as terminal:
        await terminal.prompt()
        terminal.type("hello you\r")
        await terminal.until_screen("\nhello you\n")
        await terminal.prompt()
        terminal.type("/why --lens\r")
        await terminal.until_screen("token 2 of 2, ' you', by layer:")
        await terminal.until_screen("   1   node 1  'llo' 36.8 %")
        await terminal.prompt()
        asked = served.generations.requests[-1]
        assert (asked.messages, asked.begun) == (
            ({"role": "user", "content": "hello you"},),
            "hello",
        )
        terminal.type("/why --lens 1\r")
        await terminal.until_screen("token 1 of 2, 'hello', by layer:")
        await terminal.prompt()
        terminal.type("/why --lens 3\r")
        await terminal.until_screen("has 2 tokens, and no token 3")
        await terminal.prompt()
        terminal.type("/why --lens x\r")
        await terminal.until_screen("x is no token's number")
        await leave(terminal)


async def test_reasoning_stands_apart(screen: dict[str, str]) -> None:
    async with Terminal(screen, "run", "thinks", "x") as terminal:
        await terminal.until_screen("[thinking]\n| first this,\n| then that.\n\nso it is\n")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
    assert "\x1b[2m" in terminal.everything
    async with Terminal(screen | {"NO_COLOR": "1"}, "run", "thinks", "x") as terminal:
        await terminal.until_screen("| then that.\n\nso it is\n")
    assert "\x1b[2m" not in terminal.everything


async def test_what_happens_to_the_route_stands_above_the_answer(screen: dict[str, str]) -> None:
    async with Terminal(screen, "run", "failover", "x") as terminal:
        await terminal.until_screen("elsewhere now, over layers 4-11]\none two\n")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0


async def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    screen: dict[str, str], served: Served
) -> None:
    served.generations.scripts["echo"] = "stuck"
    try:
        async with Terminal(screen, "chat", "echo") as terminal:
            await terminal.prompt()
            terminal.type("half a line\x03")
            await terminal.until("(stopped")
            await terminal.prompt()
            served.generations.ended["echo"].clear()
            terminal.type("go on\r")
            await terminal.until_screen("\none")
            terminal.type("typed ahead\x03")
            await asyncio.wait_for(served.generations.ended["echo"].wait(), 5)
            await terminal.until("(stopped")
            assert "\none\n(stopped" in terminal.shown()  # no ^C, and what was typed is not in it
            await terminal.prompt()
            terminal.type("/why\r")
            await terminal.until("No answer yet.")
            await leave(terminal)
    finally:
        del served.generations.scripts["echo"]


MARKDOWN = """# Title

Some **bold** text with `code` in it, long enough that it has to be broken into a second line here.
A line of its own, <b>not HTML</b>.

- one
- two

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1
```
"""


async def test_markdown_is_drawn_and_only_what_changes_is_written(
    screen: dict[str, str], tmp_path: Path
) -> None:
    question = MARKDOWN + "\n".join(f"{n}. item *number* {n} of many" for n in range(1, 120))
    (tmp_path / "question").write_text(question)
    async with Terminal(screen, "run", "echo", question) as terminal:
        await terminal.until("prompt tokens")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
    shown = terminal.scrolled()
    for there in ("bold text with code in it", "\nA line of its own, <b>not HTML</b>.\n", "• one"):
        assert there in shown
    for gone in ("**", "|---|", "```", "# Title"):
        assert gone not in shown
    numbers = [int(line.split()[0]) for line in shown.splitlines() if "of many" in line]
    assert numbers == list(range(1, 120))  # each once, also those that have left the screen
    assert len(numbers) > ROWS
    # Drawn whole each time it would be many times its size.
    assert len(terminal.everything) < 4 * len(question)


async def test_plain_is_the_text_as_it_is(screen: dict[str, str]) -> None:
    async with Terminal(screen, "run", "--plain", "echo", "**a** \x1b[31m `b`") as terminal:
        await terminal.until_screen("**a** [31m `b`\n")
    async with Terminal(screen | {"TERM": "dumb"}, "run", "echo", "**a**") as terminal:
        await terminal.until_screen("**a**\n")
        assert "\x1b" not in terminal.everything


async def test_pipes_json_and_timings(hearthnet: Run, served: Served, tmp_path: Path) -> None:
    host = {"HEARTHNET_HOST": served.url}
    finished = await hearthnet("chat", "echo", "--json", "--verbose", stdin="a\nb\n", **host)
    first, second = map(json.loads, finished.out.splitlines())
    assert (first["text"], second["text"]) == ("a", "b")
    assert first["usage"] == second["usage"]
    assert "total " in finished.err
    assert "kitchen 6-11: 1.0 ms a step" in finished.err
    assert "6 of 8 guesses right" in finished.err
    finished = await hearthnet("run", "thinks", "a", "--json", **host)
    answer = json.loads(finished.out)
    assert (answer["text"], answer["reasoning"]) == ("so it is", "first this,\nthen that.")
    finished = await hearthnet("run", "thinks", "a", "--verbose", **host)
    assert finished.out == "so it is\n"
    assert finished.err.startswith("[thinking]\n| first this,\n| then that.\n\n")
    assert "prompt 240.0 tok/s" in finished.err
    assert "\x1b" not in finished.err
    assert not state(tmp_path).exists()
