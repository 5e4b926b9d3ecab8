"""A disk like a USB stick's, for a process that may mount none: without hard links, and its
permissions are what they are."""

from __future__ import annotations

import errno

from mesh.interventions.jail import bpf, kernel

_NO_NEW_PRIVILEGES = 38
_CALLS = {  # link, linkat; chmod, fchmod, fchmodat, fchmodat2
    "x86_64": ((86, 265), (90, 91, 268, 452)),
    "aarch64": ((37,), (52, 53, 452)),
}
ARCHITECTURES = tuple(_CALLS)


def live_on_one(architecture: str) -> None:
    """From now on and for good."""
    here = kernel.machine()
    assert here is not None
    links, modes = _CALLS[architecture]
    code = [bpf.op(bpf.LOAD, bpf.NR_AT)]
    for call in links:
        code += bpf.when_call(call, bpf.fail(errno.EPERM))
    for call in modes:
        code += bpf.when_call(call, bpf.fail(0))  # is done, and changes nothing
    kernel.prctl(_NO_NEW_PRIVILEGES, 1)
    kernel.install_filter(here, b"".join(code + bpf.allow()))
