"""Harvests: what modules put out while a session computes, written to this node's own disk.

Every module of a batch gets a safetensors file of its own. Rows are copied where they are computed
and written by one thread; a session whose disk does not keep up is answered later, so that what
waits to be written is bounded by a few of its steps. A file has its name only once it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from mesh.errors import BadRequest, DiskFull, MeshError
from mesh.models.harvest import MAX_MODULES, HarvestBatch
from mesh.shard.hooks import Hook
from mesh.shard.packed import Packed
from mesh.types import LayerRange, NodeId, Site

if TYPE_CHECKING:
    from mesh.shard.runtime import Runtime

logger = logging.getLogger(__name__)

UNDER_WAY = 2
"""Steps of a session that may wait for the disk while it computes on."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DRAFT = ".tmp"


class HarvestShelf:
    """Where harvests lie on this node, and how much of its disk they get."""

    def __init__(self, directory: Path, limit_bytes: int, own: NodeId) -> None:
        """`limit_bytes` is for other members' harvests; those of `own`, this node, take what they
        need."""
        self.directory = directory
        self._limit_bytes = limit_bytes
        self._own = own
        self._writer = ThreadPoolExecutor(1, "shard-harvest")
        self.reserved_bytes = 0
        self._is_swept = False

    def recording(self, batch: HarvestBatch, peer: NodeId) -> Recording:
        """What writes one batch for `peer`."""
        return Recording(self, batch, is_own=peer == self._own)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the writing thread do something, after what it was given before."""
        return self._writer.submit(work)

    def close(self) -> None:
        """Let the writing thread end after what it has to do."""
        self._writer.shutdown(wait=False)

    # In the writing thread.

    def reserve(self, size: int, *, is_own: bool) -> None:
        """Set `size` bytes aside, or give them back if negative. Raises DiskFull."""
        if not self._is_swept:  # what an earlier process left half-written
            for draft in self.directory.glob(f"*/*{_DRAFT}"):
                draft.unlink(missing_ok=True)
            self._is_swept = True
        if size > 0 and not is_own:
            if self._limit_bytes <= 0:
                raise DiskFull(
                    "This node gives no disk to harvests.",
                    fix="Set research.distributed_inference.host.harvest_mb there.",
                )
            used = sum(file.stat().st_size for file in self.directory.glob("*/*.safetensors"))
            if used + self.reserved_bytes + size > self._limit_bytes:
                raise DiskFull(
                    f"Harvests take {used >> 20} MiB here, {size >> 20} MiB more were asked for;"
                    f" the limit is {self._limit_bytes >> 20} MiB.",
                    fix=f"Delete old runs in {self.directory}, or raise harvest_mb.",
                )
        self.reserved_bytes += size

    def release(self, size: int) -> None:
        """The opposite of `reserve`."""
        self.reserved_bytes -= size


@dataclass(slots=True)
class ModuleFile:
    """A safetensors file that grows row by row; its header, which comes first, knows how many.

    `width` and `dtype` are taken from the first rows.
    """

    module: str
    path: Path
    expected_rows: int
    stream: BinaryIO = field(init=False)
    digest: Any = field(default_factory=hashlib.sha256)
    rows: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32

    def open(self) -> None:
        self.stream = self.path.open("wb")

    def size_with(self, tensor: torch.Tensor) -> int:
        """Bytes of values, when all rows are like the tensor's."""
        return self.expected_rows * tensor.shape[2] * tensor.dtype.itemsize

    def begin(self, like: torch.Tensor) -> None:
        """Write the header."""
        self.width, self.dtype = like.shape[2], like.dtype
        layout = {
            "dtype": _DTYPES[self.dtype],
            "shape": (self.expected_rows, self.width),
            "data_offsets": [0, self.size_with(like)],
        }
        header = json.dumps({self.module: layout}).encode()
        header += b" " * (-len(header) % 8)
        self._write(len(header).to_bytes(8, "little") + header)

    def append(self, tensor: torch.Tensor) -> None:
        """Rows (1, rows, width) on the host. Raises BadRequest for more than were announced."""
        if self.rows + tensor.shape[1] > self.expected_rows:
            raise BadRequest(
                f"More rows of {self.module} came than the {self.expected_rows} announced.",
                fix="Run the batch again.",
            )
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(raw.data)
        self.rows += tensor.shape[1]

    def finish(self, stem: str) -> dict[str, Any]:
        """Give the file its name; what an index says of it."""
        if self.rows != self.expected_rows:
            raise BadRequest(
                f"{self.rows} rows of {self.module} came, {self.expected_rows} were announced.",
                fix="Run the batch again.",
            )
        self.stream.flush()
        os.fsync(self.stream.fileno())
        size = self.stream.tell()
        self.stream.close()
        sha256 = self.digest.hexdigest()
        final = self.path.with_name(f"{stem}{sha256[:16]}.safetensors")
        for earlier in self.path.parent.glob(f"{stem}*.safetensors"):
            if earlier != final:
                earlier.unlink()
        self.path.replace(final)
        return {
            "module": self.module,
            "file": f"{final.parent.name}/{final.name}",
            "rows": self.rows,
            "width": self.width,
            "dtype": _DTYPES[self.dtype],
            "bytes": size,
            "sha256": sha256,
        }

    def discard(self) -> None:
        """Whatever the disk says: it may be the reason."""
        with contextlib.suppress(OSError):
            self.stream.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        self.stream.write(data)
        self.digest.update(data)


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Copies what passes."""

    site: Site
    module: str
    passed: dict[str, list[torch.Tensor]]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passed[self.module].append(hidden.detach().to("cpu", copy=True))
        return hidden


class Recording:
    """One session's batch. `start` first, `keep` after every step, then `seal` or `abort`."""

    def __init__(self, shelf: HarvestShelf, batch: HarvestBatch, *, is_own: bool) -> None:
        self._shelf = shelf
        self._batch = batch
        self._is_own = is_own
        self._files: dict[str, ModuleFile] = {}
        self._reserved = 0
        self._file_bytes = 0
        self._passed: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._under_way = 0
        self._waiting: Callable[[], None] | None = None
        self._error: MeshError | None = None
        self._ended = False

    async def start(self, runtime: Runtime, layers: LayerRange) -> tuple[Hook, ...]:
        """Open the files; what has to be called while the session computes.

        Raises DiskFull, and BadRequest for more modules than one session may write.
        """
        sites = {
            path: Site(layer, part)
            for layer in range(layers.start, layers.stop)
            for part, module in runtime.layer(layer).named_modules()
            if (path := self._batch.module(layer, part)) and _computes_with_weights(module)
        }
        if len(sites) > MAX_MODULES:
            raise BadRequest(
                f"The pattern covers {len(sites)} modules of one node; {MAX_MODULES} are allowed.",
                fix="Narrow it, and harvest in several runs.",
                param="module",
            )
        row_bytes = runtime.row_size * runtime.dtype.itemsize
        await asyncio.wrap_future(
            self._shelf.submit(lambda: self._guarded(lambda: self._open(sites, row_bytes)))
        )
        return tuple(Tap(site, path, self._passed) for path, site in sites.items())

    def keep(self, rows: int, then: Callable[[], None]) -> None:
        """Write the last `rows` that passed; `then` is called now, or once the disk has kept up.

        What passed before them is of a step that was begun again, or failed. A failure to write
        shows when the recording is sealed.
        """
        passed = [(module, last_rows(tensors, rows)) for module, tensors in self._passed.items()]
        self._passed.clear()
        if not rows or not passed or self._error is not None or self._ended:
            then()
            return
        self._under_way += 1
        loop = asyncio.get_running_loop()
        future = self._shelf.submit(lambda: self._guarded(lambda: self._append(passed)))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._written, done))
        if self._under_way < UNDER_WAY:
            then()
        else:
            self._waiting = then

    async def seal(self) -> list[dict[str, Any]]:
        """Every file is whole and on the disk when this returns: what the index says of each.

        Raises DiskFull, and BadRequest when other than the announced rows came.
        """
        if self._ended:
            raise BadRequest("The batch is sealed already.", fix="Open another session.")
        self._ended = True
        work = self._shelf.submit(lambda: self._guarded(self._finish))
        files: list[dict[str, Any]] = await asyncio.wrap_future(work)
        return files

    def abort(self) -> None:
        """The session ends: what is not sealed by now is deleted."""
        self._ended = True
        self._waiting = None
        self._shelf.submit(self._discard)

    # Private

    def _written(self, done: Future[None]) -> None:
        self._under_way -= 1
        error = done.exception()
        if error is not None and not isinstance(error, MeshError):
            logger.error("a harvest was not written", exc_info=error)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    # In the writing thread.

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self._error = DiskFull(
                f"A harvest cannot be written: {error.strerror}.",
                fix="Free some space in the state directory of that node.",
            )
            self._discard()
            raise self._error from error
        except MeshError as error:
            self._error = error
            self._discard()
            raise

    def _open(self, sites: Iterable[str], row_bytes: int) -> None:
        """Files for modules whose rows take `row_bytes` until the first one shows their width."""
        if self._ended:
            raise BadRequest("The session was closed meanwhile.", fix="Open another one.")
        self._file_bytes = self._batch.rows * row_bytes
        self._reserve(len([*sites]) * self._file_bytes)
        folder = self._shelf.directory / self._batch.run
        for module in sites:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = folder / f"{self._batch.stem(module)}{id(self):x}{_DRAFT}"
            file = ModuleFile(module, draft, self._batch.rows)
            file.open()
            self._files[module] = file

    def _append(self, passed: list[tuple[str, list[torch.Tensor]]]) -> None:
        # A failure before has deleted the files.
        rows = [(self._files[module], each) for module, each in passed if module in self._files]
        new = [(file, tensors[0]) for file, tensors in rows if not file.width]
        if more := sum(file.size_with(first) - self._file_bytes for file, first in new):
            self._reserve(more)
        for file, first in new:
            file.begin(first)
        for file, tensors in rows:
            for tensor in tensors:
                file.append(tensor)

    def _reserve(self, size: int) -> None:
        self._shelf.reserve(size, is_own=self._is_own)
        self._reserved += size

    def _finish(self) -> list[dict[str, Any]]:
        if self._error is not None:
            raise self._error
        sealed = [f.finish(self._batch.stem(module)) for module, f in self._files.items()]
        self._files.clear()
        self._discard()
        return sealed

    def _discard(self) -> None:
        for file in self._files.values():
            file.discard()
        self._files.clear()
        self._shelf.release(self._reserved)
        self._reserved = 0


def last_rows(tensors: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Those at the end that have `rows` rows together."""
    first = len(tensors)
    while first and rows > 0:
        first -= 1
        rows -= tensors[first].shape[1]
    return tensors[first:]


def _computes_with_weights(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.ModuleList):
        return False
    if next(module.parameters(), None) is not None:
        return True
    return any(isinstance(each, Packed) for each in module.modules())
