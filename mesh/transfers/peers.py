"""The peers that a fetch asks: links to those that advertise the checkpoint, kept and renewed.

What a peer says of a checkpoint is believed as far as its hashes prove it, see `documents`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mesh.errors import BadCheckpoint, MeshError, TransferFailed
from mesh.models.gguf.container import header_of_beginning
from mesh.models.gguf.contents import settings_of
from mesh.models.header import TensorEntry
from mesh.models.manifest import read_manifest
from mesh.models.partial import JOURNAL, PartialRecord, journal_of
from mesh.models.partial_draft import SparseFile, create_partial
from mesh.processes.tasks import end, spawn
from mesh.transfers import documents
from mesh.transfers.asking import Peer, WeightsLink
from mesh.transfers.commands import PeerHolding
from mesh.transfers.documents import Document, WeightsFile
from mesh.transfers.fetching import Fetch
from mesh.types import NodeId
from mesh.wire.messages import Part

logger = logging.getLogger(__name__)

_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Dial = Callable[[PeerHolding], Awaitable[WeightsLink]]
"""A link to the node; raises ConnectFailed and its kin, UntrustedPeer when another one answers."""


def agreed_files(having: Sequence[PeerHolding]) -> str:
    """The `files_sha256` that more than half of those say who say one; '' where nobody does.

    The weights' hash does not prove config and tokenizer, and one node alone could give others.
    Raises BadCheckpoint where no answer has so many.
    """
    saying = [(p.node_name, p.held.files_sha256) for p in having if p.held.files_sha256]
    said = Counter(files for _, files in saying)
    if not said:
        return ""
    files, count = said.most_common(1)[0]
    if 2 * count <= said.total():
        names = ", ".join(f"{name} ({files[:12]})" for name, files in saying)
        raise BadCheckpoint(
            f"Nodes have other configs or tokenizers with the same weights: {names}.",
            fix="Make the files beside the weights equal, or stop the node whose files are wrong.",
        )
    return files


@dataclass(frozen=True, slots=True)
class Said:
    """All of a checkpoint but its tensors; `complete` names those that are here with the rest."""

    document: Document
    sparse: dict[str, SparseFile]
    small: dict[str, bytes]
    complete: set[str]


async def hear(sha256: str, peer: PeerHolding, dial: Dial, files_sha256: str) -> Said:
    """What this peer says of the checkpoint.

    Raises BadCheckpoint for what is not the checkpoint, or has another `files_sha256` than this
    (see `agreed_files`), and what the link raises.
    """
    link = await dial(peer)
    try:
        document = await _document(link, sha256)
        is_gguf = document.weights[0].is_gguf
        headers = {
            file.name: b"".join(await link.ask(sha256, Part.HEADER, file.name, 0, file.header))
            for file in document.weights
        }
        if is_gguf:
            found = await asyncio.to_thread(documents.sha256_of_headers, headers.values())
        else:
            found = documents.sha256_of_small(document.small)
        if files_sha256 not in ("", found):
            raise BadCheckpoint(
                f"{peer.node_name} has another config or tokenizer than the other nodes.",
                fix="Ask another node, or make the files beside the weights equal.",
            )
        small = {file.name: await _small(link, sha256, file) for file in document.small}
        sparse, complete = dict[str, SparseFile](), set[str]()
        for file in document.weights:
            settings = await _settings(link, document, file, headers[file.name])
            complete |= {entry.name for entry in settings}
            pieces = {entry.offset: content for entry, content in settings.items()}
            sparse[file.name] = SparseFile(headers[file.name], file.size, pieces)
    finally:
        link.close("it is known now what there is")
    return Said(document, sparse, small, complete)


async def _settings(
    link: WeightsLink, document: Document, file: WeightsFile, header: bytes
) -> dict[TensorEntry, bytes]:
    """The tensors of a GGUF file that are read with its header."""
    if not file.is_gguf:
        return {}
    read = await asyncio.to_thread(header_of_beginning, Path(file.name), header, file.size)
    if read is None:
        raise BadCheckpoint(f"{file.name} begins otherwise than was said.", fix="Ask another node.")
    sha256 = {each.name: each.sha256 for each in document.tensors}
    found = {}
    for entry in settings_of(read):
        asked = link.ask(document.weights_sha256, Part.TENSOR, entry.name, 0, entry.nbytes)
        content = found[entry] = b"".join(await asked)
        if hashlib.sha256(content).hexdigest() != sha256.get(entry.name):
            raise BadCheckpoint(
                f"{entry.name} is not what was said of it.", fix="Ask another node."
            )
    return found


def create(directory: Path, said: Said) -> None:
    """Make the partial checkpoint of it, without a tensor. Blocks. Raises BadCheckpoint, DiskFull,
    and UnsupportedFamily for weights that are stored quantised."""
    document, complete = said.document, said.complete
    tensors = {each.name: each.sha256 for each in document.tensors}
    record = PartialRecord(1, document.model_id, document.weights_sha256, document.origin, tensors)
    journal = {JOURNAL: journal_of(tensors, complete)} if complete else {}
    create_partial(directory, record, said.sparse, said.small | journal)
    try:
        read_manifest(directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)  # else it would be taken for what it is not
        raise


async def _document(link: WeightsLink, sha256: str) -> Document:
    text = await link.document(sha256)
    return await asyncio.to_thread(documents.decode, text, sha256)


async def _small(link: WeightsLink, sha256: str, file: documents.SmallFile) -> bytes:
    data = b"".join(await link.ask(sha256, Part.FILE, file.name, 0, file.size))
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise BadCheckpoint(f"{file.name} is not what was said of it.", fix="Ask another node.")
    return data


class PeerSources:
    """Feeds a fetch with those who have what it wants; `update`, then `close`."""

    def __init__(self, sha256: str, fetch: Fetch, dial: Dial) -> None:
        self._sha256 = sha256
        self._fetch = fetch
        self._dial = dial
        self._peers: dict[NodeId, PeerHolding] = {}
        self._news: dict[NodeId, asyncio.Event] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}

    def update(self, peers: Sequence[PeerHolding]) -> None:
        """These advertise something of the checkpoint now, and nobody else does."""
        now = {peer.node: peer for peer in peers if peer.held.weights_sha256 == self._sha256}
        for node in self._peers.keys() - now.keys():
            self._tasks.pop(node).cancel()
            self._fetch.leave(node)
        for node, peer in now.items():
            if node not in self._tasks:
                self._peers[node], self._news[node] = peer, asyncio.Event()
                self._tasks[node] = spawn(self._use(node), f"fetch from {peer.node_name}")
            elif peer != self._peers[node]:
                self._peers[node] = peer
                self._news[node].set()
        self._peers = now

    async def close(self) -> None:
        """Ask nobody any more."""
        await end(self._tasks.values())
        for node in self._tasks:
            self._fetch.leave(node)
        self._tasks.clear()

    async def _use(self, node: NodeId) -> None:
        failures = given = 0
        while node not in self._fetch.liars:
            name = self._peers[node].node_name
            try:
                await self._stay(node)
            except MeshError as error:
                self._fetch.leave(node)
                self._fetch.note(name, error.message)
                logger.info("peer=%s gives no weights now: %s", name, error)
            if (given_by_now := self._fetch.meter.given_by(node)) > given:
                failures, given = 0, given_by_now  # the link was of use
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def _stay(self, node: NodeId) -> NoReturn:
        """Be linked to it until it fails, which is raised."""
        peer, news = self._peers[node], self._news[node]
        link = await self._dial(peer)
        try:
            document = await _document(link, self._sha256)
            failed: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()

            def on_error(error: MeshError) -> None:
                if not failed.done():
                    failed.set_result(error)

            source = Peer(peer.node_name, link, self._sha256)
            self._fetch.join(node, source, document.here, on_error)
            while True:
                told: asyncio.Future[Any] = asyncio.ensure_future(news.wait())
                either: list[asyncio.Future[Any]] = [told, failed]
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    told.cancel()
                if failed.done():
                    raise failed.result()
                news.clear()
                self._fetch.learn(node, (await _document(link, self._sha256)).here)
        finally:
            link.close("the fetch has ended")


def nobody(model: str, errors: dict[str, str]) -> TransferFailed:
    """The error of a fetch that found no peer to ask."""
    tried = "".join(f" {name}: {why}" for name, why in errors.items())
    return TransferFailed(
        f"No node that is up can give {model}.{tried}",
        fix="Start a node that has it, or pull it from the hub.",
    )
