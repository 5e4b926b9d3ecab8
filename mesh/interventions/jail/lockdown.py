"""Walling in the process that is about to run a stranger's code. One way; no part is undone.

Each wall stands without the others and none of them needs a privilege. Which of them really hold
is not this module's to say: the doctor attacks them.
"""

from __future__ import annotations

import os
import resource
import signal
import site
import sys
import sysconfig
from pathlib import Path

from mesh.interventions.jail import kernel, seccomp
from mesh.interventions.jail.limits import JobLimits
from mesh.processes.nursery import close_all_but

_PACKAGE_ROOT = str(Path(__file__).parent.parent.parent)


def readable_paths() -> tuple[str, ...]:
    """What a job may read: the interpreter's own library, the installed packages, and hearthnet.

    A checkout that is merely on `sys.path` is not part of it.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    wanted = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), _PACKAGE_ROOT]
    found = {Path(path).resolve() for path in wanted}
    return tuple(sorted(str(path) for path in found if path.exists()))


def lock_down(keep: set[int], limits: JobLimits, readable: tuple[str, ...]) -> None:
    """Wall this process in. Single-threaded, right after the fork.

    Args:
        keep: the file descriptors that stay; all others are closed.
        limits: bounds for the rest of the process's life.
        readable: the paths below which files may be read.
    Raises OSError when a wall that this kernel has cannot be put up; the process must then end.
    """
    os.setsid()
    os.umask(0o077)
    close_all_but(keep)
    _bound_resources(limits)
    here = kernel.machine()
    if here is None:
        return
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities(here)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    abi = kernel.landlock_abi(here)
    if abi:
        kernel.landlock(here, abi, readable)
    # Without Landlock nothing tells one path from another, so no file is opened at all.
    kernel.install_filter(here, seccomp.program(here, os.getpid(), may_open=abi > 0))


def _bound_resources(limits: JobLimits) -> None:
    bounds = {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if sys.platform == "linux":
        bounds["RLIMIT_AS"] = _mapped_bytes() + limits.memory_bytes
        # The first process to go when the machine runs out of memory.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for name, bound in bounds.items():
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            value = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(number, (value, value))


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
