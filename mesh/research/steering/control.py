"""Steering edits on this node: publish, list, remove, and resolve those that a request names.

The HTTP API's `mesh.api.services.SteeringControl`, and `Generations` that put edits in the place of
their names. Computes nothing.

The log holds what an edit is called, where it belongs and the hash of its file, never the file: a
vector of a 4096-wide model alone is as large as an event may be, and an event stays for ever with
every member. The file is fetched by its hash, from its author or whoever has fetched it before.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Sha256
from mesh.discovery.sightings import PeerState
from mesh.errors import BadSteering, DiskFull, NotFound, UntrustedPeer
from mesh.events.state import Fact
from mesh.events.types import STEERING_PUBLISHED
from mesh.hearth.hearth import Hearth
from mesh.hearth.network import Network
from mesh.models.edits import MAX_EDIT_BYTES, PARTS, Side, check_edits, parse_site, read_edit
from mesh.models.local import LocalModel, local_manifest
from mesh.models.manifest import Manifest
from mesh.paths import cache_dir
from mesh.research.steering.file_transfer import FileTransfer, Library
from mesh.types import Edit, GenerationRequest, ModelId, NodeId, Site, Steer

_NAME = re.compile(r"[\w][\w .:+-]{0,63}")
_Short = Annotated[str, Meta(max_length=512), codec.printable]


@dataclass(frozen=True, slots=True)
class Published:
    """An edit with a name. `size` bytes of file have the hash `sha256`."""

    name: Annotated[str, Meta(pattern=rf"\A{_NAME.pattern}\Z")]
    model_id: _Short
    weights_sha256: _Short
    path: _Short
    side: Side
    kind: _Short
    sha256: Sha256
    size: Annotated[int, Meta(ge=1, le=MAX_EDIT_BYTES)]

    def payload(self) -> dict[str, Any]:
        """What the event says."""
        return asdict(self)


def is_name(text: str) -> bool:
    """Whether an edit may be called that: a letter or digit first, 64 characters at most."""
    return _NAME.fullmatch(text) is not None


def read_fact(fact: Fact) -> tuple[Published, NodeId] | None:
    """The edit and its author; None when it was removed or is of a form nobody knows here."""
    try:
        published = codec.convert(fact.payload, Published)
    except Fault:
        return None
    return published, fact.author


class Steering:
    """The hearth's named steering edits: published to the log, fetched from peers, resolved for
    requests."""

    def __init__(
        self, network: Network, models: Mapping[ModelId, LocalModel], directory: Path
    ) -> None:
        self._network = network
        self._models = models
        self.library = Library(directory)
        self._keeping = asyncio.Lock()
        """Held while a file that nobody wants yet is brought in, and while others are deleted."""
        self._files = FileTransfer(self.library, network.send)
        network.on_file = self._files.receive

    def view(self) -> list[dict[str, Any]]:
        """Every published edit, by name."""
        hearth = self._network.require_hearth()
        return [
            {**published.payload(), "author": author, "author_name": _named(hearth, author)}
            for _, (published, author) in sorted(self._published(hearth).items())
        ]

    async def publish(
        self, name: str, model: str, path: str, side: str, tensors: bytes
    ) -> dict[str, Any]:
        """Publish an edit under a name; the newest of a name counts.

        Raises BadSteering naming the field, ModelNotFound, UntrustedPeer, DiskFull, and what
        publishing an event raises.
        """
        hearth = self._require_trusted()
        if not is_name(name):
            raise BadSteering(
                f"{name!r} cannot be the name of an edit.",
                fix="Begin with a letter or digit; use letters, digits, spaces and _.:+- only.",
                param="name",
            )
        manifest = await self._manifest(ModelId(model))
        site = _site(path, side, manifest)
        read = await asyncio.to_thread(read_edit, tensors)
        # Inside a layer other widths pass as well; the shard knows which.
        if site.part in PARTS and read.hidden_size != manifest.hidden_size:
            raise BadSteering(
                f"The edit is for hidden states of width {read.hidden_size}; those of {model} have"
                f" {manifest.hidden_size}.",
                fix="Make it from this model's activations.",
                param="tensors",
            )
        async with self._keeping:
            sha256 = await self._keep(tensors)
            weights = manifest.weights_sha256
            published = Published(name, model, weights, path, side, read.kind, sha256, len(tensors))
            await hearth.publish(STEERING_PUBLISHED, published.payload())
            await self._prune(hearth)
        return published.payload()

    async def remove(self, name: str) -> dict[str, Any]:
        """Take an edit back. Raises NotFound and UntrustedPeer."""
        hearth = self._require_trusted()
        if name not in self._published(hearth):
            raise NotFound(
                f"No steering edit is called {name!r}.", fix="See `hearthnet steer list`."
            )
        await hearth.publish(STEERING_PUBLISHED, {"name": name})
        async with self._keeping:
            await self._prune(hearth)
        return {"name": name, "removed": True}

    async def prepared(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the edits that it names. Raises as `resolve` does."""
        if not request.steer:
            return request
        edits = await self.resolve(request.model, request.steer)
        return replace(request, steer=(), edits=edits)

    async def resolve(self, model: ModelId, wanted: Sequence[Steer]) -> tuple[Edit, ...]:
        """The edits that a request for this model names, in its order.

        Raises BadSteering naming the field: no such edit, for other weights, or its file is nowhere
        to be had.
        """
        hearth = self._network.require_hearth()
        manifest = await self._manifest(model)
        found = self._published(hearth)
        edits = []
        for index, steer in enumerate(wanted):
            where = f"hearthnet.steer.{index}.name"
            if steer.name not in found:
                raise BadSteering(
                    f"{where}: no steering edit is called {steer.name!r}.",
                    fix="See `hearthnet steer list`.",
                    param=where,
                )
            published, author = found[steer.name]
            if published.weights_sha256 != manifest.weights_sha256:
                raise BadSteering(
                    f"{where}: {steer.name!r} was made for {published.model_id}, not for the"
                    f" weights of {model}.",
                    fix="Use it with that model, or publish one for this.",
                    param=where,
                )
            site = _site(published.path, published.side, manifest)
            edits.append(Edit(site, steer.strength, await self._file(published, author, where)))
        check_edits(edits)
        return tuple(edits)

    async def close(self) -> None:
        """Stop answering other members."""
        await self._files.close()

    # Private

    def _require_trusted(self) -> Hearth:
        hearth = self._network.require_hearth()
        if not hearth.may_serve(hearth.key.node_id):
            raise UntrustedPeer(
                "This node is not trusted to change how others' shards compute.",
                fix="Ask an anchor: `hearthnet members promote`.",
            )
        return hearth

    def _published(self, hearth: Hearth) -> dict[str, tuple[Published, NodeId]]:
        read = {name: read_fact(fact) for name, fact in hearth.log.state.steering().items()}
        return {name: one for name, one in read.items() if one is not None and one[0].name == name}

    async def _manifest(self, model: ModelId) -> Manifest:
        return await asyncio.to_thread(local_manifest, self._models, model, cache_dir())

    async def _file(self, published: Published, author: NodeId, where: str) -> bytes:
        data = await asyncio.to_thread(self.library.read, published.sha256)
        if data is not None:
            return data
        linked = [peer.node_id for peer in self._network.peers() if peer.state is PeerState.UP]
        peers = [author, *(node for node in linked if node is not None and node != author)]
        data = await self._files.fetch(published.sha256, published.size, peers)
        if data is None:
            raise BadSteering(
                f"{where}: no member that is here now has the file of {published.name!r}.",
                fix="Start the node that published it.",
                param=where,
            )
        await asyncio.to_thread(read_edit, data)
        async with self._keeping:
            await self._keep(data)
            await self._prune(self._network.require_hearth())
        return data

    # Of these two the caller holds `_keeping`.

    async def _keep(self, data: bytes) -> str:
        try:
            return await asyncio.to_thread(self.library.keep, data)
        except OSError as error:
            raise DiskFull(
                f"The edit cannot be written: {error.strerror}.",
                fix="Free some space in the state directory.",
            ) from error

    async def _prune(self, hearth: Hearth) -> None:
        wanted = {published.sha256 for published, _ in self._published(hearth).values()}
        await asyncio.to_thread(self.library.prune, wanted)


def _site(path: str, side: str, manifest: Manifest) -> Site:
    prefix, total_layers = manifest.layer_prefix, manifest.total_layers
    return parse_site(path, side, prefix, total_layers, manifest.weights)


def _named(hearth: Hearth, node: NodeId) -> str:
    member = hearth.roster.members.get(node) or hearth.roster.former.get(node)
    return member.name if member is not None else node
