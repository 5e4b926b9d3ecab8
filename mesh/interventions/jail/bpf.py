"""An assembler of classic BPF, for filters of system calls: blocks of instructions.

A filter looks at a call's number, its architecture and its arguments (`struct seccomp_data`), and
returns what becomes of it. Knows no call by name.
"""

from __future__ import annotations

import errno
import struct

_INSTRUCTION = struct.Struct("HBBI")
# linux/bpf_common.h
LOAD, EQUAL, AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_RET_ALLOW, _RET_ERRNO, _RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
NR_AT, ARCH_AT, _ARGS_AT = 0, 4, 16
"""Where number, architecture and arguments are."""

Instruction = bytes
Block = list[Instruction]


def op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> Instruction:
    """One instruction; the jumps are how many instructions are passed over."""
    return _INSTRUCTION.pack(code, if_true, if_false, k & 0xFFFFFFFF)


def allow() -> Block:
    """The call is made."""
    return [op(_RETURN, _RET_ALLOW)]


def kill() -> Block:
    """The process ends."""
    return [op(_RETURN, _RET_KILL)]


def fail(code: int) -> Block:
    """The call fails with this errno."""
    return [op(_RETURN, _RET_ERRNO | code)]


def argument(index: int, *, high: bool = False) -> Instruction:
    """Load the argument's low word, or its high one."""
    return op(LOAD, _ARGS_AT + 8 * index + (4 if high else 0))


def when_call(number: int, then: Block) -> Block:
    """`then` for this call; every path through it returns, so the number stays loaded after it."""
    return [op(EQUAL, number, 0, len(then)), *then]


def refuse_bits(index: int, bits: int, code: int) -> Block:
    """Fail with `code` when the argument's low word has any of `bits`, else fall through."""
    return [argument(index), op(_ANY_BIT, bits, 0, 1), *fail(code)]


def only(index: int, values: tuple[int, ...], code: int) -> Block:
    """Allow when the argument's low word is one of `values`, fail with `code` otherwise."""
    tests = [op(EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [argument(index), *tests, *fail(code), *allow()]


def zero(index: int) -> Block:
    """Fail with EPERM unless all 64 bits of the argument are zero.

    Of a pointer the low word alone may be zero.
    """
    words = []
    for high in (False, True):
        words += [argument(index, high=high), op(EQUAL, 0, 1, 0), *fail(errno.EPERM)]
    return words
