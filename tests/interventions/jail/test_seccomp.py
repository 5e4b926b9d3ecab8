"""The system call filter, for both machines, run by an interpreter of BPF written down here."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.interventions.jail.seccomp import ALLOWED, KILLED, program
from mesh.interventions.jail.syscalls import MACHINES

ALLOW, KILL = "allow", "kill"
OWN = 4242
CONDITIONAL = {
    "mmap", "mprotect", "openat", "prlimit64", "tgkill", "fcntl", "ioctl", "clone3",
    # never called by a job; there for the set-up
    "capset", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self",
}  # fmt: skip


def decide(code: bytes, arch: int, number: int, *arguments: int) -> str | int:
    """What the kernel would do: ALLOW, KILL, or the error number."""
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *padded)
    at = accumulator = 0
    while True:
        op, if_true, if_false, k = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x06:
            action, detail = k & 0xFFFF0000, k & 0xFFFF
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(action, detail)
        else:
            taken = {
                0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)
            }[op]  # fmt: skip
            at += if_true if taken else if_false


@pytest.fixture(params=MACHINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(name: str, call: str | int, *arguments: int, may_open: bool = True) -> str | int:
    machine = MACHINES[name]
    number = machine.calls[call] if isinstance(call, str) else call
    code = program(machine, OWN, may_open=may_open)
    return decide(code, machine.audit_arch, number, *arguments)


def test_every_number_means_one_call(name: str) -> None:
    calls = MACHINES[name].calls
    assert len(set(calls.values())) == len(calls)
    listed = set(ALLOWED) | set(KILLED) | CONDITIONAL
    assert set(calls) <= listed
    assert listed - set(calls) <= (
        set() if name == "x86_64" else
        {"stat", "lstat", "poll", "select", "access", "dup2", "time", "iopl", "ioperm"}
    )  # fmt: skip


def test_listed_calls_pass_and_dangerous_ones_end_the_process(name: str) -> None:
    calls = MACHINES[name].calls
    assert {ask(name, call) for call in ALLOWED if call in calls} == {ALLOW}
    assert {ask(name, call) for call in KILLED if call in calls} == {KILL}


@given(number=st.integers(0, 2**32 - 1), arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_no_unlisted_call_passes(number: int, arguments: list[int]) -> None:
    for name, machine in MACHINES.items():
        known = {machine.calls[call] for call in (*ALLOWED, *CONDITIONAL) if call in machine.calls}
        if number not in known:
            assert ask(name, number, *arguments) in (errno.EPERM, KILL)


def test_other_conventions_end_the_process(name: str) -> None:
    code = program(MACHINES[name], OWN, may_open=True)
    for arch in (0x40000003, 0x40000028, 0, *(m.audit_arch for m in MACHINES.values())):
        if arch != MACHINES[name].audit_arch:
            assert decide(code, arch, 0) == KILL
    if name == "x86_64":
        assert ask(name, 0x40000000 | 39) == KILL


def test_memory_is_never_executable(name: str) -> None:
    for call in ("mmap", "mprotect"):
        assert ask(name, call, 0, 4096, 3, 0x22) == ALLOW
        for protection in (4, 5, 6, 7, 0x1000007):
            assert ask(name, call, 0, 4096, protection, 0x22) == errno.EPERM
    assert ask(name, "mmap", 0, 4096, 3, 0x40022) == errno.EPERM  # huge pages


def test_files_open_for_reading_only(name: str) -> None:
    machine = MACHINES[name]
    reading = 0o2000000 | machine.open_directory | machine.open_nofollow | machine.open_largefile
    assert ask(name, "openat", 0, 0, reading) == ALLOW
    for flag in (0o1, 0o2, 0o100, 0o1000, 0o2000, 0o20000000, 0o10000000, 0o20000):
        assert ask(name, "openat", 0, 0, flag) == errno.EACCES
    assert ask(name, "openat", 0, 0, 0, may_open=False) == errno.EACCES


def test_limits_may_be_read_but_not_set_nor_of_others(name: str) -> None:
    assert ask(name, "prlimit64", 0, 7, 0, 0x1000) == ALLOW
    assert ask(name, "prlimit64", 0, 7, 0x1000) == errno.EPERM
    assert ask(name, "prlimit64", 0, 7, 0x7_0000_0000) == errno.EPERM
    assert ask(name, "prlimit64", 1, 7, 0) == errno.EPERM


def test_signals_descriptors_and_devices(name: str) -> None:
    assert ask(name, "tgkill", OWN, OWN, 6) == ALLOW
    assert ask(name, "tgkill", OWN + 1, OWN, 6) == errno.EPERM
    assert ask(name, "fcntl", 1, 3) == ALLOW
    assert ask(name, "fcntl", 1, 8) == errno.EPERM  # F_SETOWN
    assert ask(name, "ioctl", 1, 0x5421) == ALLOW
    assert ask(name, "ioctl", 1, 0x5412) == errno.ENOTTY  # TIOCSTI
    assert ask(name, "clone3") == errno.ENOSYS
