"""A GGUF file, or several that are one model, as a checkpoint of transformers: config and tensors.

Reads headers, and of the tensors only those few that are settings. Never imports torch or
transformers: the daemon reads checkpoints, and the daemon computes nothing.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh.errors import BadCheckpoint, ModelNotFound
from mesh.models.gguf.architecture import Architecture
from mesh.models.gguf.architectures import ARCHITECTURES
from mesh.models.gguf.container import SUFFIX, GgufHeader, Long, read_gguf_header
from mesh.models.gguf.rotary import SIDE_TENSORS
from mesh.models.gguf.settings import GgufSettings, unreadable
from mesh.models.header import CheckpointContents, Difference, TensorEntry

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_OF_LAYER = re.compile(
    r"blk\.(?P<layer>\d{1,5})\.(?P<part>(shortconv\.)?\w+)(\.(?P<kind>weight|bias|scale))?"
)
_OF_ENDS = re.compile(r"(?P<part>\w+)\.(?P<kind>weight|bias)")
_NUMBERED = re.compile(r"blk\.(\d{1,5})\.")
_PROJECTOR = "mmproj"
"""What the names of files have in them that hold the part of a model that looks at pictures."""

_MAX_EXPERTS = 4096
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_MAX_SETTING_BYTES = 1 << 20
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PARTS_AGAIN = "Download all files of the model again, from the same place."


def model_name(file: Path) -> str:
    """What a model is called that is a file: as the file, without what says that it is one."""
    part = _PART.fullmatch(file.name)
    return part["stem"] if part else file.name.removesuffix(SUFFIX)


def parts_of(file: Path) -> list[Path]:
    """The files of the model that this is, or is a part of, in their order."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    stem, count = part["stem"], part["count"]
    numbers = range(1, int(count) + 1)
    return [file.with_name(f"{stem}-{each:05}-of-{count}.gguf") for each in numbers]


def settings_of(header: GgufHeader) -> list[TensorEntry]:
    """The tensors of a file that are read with its metadata. BadCheckpoint for large ones."""
    found = [entry for name, entry in header.tensors.items() if name in SIDE_TENSORS]
    for entry in found:
        if entry.nbytes > _MAX_SETTING_BYTES:
            raise BadCheckpoint(
                f"{header.file} cannot be used: tensor {entry.name}, a setting, has"
                f" {entry.nbytes} bytes; the limit is {_MAX_SETTING_BYTES}.",
                fix="Download the file again.",
            )
    return found


def is_projector(name: str) -> bool:
    """Whether a file of this name holds the part of a model that looks at pictures."""
    return _PROJECTOR in name


def only_model(directory: Path) -> Path | None:
    """The GGUF file of a directory, the first of several that are one model; None when it has none.

    Raises BadCheckpoint when it has several models.
    """
    files = [each for each in directory.glob(f"[!.]*{SUFFIX}") if not is_projector(each.name)]
    models: dict[str, Path] = {}
    for file in sorted(files):
        models.setdefault(model_name(file), file)
    if len(models) > 1:
        raise BadCheckpoint(
            f"{directory} holds {len(models)} models: {', '.join(list(models)[:8])}.",
            fix=f"Name the file: --model {shlex.quote(str(next(iter(models.values()))))}.",
        )
    return next(iter(models.values()), None)


