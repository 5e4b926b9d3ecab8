"""What is free is the least of what the machine and each control group say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mesh.processes.headroom import control_groups, oom_kills, ram
from tests.cgroups import limited_group

MB = 1 << 20


class Machine:
    """The files of a kernel, as far as they are read."""

    def __init__(self, root: Path) -> None:
        self.process = root / "proc" / "self"
        self.groups = root / "cgroup"
        self.process.mkdir(parents=True)

    def mounted(self, kind: str, inside: str = "/", *, path: str, options: str = "rw") -> None:
        number = "0::" if kind == "cgroup2" else "4:memory:"
        (self.process / "cgroup").write_text(f"9:name=systemd:/\n{number}{path}\n")
        (self.process / "mountinfo").write_text(
            f"22 1 0:20 / /proc rw,relatime - proc proc rw\n"
            f"35 31 0:32 {inside} {self.groups} rw,relatime shared:1 - {kind} {kind} {options}\n"
        )

    def group(self, path: str, **files: object) -> None:
        directory = self.groups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_tightest_group_on_the_way_to_the_root_counts(machine: Machine) -> None:
    machine.mounted("cgroup2", path="/user/app/hearthnet")
    machine.group("user", max="max", current=10 * MB)
    stat = f"anon {60 * MB}\nactive_file {20 * MB}\ninactive_file {10 * MB}\nfile_mapped {5 * MB}"
    machine.group("user/app", max=100 * MB, current=90 * MB, stat=stat)
    machine.group("user/app/hearthnet", max=1000 * MB, current=50 * MB, stat="")
    found = ram(machine.process)
    assert (found.free_mb, found.total_mb) == (100 - 90 + 20 + 10 - 5, 100)
    assert found.bound == f"the limit of control group {machine.groups / 'user' / 'app'}"
    assert [path.name for path, _ in control_groups(machine.process)] == [
        "hearthnet", "app", "user", "cgroup",
    ]  # fmt: skip


def test_no_more_than_the_smallest_group_holds_is_there_in_all(machine: Machine) -> None:
    machine.mounted("cgroup2", path="/app")
    machine.group("", max=300 * MB, current=290 * MB, stat="")
    machine.group("app", max=200 * MB, current=100 * MB, stat="")
    found = ram(machine.process)
    assert (found.free_mb, found.total_mb) == (10, 200)


def test_where_a_group_is_slowed_before_its_limit_that_counts(machine: Machine) -> None:
    machine.mounted("cgroup2", path="/app")
    machine.group("app", max="max", high=200 * MB, current=150 * MB, stat="")
    assert (ram(machine.process).free_mb, ram(machine.process).total_mb) == (50, 200)
    machine.group("app", max=300 * MB, high="max")
    assert ram(machine.process).free_mb == 150
    machine.group("app", max="max")
    assert ram(machine.process).bound == "memory of this machine"


def test_version_one_is_read_as_well(machine: Machine) -> None:
    machine.mounted("cgroup", path="/box", options="rw,memory")
    unlimited = 9223372036854771712
    machine.group("", limit_in_bytes=unlimited, usage_in_bytes=1)
    stat = f"inactive_file 0\ntotal_inactive_file {8 * MB}\ntotal_mapped_file {2 * MB}"
    machine.group(
        "box", limit_in_bytes=64 * MB, usage_in_bytes=60 * MB, stat=stat,
        oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 7",
    )  # fmt: skip
    assert ram(machine.process).free_mb == 4 + 8 - 2
    assert oom_kills(machine.process) == 7


def test_a_container_sees_its_own_group_as_the_root(machine: Machine) -> None:
    machine.mounted("cgroup2", "/kube/pod", path="/kube/pod/app")
    machine.group("", max=50 * MB, current=0, events="low 0\noom 1\noom_kill 3")
    machine.group("app", max="max", current=0, events="oom_kill 2")
    assert ram(machine.process).free_mb == 50
    assert oom_kills(machine.process) == 2
    machine.mounted("cgroup2", "/kube/pod", path="/../elsewhere")
    assert ram(machine.process).free_mb == 50


def test_without_groups_the_machine_counts(machine: Machine) -> None:
    found = ram(machine.process)
    assert found.total_mb == psutil.virtual_memory().total >> 20
    assert 0 < found.free_mb <= found.total_mb
    assert oom_kills(machine.process) is None
    (machine.process.parent / "vmstat").write_text("nr_free 1\noom_kill 5\n")
    assert oom_kills(machine.process) == 5


@pytest.fixture
def group() -> Iterator[Path]:
    with limited_group(200) as directory:
        yield directory


def test_a_real_group_bounds_and_kills(group: Path) -> None:
    script = (
        "import os, pathlib, sys; from mesh.processes.headroom import *\n"
        f"(pathlib.Path({str(group)!r}) / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "found = ram()\n"
        "print(found.free_mb <= 200 == found.total_mb, found.bound.endswith(sys.argv[1]),"
        " oom_kills(), flush=True)\n"
        "hog = bytearray(400 << 20)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, group.name],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert run.stdout.split() == ["True", "True", "0"], run.stderr
    assert run.returncode == -9
    files = (group / "memory.events", group / "memory.oom_control")
    text = "".join(file.read_text() for file in files if file.exists())
    assert "oom_kill 1" in text
