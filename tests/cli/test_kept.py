"""What a chat keeps: bounded, private, and refused when it is not what it should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.cli import kept, lens, why
from mesh.cli.conversation import Conversation
from mesh.cli.kept import SavedChats, TypedLines
from mesh.client import Client
from mesh.errors import BadRequest, BadValue, KeyUnreadable, NotFound, NotRunning
from tests.full_disk import file_size_limit


def test_the_history_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state/history"
    typed = TypedLines(path, max_bytes=1000)
    assert typed.read() == []
    for number in range(200):
        typed.add(f"question {number}\nü")
        assert path.stat().st_size <= 1000
    texts = typed.read()
    assert texts == [f"question {number}\nü" for number in range(200 - len(texts), 200)]
    assert len(texts) > 10
    assert path.stat().st_mode & 0o777 == 0o600
    typed.add("x" * (kept.HISTORY_ENTRY_CHARS + 1))
    assert typed.read() == texts
    assert TypedLines(path, max_bytes=1000, max_entries=3).read() == texts[-3:]


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    typed = TypedLines(tmp_path / "history")
    typed.add("first")
    with file_size_limit(20), pytest.raises(BadValue):
        typed.add("what has no room")
    assert typed.read() == ["first"]
    typed.add("second")
    assert typed.read() == ["first", "second"]


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.touch(0o600)
    for content in ("not json\n", "[1]\n"):
        path.write_text(content)
        with pytest.raises(BadValue, match="no history"):
            TypedLines(path).read()
    (tmp_path / "target").write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    for use in (TypedLines(link).read, lambda: TypedLines(link).add("x")):
        with pytest.raises((BadValue, KeyUnreadable)):
            use()
    assert (tmp_path / "target").read_text() == ""


def test_a_saved_chat_comes_back_whole(tmp_path: Path) -> None:
    saved = SavedChats(tmp_path / "chats")
    assert saved.names() == []
    chat = Conversation("m", "be\nkind", turns=[{"role": "user", "content": "hé"}])
    for name, value in (("seed", "3"), ("ignore_eos", "on"), ("top_p", "0.5"), ("stop", "END")):
        chat.set(name, value)
    path = saved.save("tea-time", chat)
    assert path.stat().st_mode & 0o777 == 0o600
    other = Conversation("n")
    saved.load("tea-time", other)
    assert other == chat
    assert saved.names() == ["tea-time"]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"turns": [{"role": "system", "content": "x"}]},
        {"turns": [{"role": "user"}]},
        {"options": {"temperature": "nan"}},
        {"options": {"unknown": "1"}},
        {"more": 1},
    ],
)
def test_what_is_no_saved_chat_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    saved = SavedChats(tmp_path)
    path = saved.save("x", Conversation("m"))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    chat = Conversation("n")
    with pytest.raises(BadValue, match="no saved chat"):
        saved.load("x", chat)
    assert chat == Conversation("n")


@pytest.mark.parametrize("name", ["", "../x", ".x", "a/b", "x" * 65, "é", "a b"])
def test_names_stay_inside_the_directory(tmp_path: Path, name: str) -> None:
    saved = SavedChats(tmp_path)
    with pytest.raises(BadValue, match="no name"):
        saved.save(name, Conversation("m"))
    with pytest.raises(BadValue, match="no name"):
        saved.load(name, Conversation("m"))
    with pytest.raises(NotFound):
        saved.load("other", Conversation("m"))
    assert list(tmp_path.iterdir()) == []


def test_of_a_long_answer_the_least_sure_tokens_are_shown_in_their_order() -> None:
    tokens = [
        {"token": f"t{n}", "logprob": -(n % 50) / 10, "top_logprobs": [
            {"token": f"t{n}", "logprob": -(n % 50) / 10},
            {"token": "\x1b[2J\n", "logprob": -9999.0},
        ]}
        for n in range(100)
    ]  # fmt: skip
    *lines, last = why.table(tokens).splitlines()
    assert last.startswith("These 40 of 100 were least sure")
    assert [int(line.split()[0]) for line in lines] == [*range(31, 51), *range(81, 101)]
    assert len(why.table(tokens, everything=True).splitlines()) == 100
    assert "\x1b" not in "".join(lines)
    assert "<0.1 %" in lines[0]
    assert why.table([]) == ""


def test_a_lens_marks_the_layers_that_say_what_was_said() -> None:
    layers = [
        {"layer": 0, "node": "kitchen\x1b[2J", "top": [{"token": "a", "logprob": -0.1}]},
        {"layer": 1, "node": "attic", "top": [{"token": "cat", "logprob": -0.7}] * 2},
    ]
    found = {"number": 3, "of": 3, "token": "cat", "layers": layers}
    head, *lines, last = lens.table(found).splitlines()
    assert head == "token 3 of 3, 'cat', by layer:"
    assert lines == [
        "   0   kitchen[2J  'a' 90.5 %",
        "   1 * attic       'cat' 49.7 %  'cat' 49.7 %",
    ]
    assert "by the nodes that hold the layers" in last


async def test_a_lens_is_refused_behind_half_a_character_and_not_behind_a_whole_one() -> None:
    said = [b"a", "é".encode()[:1], "é".encode()[1:], b"b"]
    tokens = [{"token": each.decode(errors="replace"), "bytes": list(each)} for each in said]
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(BadRequest, match="no whole characters"):
            await lens.look(client, "m", [], tokens, 3)
        for number in (2, 4):
            with pytest.raises(NotRunning):
                await lens.look(client, "m", [], tokens, number)
