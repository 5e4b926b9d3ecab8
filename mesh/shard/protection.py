"""The weights of a loaded span as read-only memory.

What lies in a mapped file stays there; what was made while loading is moved into pages of its own;
weights in oneDNN's layout stay where oneDNN put them, and of those the pages that hold nothing else
are protected; fbgemm's lie in memory that torch does not show. A write to any of the others ends
the process by SIGSEGV: that is the shard's failure, which its daemon and its askers know how to go
on after, and no wrong number leaves it first. Memory of CUDA and MPS devices cannot be protected;
there, and in what is packed out of reach, only `weight_check` notices.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import nn

from mesh.models.pages import PAGE_BYTES, Pages, set_writable
from mesh.shard.belongings import Belonging, belongings
from mesh.shard.packed import HalvedLinear, packed_memory

_ALIGNMENT = 64
"""As torch's own memory: kernels may give other last bits on memory that is aligned otherwise."""

MOST_PACKED = 16_000
"""Packed weights that are protected. Each has a mapping of its own then, and one more behind it;
Linux gives a process 65,530, and mixtures have tens of thousands of experts."""

Range = tuple[int, int]
"""Address and size in bytes."""


class Protection:
    """How much of a module's weights is read-only; `reason` says it to people.

    Keep it as long as the module: packed weights are freed by whoever allocated them, who writes to
    what it frees, so they become writable again when this goes, or the process ends.
    """

    def __init__(
        self,
        module: nn.Module,
        pages: WeakSet[Pages],
        *beside: nn.Module,
        most_packed: int = MOST_PACKED,
    ) -> None:
        """Moves the modules' tensors where it has to; nothing may compute with them meanwhile.

        `pages` are those that some of them lie in already; those they are moved to are added. Of
        packed weights the largest are protected, `most_packed` of them.
        """
        known = list(pages)
        modules = module, *beside
        fresh = _moved(_all(modules), _ranges(known))
        if fresh is not None:
            pages.add(fresh)
            known.append(fresh)
        owned = _all(modules)
        packed = [each.tensor for each in owned if packed_memory(each.tensor) is not None]
        inner = sorted({_inner_pages(tensor) for tensor in packed}, key=lambda area: -area[1])
        inner = [area for area in inner if area[1]][:most_packed]
        areas = [area for area in (*_ranges(known), *inner) if set_writable(*area, writable=False)]
        self.total_bytes, self.protected_bytes = _sizes(owned, areas)
        self.total_bytes += _hidden_bytes(module)
        weakref.finalize(self, _unprotect, inner, packed)

    @property
    def reason(self) -> str:
        """One line for the log and for `status`."""
        held, of = self.protected_bytes / 2**20, self.total_bytes / 2**20
        return f"weights read-only: {held:.1f} of {of:.1f} MiB"


def _all(modules: Sequence[nn.Module]) -> list[Belonging]:
    return [each for module in modules for each in belongings(module)]


def _hidden_bytes(module: nn.Module) -> int:
    """What lies in memory that torch does not show."""
    parts = (part for part in module.modules() if isinstance(part, HalvedLinear))
    return sum(part.weight_bytes for part in parts)


def _ranges(pages: Iterable[Pages]) -> list[Range]:
    return [(each.address, len(each)) for each in pages]


def _moved(owned: Sequence[Belonging], mapped: Sequence[Range]) -> Pages | None:
    """New pages with all tensors that lie in ordinary memory, which then lie there."""
    by_storage: dict[int, list[Belonging]] = defaultdict(list)
    for each in owned:
        tensor = each.tensor
        if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.nbytes:
            address = tensor.untyped_storage().data_ptr()
            if not _inside(address, mapped):
                by_storage[address].append(each)
    places, size = {}, 0
    for address, sharing in by_storage.items():
        places[address] = size + address % _ALIGNMENT
        size = places[address] + sharing[0].tensor.untyped_storage().nbytes()
        size += -size % _ALIGNMENT
    if not places:
        return None
    pages = Pages.empty(size)
    for address, sharing in by_storage.items():
        _move(sharing, pages, places[address])
    return pages


def _move(sharing: Sequence[Belonging], pages: Pages, offset: int) -> None:
    """Tensors of one storage."""
    old = sharing[0].tensor.untyped_storage()
    raw = pages.tensor(torch.uint8, (old.nbytes(),), offset)
    raw.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
    fresh: dict[int, torch.Tensor] = {}
    for each in sharing:
        tensor = each.tensor
        if id(tensor) not in fresh:
            moved = torch.empty(0, dtype=tensor.dtype)
            moved.set_(
                raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            fresh[id(tensor)] = moved
        if isinstance(tensor, nn.Parameter) or each.table is None:
            tensor.data = fresh[id(tensor)]
        else:
            each.table[each.key] = fresh[id(tensor)]


def _inner_pages(tensor: torch.Tensor) -> Range:
    """The pages that hold nothing but this packed weight."""
    address, size = packed_memory(tensor) or (0, 0)
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    stop = (address + size) // PAGE_BYTES * PAGE_BYTES
    return first, max(0, stop - first)


def _sizes(owned: Sequence[Belonging], areas: Sequence[Range]) -> tuple[int, int]:
    """Bytes of all tensors, and of those which lie in `areas`."""
    total = protected = 0
    whole = set(areas)
    for tensor in {id(each.tensor): each.tensor for each in owned}.values():
        packed = packed_memory(tensor)
        if packed is not None:
            total += packed[1]
            inner = _inner_pages(tensor)
            protected += inner[1] if inner in whole else 0
        elif tensor.layout is torch.strided:
            total += tensor.nbytes
            on_cpu = tensor.device.type == "cpu"
            protected += tensor.nbytes if on_cpu and _inside(tensor.data_ptr(), areas) else 0
    return total, protected


def _inside(address: int, areas: Iterable[Range]) -> bool:
    return any(start <= address < start + size for start, size in areas)


def _unprotect(ranges: Sequence[Range], packed: list[torch.Tensor]) -> None:
    for address, size in ranges:
        set_writable(address, size, writable=True)
    packed.clear()
