"""What a node says about a checkpoint of which it holds at least a part: its document.

A document names every tensor with its hash, so that `weights_sha256` follows from it and whoever
asked for that hash need not believe the sender; the weights files with the sizes of their headers;
the small files with their hashes; and which tensors the sender has. As JSON of one object. Small
files are only those that are read as data: nothing that could be run is offered or taken.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, Sha256
from mesh.errors import BadCheckpoint
from mesh.models.hashing import weights_sha256
from mesh.models.header import MAX_HEADER_BYTES, TensorEntry
from mesh.models.manifest import Manifest
from mesh.types import LayerRange

_INDEX = "model.safetensors.index.json"
MAX_DOCUMENT_BYTES = 64 << 20
MAX_SMALL_BYTES = 64 << 20
"""Of one small file; the largest tokenizers have 35 MB."""
SMALL_FILES = frozenset(
    {
        "config.json", "generation_config.json", _INDEX,
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
        "chat_template.json",
    }
)  # fmt: skip
_WEIGHTS_FILE = re.compile(r"[\w][\w.-]{0,200}\.safetensors")
_FIX = "Run the same hearthnet version on both machines."


def _is_small(name: str) -> None:
    if name not in SMALL_FILES:
        raise ValueError("is not a file of a checkpoint that may be fetched")


def _is_weights(name: str) -> None:
    if _WEIGHTS_FILE.fullmatch(name) is None:
        raise ValueError("is not the name of a weights file")


@dataclass(frozen=True, slots=True)
class TensorSaid:
    """One tensor, as `TensorEntry` has it; `here`: whether the sender has its bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Annotated[str, Meta(max_length=16)]
    shape: tuple[Int63, ...]
    sha256: Sha256
    here: bool


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file that is fetched whole."""

    name: Annotated[str, _is_small]
    size: Annotated[int, Meta(ge=0, le=MAX_SMALL_BYTES)]
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file: its size, and where its header ends, the length before it included."""

    name: Annotated[str, _is_weights]
    size: Int63
    header: Annotated[int, Meta(ge=8, le=MAX_HEADER_BYTES + 8)]


@dataclass(frozen=True, slots=True)
class Document:
    """See the module. `origin` is ``org/name@commit``, '' where that is not known."""

    version: Literal[1]
    model_id: Annotated[str, Meta(min_length=1, max_length=512)]
    weights_sha256: Sha256
    origin: Annotated[str, Meta(max_length=512)]
    total_layers: Annotated[int, Meta(ge=1, le=10_000)]
    tensors: tuple[TensorSaid, ...]
    small: tuple[SmallFile, ...]
    weights: tuple[WeightsFile, ...]

    @property
    def here(self) -> frozenset[str]:
        """The tensors that its sender has."""
        return frozenset(tensor.name for tensor in self.tensors if tensor.here)


def document_of(manifest: Manifest, origin: str, complete: frozenset[str] | None) -> Document:
    """What is said of a checkpoint here; `complete` names the tensors of a partial one. Blocks."""
    tensors = tuple(
        TensorSaid(
            entry.name, entry.dtype, entry.shape, entry.sha256,
            entry.present if complete is None else entry.name in complete,
        )
        for entry in manifest.tensors.values()
    )  # fmt: skip
    files = {entry.file for entry in manifest.tensors.values()}
    return Document(
        1, manifest.model_id, manifest.weights_sha256, origin, manifest.total_layers, tensors,
        small_files(manifest.directory), tuple(map(_weights_file, sorted(files))),
    )  # fmt: skip


def files_sha256(small: Iterable[SmallFile]) -> str:
    """What tells config and tokenizer from others of the same weights, in hex.

    The hash over ``["<name>","<hex sha256>"]\\n`` of each, in ascending order of names, as
    `mesh.models.hashing` has it of tensors. The index is left out: it says how tensors are spread
    over files, which their hashes prove.
    """
    total = hashlib.sha256()
    for file in sorted(small, key=lambda file: file.name):
        if file.name != _INDEX:
            fields = json.dumps([file.name, file.sha256], separators=(",", ":"))
            total.update(fields.encode("ascii") + b"\n")
    return total.hexdigest()


def small_files(directory: Path) -> tuple[SmallFile, ...]:
    """Those that are there and may be fetched. Blocks."""
    small = []
    for name in sorted(SMALL_FILES):
        file = directory / name
        if file.is_file() and file.stat().st_size <= MAX_SMALL_BYTES:
            data = file.read_bytes()
            small.append(SmallFile(name, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(small)


def encode(document: Document) -> bytes:
    """For the wire."""
    return json.dumps(codec.plain(document), separators=(",", ":")).encode()


def decode(text: bytes, wanted_sha256: str) -> Document:
    """The document of the checkpoint that was asked for; its tensors' hashes prove that it is.

    Raises BadCheckpoint for anything else.
    """
    try:
        document = codec.convert(codec.parse_json(text), Document)
    except Fault as fault:
        raise BadCheckpoint(
            f"{fault.field or 'It'} in the description of a checkpoint is unusable: {fault.why}.",
            fix=_FIX,
        ) from fault
    entries = [
        TensorEntry(each.name, Path(), each.dtype, each.shape, 0, 0, each.sha256)
        for each in document.tensors
    ]
    names = {each.name for each in document.tensors}
    if len(names) != len(entries) or weights_sha256(entries) != wanted_sha256:
        raise BadCheckpoint(
            f"What was said to be checkpoint {wanted_sha256[:12]} is another one.", fix=_FIX
        )
    return document


def wanted_tensors(
    manifest: Manifest, layers: tuple[LayerRange, ...] | None, *, ends: bool
) -> list[str]:
    """The names of the tensors of these layers and of the ends, ends first; None for all there is.

    Raises BadCheckpoint for layers that the model does not have.
    """
    names = [entry.name for entry in manifest.ends_tensors()] if ends or layers is None else []
    if layers is None:
        return names + [name for name in manifest.tensors if name not in set(names)]
    for span in layers:
        names += [entry.name for entry in manifest.layer_tensors(span)]
    return list(dict.fromkeys(names))


def complete_layers(manifest: Manifest, complete: frozenset[str]) -> tuple[tuple[int, ...], bool]:
    """The layers all of whose tensors are among these, and whether the ends' are."""
    prefix = manifest.layer_prefix
    lacking = {
        name.removeprefix(prefix).partition(".")[0]
        for name in manifest.tensors
        if name.startswith(prefix) and name not in complete
    }
    layers = tuple(layer for layer in range(manifest.total_layers) if str(layer) not in lacking)
    return layers, all(entry.name in complete for entry in manifest.ends_tensors())


def _weights_file(file: Path) -> WeightsFile:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    return WeightsFile(file.name, file.stat().st_size, 8 + length)
