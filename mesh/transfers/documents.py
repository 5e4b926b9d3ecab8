"""What a node says about a checkpoint of which it holds at least a part: its document.

A document names every tensor with its hash, so that `weights_sha256` follows from it and whoever
asked for that hash need not believe the sender; the weights files with the sizes of their headers;
the small files with their hashes; and which tensors the sender has. As JSON of one object. Small
files are only those that are read as data: nothing that could be run is offered or taken. A GGUF
model has none: its config and tokenizer are in the headers of its files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, Sha256
from mesh.errors import SAME_VERSION, BadCheckpoint
from mesh.models.gguf.container import SUFFIX
from mesh.models.hashing import weights_sha256
from mesh.models.header import TensorEntry
from mesh.models.manifest import INDEX, Manifest
from mesh.models.pooling import MODULES, POOLING_CONFIG
from mesh.types import LayerRange

MAX_DOCUMENT_BYTES = 64 << 20
MAX_SMALL_BYTES = 64 << 20
"""Of one small file; the largest tokenizers have 35 MB."""
_MAX_ALL_SMALL_BYTES = 2 * MAX_SMALL_BYTES
"""They are all in memory before the first is on the disk."""
SMALL_FILES = frozenset(
    {
        "config.json", "generation_config.json", INDEX,
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
        "chat_template.json", MODULES, POOLING_CONFIG,
    }
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_TEMPLATE = re.compile(rf"{_TEMPLATES}/\w[\w.-]{{0,60}}\.jinja")
"""Where transformers looks for chat templates beside the usual one, such as `tool_use`."""
_MOST_TEMPLATES = 16
_WEIGHTS_FILE = re.compile(rf"[\w][\w.-]{{0,200}}(\.safetensors|{re.escape(SUFFIX)})")


def _is_small(name: str) -> None:
    if name not in SMALL_FILES and _TEMPLATE.fullmatch(name) is None:
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
    """A safetensors or GGUF file: its size, and where the tensors begin, behind its header."""

    name: Annotated[str, _is_weights]
    size: Int63
    header: Annotated[int, Meta(ge=8, le=MAX_SMALL_BYTES)]

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, whose header has config and tokenizer."""
        return self.name.endswith(SUFFIX)


@dataclass(frozen=True, slots=True)
class Document:
    """See the module. `origin` is ``org/name@commit``, '' where that is not known; with ``/FILE``
    behind it for a GGUF model. GGUF files are in the order of their parts."""

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
    weights = [
        WeightsFile(file.name, file.stat().st_size, header_end(manifest, file))
        for file in weights_files(manifest)
    ]
    return Document(
        1, manifest.model_id, manifest.weights_sha256, origin, manifest.total_layers, tensors,
        small_files(manifest), tuple(weights),
    )  # fmt: skip


def weights_files(manifest: Manifest) -> Sequence[Path]:
    """All files of weights; those of a GGUF model in the order of its parts."""
    return list(manifest.heads) or sorted({entry.file for entry in manifest.tensors.values()})


def header_end(manifest: Manifest, file: Path) -> int:
    """Where the tensors of one of its files begin. Blocks."""
    known = manifest.heads.get(file)
    return 8 + int.from_bytes(_beginning(file, 8), "little") if known is None else known


def files_sha256(manifest: Manifest) -> str:
    """What tells config and tokenizer from others of the same weights, in hex. Blocks."""
    if manifest.gguf is None:
        return sha256_of_small(small_files(manifest))
    return sha256_of_headers(_beginning(file, end) for file, end in manifest.heads.items())


def sha256_of_small(small: Iterable[SmallFile]) -> str:
    """`files_sha256` of a checkpoint with these. The index is left out: it says how tensors are
    spread over files, which their hashes prove."""
    return _sha256_of({file.name: file.sha256 for file in small if file.name != INDEX})


def sha256_of_headers(headers: Iterable[bytes]) -> str:
    """`files_sha256` of a GGUF model whose files begin so, in the order of its parts. What they are
    called does not matter."""
    hashes = enumerate(hashlib.sha256(header).hexdigest() for header in headers)
    return _sha256_of({f"{number}{SUFFIX}": sha256 for number, sha256 in hashes})