def read_gguf(file: Path) -> CheckpointContents:
    """Read the model that `file` is, or is a part of.

    Raises ModelNotFound, BadCheckpoint when a file cannot be used, and UnsupportedFamily, with the
    reason, for models that are not read from GGUF.
    """
    headers = [read_gguf_header(each) for each in _files(file)]
    first = headers[0]
    metadata = first.metadata
    kind = str(metadata.get("general.architecture", ""))
    if metadata.get("general.type", "model") != "model" or kind not in ARCHITECTURES:
        what = metadata.get("general.type", "model")
        why = "only these are: " + ", ".join(sorted(ARCHITECTURES))
        raise unreadable(file, kind, why if what == "model" else f"it holds a {str(what)[:40]}")
    stored = _joined(headers)
    architecture = ARCHITECTURES[kind]
    said = GgufSettings(first.file, kind, metadata, stored)
    config, pooling_type = architecture.config(said), said.whole("pooling_type", 0)
    said.require_all_read()
    _require_embedded(first, int(config["vocab_size"]))
    tensors: dict[str, TensorEntry] = {}
    guessing = range(said.layers(), said.blocks())
    for entry in stored.values():
        if (number := _NUMBERED.match(entry.name)) and int(number[1]) in guessing:
            continue
        for named in _named(entry, architecture, config, kind):
            if named.name in tensors:
                raise unreadable(file, kind, f"it holds {named.name} twice")
            tensors[named.name] = named
    tensors |= _listed(first, architecture, said.layers())
    ids, heads = _ids(metadata), {header.file: header.end for header in headers}
    ends = tuple(ids["eos_token_id"])
    return CheckpointContents(heads, config | ids, tensors, ends, pooling_type)


def _files(file: Path) -> list[Path]:
    files = parts_of(file)
    for each in files:
        if not each.is_file():
            if each == file:
                raise ModelNotFound(f"{file} is not there.", fix="Give the file of a model.")
            raise BadCheckpoint(f"{each} is missing beside {file.name}.", fix=_PARTS_AGAIN)
    return files or [file]


def _joined(headers: list[GgufHeader]) -> dict[str, TensorEntry]:
    first = headers[0]
    tensors: dict[str, TensorEntry] = {}
    for number, header in enumerate(headers):
        said = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
        if said != (number, len(headers)) and said != (0, 0):
            raise BadCheckpoint(
                f"{header.file} says that it is part {said[0]} of {said[1]}, counted from 0;"
                f" its name says {number} of {len(headers)}.",
                fix=_PARTS_AGAIN,
            )
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise BadCheckpoint(
                f"{header.file} holds tensor {twice[0]} once more.", fix=_PARTS_AGAIN
            )
        tensors |= header.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise BadCheckpoint(
            f"{first.file} and its other parts hold {len(tensors)} tensors; it says {expected}.",
            fix=_PARTS_AGAIN,
        )
    return tensors


def _named(
    entry: TensorEntry, architecture: Architecture, config: Mapping[str, Any], kind: str
) -> Iterator[TensorEntry]:
    """The tensors that a stored one is in the model: one, or as many as there are experts."""
    if entry.name in SIDE_TENSORS:
        yield entry
        return
    found = _OF_LAYER.fullmatch(entry.name) or _OF_ENDS.fullmatch(entry.name)
    part = "" if found is None else found["part"]
    of_layer = found is not None and found.re is _OF_LAYER
    names = architecture.layer if of_layer else architecture.ends
    before = f"{architecture.layers}{int(found['layer'])}." if found and of_layer else ""
    stack = _stack(architecture, part, config, of_layer=of_layer)
    if found and stack is not None and found["kind"] != "scale":
        name, count = stack
        rank = 1 if of_layer and part in architecture.stacks else 2
        yield from _apart(entry, f"{before}{name}.{found['kind']}", count, rank)
        return
    own = None if found is None else _name(names, part, found["kind"])
    if found is None or own is None:
        raise unreadable(entry.file, kind, f"it holds a tensor {entry.name}, which is unknown")
    unlike = architecture.unlike(part, config)
    if found["kind"] == "bias" and unlike is not None and not unlike.moves_rows:
        unlike = None
    _require_fits(entry, unlike)
    shape = unlike.changed(entry.shape) if unlike else entry.shape
    shape = _of_dimensions(shape, architecture.dimensions.get(part, len(shape)))
    yield replace(entry, name=before + own, shape=shape, unlike=unlike)


