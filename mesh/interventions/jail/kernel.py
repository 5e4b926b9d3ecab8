"""The kernel calls that Python has no function for: prctl, Landlock, seccomp, namespaces.

Each raises OSError when the kernel refuses. What to call when is lockdown's business.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from functools import cache
from pathlib import Path

from mesh.interventions.jail.syscalls import MACHINES, CpuArchitecture

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_CAPABILITY_VERSION_3 = 0x20080522
_NEW_NAMESPACES = {
    "user": 0x10000000, "mount": 0x20000, "network": 0x40000000, "ipc": 0x08000000,
    "pid": 0x20000000, "uts": 0x04000000,
}  # fmt: skip

_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
_O_PATH = getattr(os, "O_PATH", 0)
_LANDLOCK_NET = 0b11  # bind and connect over TCP
_LANDLOCK_SCOPES = 0b11  # abstract unix sockets and signals
_LANDLOCK_VERSION_FLAG, _LANDLOCK_RULE_PATH_BENEATH = 1, 1


def machine() -> CpuArchitecture | None:
    """The running architecture, if Linux and one whose filter we can build."""
    return MACHINES.get(platform.machine()) if sys.platform == "linux" else None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    """One prctl with a single argument."""
    libc = _libc()
    unused = ctypes.c_ulong(0)
    _check(libc.prctl(option, ctypes.c_ulong(value), unused, unused, unused), f"prctl {option}")


def syscall(here: CpuArchitecture, name: str, *arguments: object) -> int:
    """A raw system call; arguments are ints or ctypes objects."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(int(_libc().syscall(ctypes.c_long(here.calls[name]), *passed)), name)


def drop_capabilities(here: CpuArchitecture) -> None:
    """Give up every capability, also those a later exec could bring back."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one, or no right to change a set that stays without effect
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    syscall(here, "capset", header, ctypes.create_string_buffer(24))


def landlock_abi(here: CpuArchitecture) -> int:
    """The kernel's Landlock version; 0 when it has none."""
    try:
        return syscall(here, "landlock_create_ruleset", None, 0, _LANDLOCK_VERSION_FLAG)
    except OSError:
        return 0


def landlock(here: CpuArchitecture, abi: int, readable: tuple[str, ...]) -> None:
    """Deny every file right except reading below `readable`; TCP and foreign signals as well."""
    file_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack(
        "=QQQ", file_rights, _LANDLOCK_NET if abi >= 4 else 0, _LANDLOCK_SCOPES if abi >= 6 else 0
    )[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = syscall(here, "landlock_create_ruleset", attributes, len(attributes), 0)
    for path in readable:
        fd = os.open(path, _O_PATH | os.O_CLOEXEC)
        rights = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if Path(path).is_dir() else 0)
        rule = struct.pack("=Qi", rights, fd)
        syscall(here, "landlock_add_rule", rules, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(fd)
    syscall(here, "landlock_restrict_self", rules, 0)
    os.close(rules)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def install_filter(here: CpuArchitecture, code: bytes) -> None:
    """Put a BPF program between this process and the kernel, for all its threads and for good."""
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    syscall(
        here, "seccomp", _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(filter_)
    )


def enter_namespaces(here: CpuArchitecture) -> None:
    """Move into own user, mount, network, ipc, pid and uts namespaces.

    The caller must be single-threaded; the pid namespace begins with its next child.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = 0
    for flag in _NEW_NAMESPACES.values():
        flags |= flag
    syscall(here, "unshare", flags)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"65534 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"65534 {gid} 1", encoding="ascii")
