"""Records on disk: read as earlier versions wrote them; what is something else is refused."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mesh.codec import MAX_FILE_BYTES, Fault, read_file
from mesh.errors import BadRequest, StorageFull
from mesh.interventions.jobs.order import JobOrder, pack_hops, unpack_hops
from mesh.interventions.jobs.queue.records import JobRecords
from mesh.interventions.jobs.queue.types import Job, Status, Submission
from mesh.pipeline.watch.sanity import Envelope
from mesh.pipeline.wire_dtype import WireVerdict, read_verdict
from mesh.research.harvest.index import HarvestIndex, HarvestPlan
from mesh.runtime import DaemonRecord, read_daemon
from mesh.types import LayerRange, ModelId, Principal, WireDtype
from tests.test_formats import GOLDEN

DAMAGE = [
    "", "[]", "{", "7", "\x00", '"text"', "[" * 10_000, '{"norms": {"4": NaN}}',
    '{"norms": {"4": Infinity}}', '{"norms": {"-4": 1.0}}', '{"norms": {"4": "1.0"}}',
    '{"norms": [1.0]}', '{"dtype": "int3", "reason": ""}', '{"dtype": "fp16", "reason": 3}',
]  # fmt: skip
PLAN = HarvestPlan("m", "model.layers.*", "ab" * 32, 100, 2)
JOB = Job(
    "j1",
    Submission(
        Principal.parse("local:anonymous"), ModelId("m"), True, False,
        {"attn_implementation": "eager"}, True,
    ),
    12.5, Status.COMPLETED, "done", 2, 13.5, 7, 9, {"wall_s": 1.0},
)  # fmt: skip


def kept(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_what_was_found_out_about_a_checkpoint(tmp_path: Path) -> None:
    kept(tmp_path / "wire-dtype" / "w.json", GOLDEN["file.wire_dtype"])
    kept(tmp_path / "envelope" / "w.json", GOLDEN["file.envelope"])
    verdict = WireVerdict(WireDtype.BF16, "fp16: 3 tensors overflow; bf16: fine")
    assert read_verdict(tmp_path, "w") == verdict
    envelope = Envelope.read(tmp_path, "w")
    assert envelope.is_known
    envelope.write(tmp_path, "again")
    assert (tmp_path / "envelope" / "again.json").read_text() == GOLDEN["file.envelope"]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_cache_is_found_out_again(tmp_path: Path, text: str) -> None:
    kept(tmp_path / "wire-dtype" / "w.json", text)
    kept(tmp_path / "envelope" / "w.json", text)
    assert read_verdict(tmp_path, "w") is None
    assert not Envelope.read(tmp_path, "w").is_known


def test_the_record_of_a_daemon(tmp_path: Path) -> None:
    file = kept(tmp_path / "daemon.json", GOLDEN["file.daemon"])
    record = read_file(file, DaemonRecord)
    assert record == DaemonRecord(
        7, 1700000000.25, "http://127.0.0.1:1", 1, 2, "hn_key", False, 2.5, None, "", "https://a:1"
    )
    record.write(tmp_path / "again.json")
    written = json.loads((tmp_path / "again.json").read_text())
    more = {"boot": "", "log": "", "holds_none": False}
    assert written == {**json.loads(GOLDEN["file.daemon"]), **more}
    alive = replace(record, pid=os.getpid(), create_time=psutil.Process().create_time())
    alive.write(file)
    assert read_daemon(file) == alive
    file.write_text(json.dumps({**json.loads(file.read_text()), "api_port": "1"}))
    assert read_daemon(file) is None


def test_a_harvest_is_taken_up_where_an_earlier_version_left_it(tmp_path: Path) -> None:
    kept(tmp_path / "harvest.json", GOLDEN["file.harvest"])
    kept(tmp_path / "batches" / "000001.json", GOLDEN["file.harvest_batch"])
    index = HarvestIndex(tmp_path, PLAN)
    assert index.done() == {1}
    assert index.finish(2).read_text() == GOLDEN["file.harvest_index"]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("harvest.json", "version", "1"),
        ("batches/000001.json", "prompts", [{"line": 3}]),
        ("batches/000001.json", "files", ["a"]),
        ("batches/000001.json", "weights_sha256", None),
    ],
)
def test_a_damaged_harvest_is_named(tmp_path: Path, name: str, field: str, value: object) -> None:
    kept(tmp_path / "harvest.json", GOLDEN["file.harvest"])
    kept(tmp_path / "batches" / "000001.json", GOLDEN["file.harvest_batch"])
    fields = json.loads((tmp_path / name).read_text())
    kept(tmp_path / name, json.dumps({**fields, field: value}))
    with pytest.raises(BadRequest, match="is damaged"):
        HarvestIndex(tmp_path, PLAN)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = kept(tmp_path / "large.json", " " * MAX_FILE_BYTES + "{}")
    with pytest.raises(Fault, match="more than"):
        read_file(file, DaemonRecord)


def test_the_order_of_a_job() -> None:
    packed = bytes.fromhex(GOLDEN["job.order"])
    assert JobOrder(True, "eager", False).pack(b"request") == packed
    assert JobOrder.unpack(packed) == (JobOrder(True, "eager", False), b"request")
    hops = [LayerRange(0, 4), LayerRange(6, 8)]
    assert pack_hops(hops) == GOLDEN["job.hops"]
    assert unpack_hops(GOLDEN["job.hops"]) == tuple(hops)
    with pytest.raises(Fault):
        JobOrder.unpack(packed.replace(b"\xc3", b"\x07"))
    with pytest.raises(Fault):
        unpack_hops('[["0", 4]]')


async def test_a_row_of_the_table_of_jobs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    await (await JobRecords.open(path)).close()
    with sqlite3.connect(path) as connection:
        places = ", ".join("?" * 15)
        connection.execute(f"INSERT INTO jobs VALUES (1, {places})", GOLDEN["job.row"])  # noqa: S608
    connection.close()
    records = await JobRecords.open(path)
    try:
        assert await records.find("j1") == JOB
        await records.add(replace(JOB, job_id="j2"))
        assert await records.find("j2") == replace(JOB, job_id="j2")
    finally:
        await records.close()


@pytest.mark.parametrize(
    "damage", ["status = 'LOST'", "env = '['", "meta = '[]'", "owner = 'x'", "attempts = 'many'"]
)
async def test_a_damaged_row_is_an_error_of_the_table(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "jobs.db"
    records = await JobRecords.open(path)
    try:
        await records.add(JOB)
        with sqlite3.connect(path) as connection:
            connection.execute(f"UPDATE jobs SET {damage}")  # noqa: S608
        connection.close()
        with pytest.raises(StorageFull, match="cannot be used"):
            await records.find("j1")
    finally:
        await records.close()