def _of_dimensions(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The same numbers in so many dimensions, as `Architecture.dimensions` says."""
    if count == 1:
        return (math.prod(shape),)
    while len(shape) > count and shape[0] == 1:
        shape = shape[1:]
    if len(shape) + 1 == count:
        return (*shape[:-1], 1, shape[-1])
    return (1,) * (count - len(shape)) + shape if len(shape) > 1 else shape


def _listed(header: GgufHeader, architecture: Architecture, layers: int) -> dict[str, TensorEntry]:
    """The tensors that are numbers of lists in the header."""
    found = {}
    for key, name in architecture.by_layer.items():
        begins = header.floats.get(key)
        if begins is None or len(header.metadata[key]) != layers:
            raise BadCheckpoint(
                f"{header.file} cannot be used: {key} is no number for each of {layers} layers.",
                fix="Download the file again.",
            )
        shape = (1,) * architecture.dimensions.get(key, 1)
        for layer in range(layers):
            own, at = f"{architecture.layers}{layer}.{name}", begins + 4 * layer
            found[own] = TensorEntry(own, header.file, "F32", shape, at, 4)
    return found


def _name(names: Mapping[str, str], part: str, kind: str | None) -> str | None:
    """What a part's weight or bias is called; where either is called otherwise, that is there."""
    if (whole := names.get(f"{part}.{kind or ''}")) is not None:
        return whole
    return f"{names[part]}.{kind}" if part in names and kind in ("weight", "bias") else None


def _stack(
    architecture: Architecture, part: str, config: Mapping[str, Any], *, of_layer: bool
) -> tuple[str, int] | None:
    """What each tensor of a stack is called, and how many they are; None for what is no stack."""
    if not of_layer:
        name = architecture.streams.get(part)
        return None if name is None else (name, config["altup_num_inputs"] - 1)
    if part in architecture.stacks:
        name, key = architecture.stacks[part]
        return name, config[key]
    if part in architecture.experts:
        return architecture.experts[part], next(config[key] for key in _COUNTS if key in config)
    return None


def _apart(entry: TensorEntry, name: str, expected: int, rank: int) -> Iterator[TensorEntry]:
    """Of a stack, each by itself, of so many dimensions."""
    count, *shape = entry.shape
    if len(shape) != rank or count != expected or count > _MAX_EXPERTS:
        what = "matrices" if rank == 2 else "rows"
        raise BadCheckpoint(
            f"{entry.file} cannot be used: tensor {entry.name} is no stack of {expected} {what}.",
            fix="Download the file again.",
        )
    size = entry.nbytes // count
    for number in range(count):
        yield replace(
            entry,
            name=name.format(number),
            shape=tuple(shape),
            offset=entry.offset + number * size,
            nbytes=size,
        )


def _require_fits(entry: TensorEntry, unlike: Difference | None) -> None:
    if unlike is None or unlike.kind in ("transposed", "less_one"):
        return
    count = entry.shape[-1 if unlike.kind == "value_columns" else 0] - unlike.first
    each = unlike.heads * (2 if unlike.kind == "rotary_rows" else unlike.shared)
    if each < 1 or count < 1 or count % each:
        raise BadCheckpoint(
            f"{entry.file} cannot be used: tensor {entry.name} of {list(entry.shape)} is not made"
            f" of {unlike.heads} heads.",
            fix="Download the file again.",
        )


def _ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that a config says; those that end a generation as a list."""
    found = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    ends = dict.fromkeys(each for each in found.values() if type(each) is int)
    others = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {"eos_token_id": list(ends)} | {
        name: value if type(value) is int else None for name, value in others.items()
    }


def _require_embedded(header: GgufHeader, rows: int) -> None:
    words = header.metadata.get("tokenizer.ggml.tokens", Long(0))
    if not isinstance(words, Long) or words.count > rows:
        raise BadCheckpoint(
            f"{header.file} cannot be used: its tokenizer is no list of at most {rows} words, for"
            " which it has an embedding.",
            fix="Download the file again.",
        )
