"""A writer of a partial checkpoint is killed at random moments; run by `test_partial`.

``python -m tests.models.partial_kills SEED ROUNDS DIRECTORY``. Each round forks a writer: several
threads put pieces in any order, some of them twice and some of them wrong; one writer in a few is
closed instead. After each, every tensor that is noted as complete is compared byte by byte, and
none that was may be missing; a checkpoint that is whole is begun anew. Prints what it saw, or
fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mesh.models.manifest import read_tensors
from mesh.models.partial import PIECE_BYTES, PartialRecord, read_partial
from mesh.models.partial_draft import SparseFile, create_partial
from mesh.models.partial_writer import PartialWriter, WriteOutcome, pieces_of
from mesh.types import ModelId

SIZES = [8, 40_000, PIECE_BYTES, PIECE_BYTES + 8, 3 * PIECE_BYTES - 16] + [4096] * 40
THREADS = 3


def make(directory: Path, rng: random.Random) -> dict[str, bytes]:
    """Two weights files, without a tensor; what all of them are to be."""
    contents = {f"t{index:02}": rng.randbytes(size) for index, size in enumerate(SIZES)}
    sparse, index = {}, dict[str, str]()
    for number in range(2):
        at, header = 0, dict[str, object]()
        for name in sorted(contents)[number::2]:
            size = len(contents[name])
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            index[name] = f"part-{number}.safetensors"
            at += size
        text = json.dumps(header).encode()
        head = len(text).to_bytes(8, "little") + text
        sparse[f"part-{number}.safetensors"] = SparseFile(head, len(head) + at)
    small = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    record = PartialRecord(1, ModelId("toy"), "0" * 64, "", hashes)
    create_partial(directory, record, sparse, small)
    return contents


def write(directory: Path, contents: dict[str, bytes], seed: int) -> None:
    """What one writer does until it is killed, or done."""
    rng = random.Random(seed)
    writer = PartialWriter(directory)
    work = pieces_to_put(writer, contents, rng)
    guard = threading.Lock()

    def put() -> None:
        while True:
            with guard:
                if not work:
                    return
                name, start, stop, lies = work.pop()
            data = bytearray(contents[name][start:stop])
            if lies:
                data[0] ^= 1
            if writer.put(name, start, [data[:100], data[100:]]) is WriteOutcome.WRONG:
                with guard:
                    again = [(name, *piece, False) for piece in pieces_of(len(contents[name]))]
                    work.extend(again)
            if rng.random() < 0.05:
                writer.commit()

    together([put] * THREADS)
    writer.close()


def pieces_to_put(
    writer: PartialWriter, contents: dict[str, bytes], rng: random.Random
) -> list[tuple[str, int, int, bool]]:
    """What is missing, in any order: tensor, start, stop, and whether other bytes are put."""
    work = []
    for name in contents:
        left = writer.missing(name)
        if not left:
            writer.settle(name)
        lies = rng.random() < 0.15
        for start, stop in left * rng.choice((1, 1, 2)):
            work.append((name, start, stop, lies and rng.random() < 0.5))
    rng.shuffle(work)
    return work


def together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check(directory: Path, contents: dict[str, bytes]) -> frozenset[str]:
    """What is noted as complete, all of which is what it should be."""
    partial = read_partial(directory)
    assert partial is not None
    tensors = read_tensors(directory)
    for name in partial.complete:
        entry = tensors[name]
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            found = stream.read(entry.nbytes)
        assert found == contents[name], f"{name}: {'zeros' if not any(found) else 'other bytes'}"
    return partial.complete


def main(seed: int, rounds: int, directory: Path) -> None:
    rng = random.Random(seed)
    contents = make(directory, rng)
    killed = whole = 0
    for _ in range(rounds):
        pid, number = os.fork(), rng.randrange(1 << 30)
        if pid == 0:
            write(directory, contents, number)
            os._exit(0)
        if rng.random() < 0.9:
            time.sleep(rng.uniform(0.0, 0.06))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL), status
        killed += status == signal.SIGKILL
        complete = check(directory, contents)
        if len(complete) == len(contents):
            whole += 1
            shutil.rmtree(directory)
            contents = make(directory, rng)
    print(json.dumps({"killed": killed, "whole": whole}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
