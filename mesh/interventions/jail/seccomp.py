"""The system calls a job may make, as a classic BPF program; and the assembler it is built with.

Everything not listed fails with EPERM; what only an attack on the kernel would call ends the
process, and so does a call made through another architecture's entry. Knows nothing of jobs.
"""

from __future__ import annotations

import errno
import mmap
import struct

from mesh.interventions.jail.syscalls import Machine

_INSTRUCTION = struct.Struct("HBBI")
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_RET_ALLOW, _RET_ERRNO, _RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16

# In the order of how often a job makes them: the program is a list of comparisons.
# fmt: off
ALLOWED = (
    "futex", "recvfrom", "sendto", "read", "write", "munmap", "brk", "madvise", "clock_gettime",
    "fstat", "newfstatat", "stat", "lstat", "lseek", "close", "getdents64", "poll", "ppoll",
    "select", "pselect6", "readv", "writev", "recvmsg", "pread64", "mremap", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "sched_yield", "sched_getaffinity",
    "gettid", "getpid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getcwd", "uname",
    "access", "faccessat", "faccessat2", "statx", "dup", "dup2", "dup3",
    "nanosleep", "clock_nanosleep", "clock_getres", "gettimeofday", "time", "getrandom",
    "getrusage", "getrlimit", "sysinfo", "getcpu", "membarrier", "rseq", "set_robust_list",
    "set_tid_address", "restart_syscall", "shutdown", "exit", "exit_group",
)
KILLED = (
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "bpf",
    "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
    "add_key", "request_key", "keyctl", "unshare", "setns", "mount", "umount2", "pivot_root",
    "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "open_by_handle_at", "name_to_handle_at", "init_module", "finit_module",
    "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "iopl",
    "ioperm", "quotactl", "acct", "syslog", "settimeofday", "clock_settime", "adjtimex",
    "clock_adjtime", "fanotify_init", "personality", "io_setup", "pkey_mprotect", "seccomp",
)
# fmt: on
_CLOEXEC, _NONBLOCK, _NOCTTY = 0o2000000, 0o4000, 0o400
_MAP_HUGETLB = 0x40000
_FCNTL_ALLOWED = (1, 2, 3, 4, 1030)  # GETFD SETFD GETFL SETFL DUPFD_CLOEXEC
_FIONBIO, _FIOCLEX = 0x5421, 0x5451

Instruction = bytes
Block = list[Instruction]


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> Instruction:
    return _INSTRUCTION.pack(code, if_true, if_false, k & 0xFFFFFFFF)


def _allow() -> Block:
    return [_op(_RETURN, _RET_ALLOW)]


def _kill() -> Block:
    return [_op(_RETURN, _RET_KILL)]


def _fail(code: int) -> Block:
    return [_op(_RETURN, _RET_ERRNO | code)]


def _argument(index: int, *, high: bool = False) -> Instruction:
    return _op(_LOAD, _ARGS_AT + 8 * index + (4 if high else 0))


def _when_call(number: int, then: Block) -> Block:
    """`then` for this call; every path through it returns, so the number stays loaded after it."""
    return [_op(_EQUAL, number, 0, len(then)), *then]


def _refuse_bits(index: int, bits: int, code: int) -> Block:
    """Fail with `code` when the argument's low word has any of `bits`, else fall through."""
    return [_argument(index), _op(_ANY_BIT, bits, 0, 1), *_fail(code)]


def _only(index: int, values: tuple[int, ...], code: int) -> Block:
    """Allow when the argument's low word is one of `values`, fail with `code` otherwise."""
    tests = [_op(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [_argument(index), *tests, *_fail(code), *_allow()]


def _zero(index: int) -> Block:
    """Fail unless all 64 bits of the argument are zero: a pointer may have a zero low word."""
    words = []
    for high in (False, True):
        words += [_argument(index, high=high), _op(_EQUAL, 0, 1, 0), *_fail(errno.EPERM)]
    return words


def _conditional(machine: Machine, thread_group: int, *, may_open: bool) -> dict[str, Block]:
    readable = (
        _CLOEXEC | _NONBLOCK | _NOCTTY
        | machine.open_directory | machine.open_nofollow | machine.open_largefile
    )  # fmt: skip
    no_exec = _refuse_bits(2, mmap.PROT_EXEC, errno.EPERM)
    return {
        "mmap": [*no_exec, *_refuse_bits(3, _MAP_HUGETLB, errno.EPERM), *_allow()],
        "mprotect": [*no_exec, *_allow()],
        "openat": [*_refuse_bits(2, ~readable, errno.EACCES), *_allow()]
        if may_open
        else _fail(errno.EACCES),
        "prlimit64": [*_zero(0), *_zero(2), *_allow()],
        "tgkill": _only(0, (thread_group,), errno.EPERM),
        "fcntl": _only(1, _FCNTL_ALLOWED, errno.EPERM),
        "ioctl": _only(1, (_FIONBIO, _FIOCLEX), errno.ENOTTY),
        # The C library falls back to `clone`, which is refused like any unlisted call.
        "clone3": _fail(errno.ENOSYS),
    }


def program(machine: Machine, thread_group: int, *, may_open: bool) -> bytes:
    """The filter for one job's process.

    Args:
        machine: the architecture it runs on.
        thread_group: the job's own process id as it sees it: the only one it may signal (abort).
        may_open: read-only opens pass to the next wall; False where no such wall stands.
    """
    code: Block = [_op(_LOAD, _ARCH_AT), _op(_EQUAL, machine.audit_arch, 1, 0), *_kill()]
    code.append(_op(_LOAD, _NR_AT))
    if machine.x32_bit:
        code += [_op(_AT_LEAST, machine.x32_bit, 0, 1), *_kill()]
    for name in ALLOWED:
        if name in machine.calls:
            code += _when_call(machine.calls[name], _allow())
    for name, block in _conditional(machine, thread_group, may_open=may_open).items():
        code += _when_call(machine.calls[name], block)
    for name in KILLED:
        if name in machine.calls:
            code += _when_call(machine.calls[name], _kill())
    code += _fail(errno.EPERM)
    return b"".join(code)
