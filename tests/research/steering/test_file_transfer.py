"""Fetching a file from other members, who may be gone, slow, or lying."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.errors import LinkLost
from mesh.research.steering import file_transfer
from mesh.research.steering.file_transfer import PART_BYTES, FileTransfer, Library
from mesh.types import NodeId
from mesh.wire.messages import FileAsk, FilePart
from tests.full_disk import file_size_limit

DATA = bytes(range(256)) * 2048  # several parts
SHA = hashlib.sha256(DATA).hexdigest()
Said = FileAsk | FilePart


class Hearth:
    """Members whose messages reach each other in a later turn of the loop."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.members: dict[str, FileTransfer] = {}
        self.asked: list[str] = []
        self.part_timeout_s = file_transfer.PART_TIMEOUT_S
        self.peer_timeout_s = file_transfer.PEER_TIMEOUT_S
        self.bend: Callable[[Said], Said | None] = lambda message: message

    async def add(self, name: str, *files: bytes) -> FileTransfer:
        library = Library(self._root / name)
        for data in files:
            await asyncio.to_thread(library.keep, data)
        member = FileTransfer(
            library,
            lambda to, message: self._send(name, to, message),
            part_timeout_s=self.part_timeout_s,
            peer_timeout_s=self.peer_timeout_s,
        )
        self.members[name] = member
        return member

    def _send(self, sender: str, to: NodeId, message: Said) -> None:
        if to not in self.members:
            raise LinkLost("gone", fix="")
        if isinstance(message, FileAsk):
            self.asked.append(to)
        bent = self.bend(message)
        if bent is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.members[to].receive, NodeId(sender), bent)


@pytest.fixture
def hearth(tmp_path: Path) -> Hearth:
    return Hearth(tmp_path)


PEERS = [NodeId("author"), NodeId("friend")]


async def test_a_file_comes_whole_and_in_parts(hearth: Hearth) -> None:
    await hearth.add("author", DATA)
    asker = await hearth.add("asker")
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA
    assert hearth.asked == ["author"] * -(-len(DATA) // PART_BYTES)


async def test_who_is_gone_or_has_not_got_it_is_passed_over(hearth: Hearth) -> None:
    asker = await hearth.add("asker")
    assert await asker.fetch(SHA, len(DATA), PEERS) is None
    await hearth.add("friend", DATA)
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA
    await hearth.add("author")
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA
    assert "author" in hearth.asked


async def test_other_bytes_are_not_believed(hearth: Hearth) -> None:
    await hearth.add("author", DATA)
    asker = await hearth.add("asker")

    def lie(message: Said) -> Said:
        if isinstance(message, FilePart):
            return FilePart(message.number, bytes(len(message.data)))
        return message

    hearth.bend = lie
    assert await asker.fetch(SHA, len(DATA), PEERS) is None


async def test_more_bytes_than_announced_are_not_kept(hearth: Hearth) -> None:
    await hearth.add("author", DATA)
    asker = await hearth.add("asker")
    assert await asker.fetch(SHA, len(DATA) - 1, PEERS) is None


async def test_somebody_elses_answer_does_not_count(hearth: Hearth) -> None:
    await hearth.add("author", DATA)
    asker = await hearth.add("asker")
    await hearth.add("stranger")

    def shout(message: Said) -> Said:
        if isinstance(message, FileAsk):
            asker.receive(NodeId("stranger"), FilePart(message.number, b"mine"))
        return message

    hearth.bend = shout
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA


async def test_silence_ends_in_time(hearth: Hearth) -> None:
    hearth.part_timeout_s = 0.5  # the friend has as long for a part
    await hearth.add("author", DATA)
    await hearth.add("friend", DATA)
    asker = await hearth.add("asker")
    hearth.bend = lambda message: None if hearth.asked[-1:] == ["author"] else message
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA


async def test_a_flood_of_questions_is_not_queued(hearth: Hearth) -> None:
    author = await hearth.add("author", DATA)
    await hearth.add("asker")
    before = len(asyncio.all_tasks())
    for number in range(1000):
        author.receive(NodeId("asker"), FileAsk(number, SHA, 0))
    assert 0 < len(asyncio.all_tasks()) - before <= file_transfer.MAX_SERVING
    await author.close()


@pytest.fixture
def secret(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd.safetensors").write_bytes(b"secret")


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize("name", ["../etc/passwd", "", "a" * 64])
async def test_nothing_but_edits_is_given(hearth: Hearth, name: str) -> None:
    await hearth.add("author", DATA)
    asker = await hearth.add("asker")
    assert await asker.fetch(name, 6, PEERS) is None


def test_a_damaged_file_is_not_read_and_pruning_spares_the_wanted(tmp_path: Path) -> None:
    library = Library(tmp_path / "files")
    sha, other = library.keep(DATA), library.keep(b"other")
    library.prune({sha})
    assert library.read(sha) == DATA
    assert library.read(other) is None
    (tmp_path / "files" / f"{sha}.safetensors").write_bytes(DATA[:-1] + b"!")
    assert library.read(sha) is None


def test_what_was_not_written_to_its_end_takes_no_room(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    library = Library(directory)
    with file_size_limit(1000), pytest.raises(OSError, match="too large"):
        library.keep(DATA)
    assert list(directory.iterdir()) == []
    writing = "from pathlib import Path; from mesh.research.steering.file_transfer import Library;"
    writing += "Library(Path(__import__('sys').argv[1])).keep(bytes(1 << 20))"
    limit = ["bash", "-c", 'ulimit -c 0 -f 100; exec "$@"', "bash"]
    # Without Python's own handling of it the signal that comes at the limit kills.
    signals = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL);"
    killed = subprocess.run(
        [*limit, sys.executable, "-c", signals + writing, str(directory)], check=False
    )
    assert killed.returncode == -signal.SIGXFSZ
    assert len(list(directory.iterdir())) == 1
    sha = library.keep(DATA)
    library.prune({sha})
    assert list(directory.iterdir()) == [library.path(sha)]


async def test_small_pieces_are_no_parts(hearth: Hearth) -> None:
    await hearth.add("author", DATA)
    await hearth.add("friend", DATA)
    asker = await hearth.add("asker")

    def crumble(message: Said) -> Said:
        if isinstance(message, FilePart) and hearth.asked[-1] == "author":
            return FilePart(message.number, message.data[:-1])
        return message

    hearth.bend = crumble
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA
    assert hearth.asked.count("author") == 1


async def test_who_answers_late_each_time_does_not_keep_us(hearth: Hearth) -> None:
    hearth.peer_timeout_s = 1.0  # and the friend as long for all of it
    await hearth.add("friend", DATA)
    asker = await hearth.add("asker")
    loop = asyncio.get_running_loop()

    class Late(FileTransfer):
        """Answers well within the time of a part, too late for all of them."""

        def receive(self, peer: NodeId, message: Said) -> None:
            part = FilePart(message.number, DATA[:PART_BYTES])
            loop.call_later(0.75, asker.receive, NodeId("author"), part)

    hearth.members["author"] = Late(Library(Path("nowhere")), lambda *_: None)
    assert await asker.fetch(SHA, len(DATA), PEERS) == DATA
    assert 0 < hearth.asked.count("author") < len(DATA) // PART_BYTES
