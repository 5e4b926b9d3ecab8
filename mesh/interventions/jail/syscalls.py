"""System call numbers of the two machines whose filter we can build. Data only.

x86-64: arch/x86/entry/syscalls/syscall_64.tbl. aarch64: include/uapi/asm-generic/unistd.h.
A call that is absent on a machine (aarch64 has no `open`, no `fork`) is absent from its table.
"""

from __future__ import annotations

from dataclasses import dataclass

# fmt: off
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "readv": 19, "writev": 20, "access": 21,
    "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33,
    "nanosleep": 35, "getpid": 39, "sendto": 44, "recvfrom": 45, "recvmsg": 47, "shutdown": 48,
    "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "gettimeofday": 96,
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "ptrace": 101, "getuid": 102, "syslog": 103,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "capset": 126,
    "sigaltstack": 131, "personality": 135, "pivot_root": 155, "adjtimex": 159, "chroot": 161,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "io_setup": 206, "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219,
    "clock_settime": 227, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "tgkill": 234, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "openat": 257, "newfstatat": 262, "faccessat": 269,
    "pselect6": 270, "ppoll": 271, "unshare": 272, "set_robust_list": 273, "dup3": 292,
    "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "getcpu": 309,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "seccomp": 317, "getrandom": 318, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "membarrier": 324, "pkey_mprotect": 329, "statx": 332, "rseq": 334, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "pidfd_getfd": 438, "faccessat2": 439, "mount_setattr": 442, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446,
}
_AARCH64 = {
    "io_setup": 0, "getcwd": 17, "dup": 23, "dup3": 24, "fcntl": 25, "ioctl": 29, "umount2": 39,
    "mount": 40, "pivot_root": 41, "faccessat": 48, "chroot": 51, "openat": 56, "close": 57,
    "quotactl": 60, "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65,
    "writev": 66, "pread64": 67, "pselect6": 72, "ppoll": 73, "newfstatat": 79,
    "fstat": 80, "acct": 89, "capset": 91, "personality": 92, "exit": 93, "exit_group": 94,
    "set_tid_address": 96, "unshare": 97, "futex": 98, "set_robust_list": 99, "nanosleep": 101,
    "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
    "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "syslog": 116,
    "ptrace": 117, "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
    "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "reboot": 142, "uname": 160, "getrlimit": 163, "getrusage": 165,
    "getcpu": 168, "gettimeofday": 169, "settimeofday": 170, "adjtimex": 171, "getpid": 172,
    "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
    "sysinfo": 179, "sendto": 206, "recvfrom": 207, "shutdown": 210, "recvmsg": 212, "brk": 214,
    "munmap": 215, "mremap": 216, "add_key": 217, "request_key": 218, "keyctl": 219, "mmap": 222,
    "swapon": 224, "swapoff": 225, "mprotect": 226, "madvise": 233, "perf_event_open": 241,
    "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "seccomp": 277, "getrandom": 278, "bpf": 280,
    "userfaultfd": 282, "membarrier": 283, "pkey_mprotect": 288, "statx": 291, "rseq": 293,
    "kexec_file_load": 294, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438, "faccessat2": 439,
    "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
# fmt: on


@dataclass(frozen=True)
class CpuArchitecture:
    """One architecture as the kernel names it, and the flags whose values differ between them."""

    audit_arch: int
    calls: dict[str, int]
    open_directory: int
    open_nofollow: int
    open_largefile: int
    x32_bit: int  # numbers from here on belong to another calling convention; 0: there is none


MACHINES = {
    "x86_64": CpuArchitecture(0xC000003E, _X86_64, 0o200000, 0o400000, 0o100000, 0x40000000),
    "aarch64": CpuArchitecture(0xC00000B7, _AARCH64, 0o40000, 0o100000, 0o400000, 0),
}
