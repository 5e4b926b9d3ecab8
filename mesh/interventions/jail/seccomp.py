"""The system calls a job may make, as a classic BPF program.

Everything not listed fails with EPERM; what only an attack on the kernel would call ends the
process, and so does a call made through another architecture's entry. Knows nothing of jobs.
"""

from __future__ import annotations

import errno
import mmap

from mesh.interventions.jail import bpf
from mesh.interventions.jail.bpf import Block
from mesh.interventions.jail.syscalls import CpuArchitecture

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


def _conditional(
    machine: CpuArchitecture, thread_group: int, *, may_open: bool
) -> dict[str, Block]:
    readable = (
        _CLOEXEC | _NONBLOCK | _NOCTTY
        | machine.open_directory | machine.open_nofollow | machine.open_largefile
    )  # fmt: skip
    no_exec = bpf.refuse_bits(2, mmap.PROT_EXEC, errno.EPERM)
    return {
        "mmap": [*no_exec, *bpf.refuse_bits(3, _MAP_HUGETLB, errno.EPERM), *bpf.allow()],
        "mprotect": [*no_exec, *bpf.allow()],
        "openat": [*bpf.refuse_bits(2, ~readable, errno.EACCES), *bpf.allow()]
        if may_open
        else bpf.fail(errno.EACCES),
        "prlimit64": [*bpf.zero(0), *bpf.zero(2), *bpf.allow()],
        "tgkill": bpf.only(0, (thread_group,), errno.EPERM),
        "fcntl": bpf.only(1, _FCNTL_ALLOWED, errno.EPERM),
        "ioctl": bpf.only(1, (_FIONBIO, _FIOCLEX), errno.ENOTTY),
        # The C library falls back to `clone`, which is refused like any unlisted call.
        "clone3": bpf.fail(errno.ENOSYS),
    }


def program(machine: CpuArchitecture, thread_group: int, *, may_open: bool) -> bytes:
    """The filter for one job's process.

    Args:
        machine: the architecture it runs on.
        thread_group: the job's own process id as it sees it: the only one it may signal (abort).
        may_open: read-only opens pass to the next wall; False where no such wall stands.
    """
    code: Block = [
        bpf.op(bpf.LOAD, bpf.ARCH_AT),
        bpf.op(bpf.EQUAL, machine.audit_arch, 1, 0),
        *bpf.kill(),
    ]
    code.append(bpf.op(bpf.LOAD, bpf.NR_AT))
    if machine.x32_bit:
        code += [bpf.op(bpf.AT_LEAST, machine.x32_bit, 0, 1), *bpf.kill()]
    for name in ALLOWED:
        if name in machine.calls:
            code += bpf.when_call(machine.calls[name], bpf.allow())
    for name, block in _conditional(machine, thread_group, may_open=may_open).items():
        code += bpf.when_call(machine.calls[name], block)
    for name in KILLED:
        if name in machine.calls:
            code += bpf.when_call(machine.calls[name], bpf.kill())
    code += bpf.fail(errno.EPERM)
    return b"".join(code)