def _sha256_of(hashes: Mapping[str, str]) -> str:
    """The hash over ``["<name>","<hex sha256>"]\\n`` of each, in ascending order of names, as
    `mesh.models.hashing` has it of tensors."""
    total = hashlib.sha256()
    for name in sorted(hashes):
        fields = json.dumps([name, hashes[name]], separators=(",", ":"))
        total.update(fields.encode("ascii") + b"\n")
    return total.hexdigest()


def small_files(manifest: Manifest) -> tuple[SmallFile, ...]:
    """Those that are there and may be fetched. Blocks."""
    small: list[SmallFile] = []
    for name in sorted(small_names(manifest)):
        file = manifest.directory / name
        if file.is_file() and file.stat().st_size <= MAX_SMALL_BYTES:
            data = file.read_bytes()
            small.append(SmallFile(name, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(small)


def small_names(manifest: Manifest) -> frozenset[str]:
    """What small files of it may be called; what lies beside a GGUF file is none of it. Blocks."""
    if manifest.gguf is not None:
        return frozenset()
    templates = (manifest.directory / _TEMPLATES).glob("*.jinja")
    return SMALL_FILES | small_among(f"{_TEMPLATES}/{file.name}" for file in templates)


def small_among(names: Iterable[str]) -> frozenset[str]:
    """Those that small files of a checkpoint may be called."""
    found = frozenset(names)
    templates = sorted(name for name in found if _TEMPLATE.fullmatch(name))
    return frozenset([*(found & SMALL_FILES), *templates[:_MOST_TEMPLATES]])


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
            fix=SAME_VERSION,
        ) from fault
    entries = [
        TensorEntry(each.name, Path(), each.dtype, each.shape, 0, 0, each.sha256)
        for each in document.tensors
    ]
    names = {each.name for each in document.tensors}
    if len(names) != len(entries) or weights_sha256(entries) != wanted_sha256:
        raise BadCheckpoint(
            f"What was said to be checkpoint {wanted_sha256[:12]} is another one.", fix=SAME_VERSION
        )
    kinds = {file.is_gguf for file in document.weights}
    if len(kinds) != 1 or (True in kinds and document.small):
        raise BadCheckpoint(
            "The description of a checkpoint names neither safetensors nor GGUF files alone.",
            fix=SAME_VERSION,
        )
    _require_bounded(document)
    return document


def _require_bounded(document: Document) -> None:
    """Raise BadCheckpoint where more would be read than a checkpoint has, before its tensors."""
    files = [small.name for small in document.small] + [file.name for file in document.weights]
    heads = sum(file.header for file in document.weights)
    small = sum(file.size for file in document.small)
    names = {file.name for file in document.small}
    is_odd = len(set(files)) != len(files) or names != small_among(names)
    if is_odd or heads > MAX_SMALL_BYTES or small > _MAX_ALL_SMALL_BYTES:
        raise BadCheckpoint(
            f"The description of a checkpoint names {len(files)} files, {len(set(files))} of them"
            f" different, whose headers have {heads} bytes, and {small} bytes of small files; the"
            f" limits are {MAX_SMALL_BYTES} and {_MAX_ALL_SMALL_BYTES}.",
            fix="Ask another node.",
        )


def wanted_tensors(
    manifest: Manifest, layers: tuple[LayerRange, ...] | None, *, ends: bool
) -> list[str]:
    """The names of the tensors of these layers and of the ends, ends first; None for all there is.
    Those that are settings are always among them.

    Raises BadCheckpoint for layers that the model does not have.
    """
    names = [entry.name for entry in manifest.settings_tensors()]
    names += [entry.name for entry in manifest.ends_tensors()] if ends or layers is None else []
    if layers is None:
        return names + [name for name in manifest.tensors if name not in set(names)]
    for span in layers:
        names += [entry.name for entry in manifest.layer_tensors(span)]
    return list(dict.fromkeys(names))


def complete_layers(
    manifest: Manifest, complete: frozenset[str]
) -> tuple[tuple[LayerRange, ...], bool]:
    """The layers all of whose tensors are among these, and whether the ends' are."""
    prefix = manifest.layer_prefix
    lacking = {
        name.removeprefix(prefix).partition(".")[0]
        for name in manifest.tensors
        if name.startswith(prefix) and name not in complete
    }
    layers = (layer for layer in range(manifest.total_layers) if str(layer) not in lacking)
    return LayerRange.runs(layers), all(entry.name in complete for entry in manifest.ends_tensors())


def _beginning(file: Path, size: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(size)
