"""The manifest of a local checkpoint: its contents, before any tensor is loaded.

Reads config.json and the headers of safetensors files, or those of GGUF files, and, once per
checkpoint, every byte for its hash. It refuses to know how an architecture computes (`families`),
and never imports torch or transformers: the daemon reads manifests, and the daemon computes
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh import codec
from mesh.codec import Fault
from mesh.errors import BadCheckpoint, ModelNotFound
from mesh.models.coded.gathering import all_are_blocks, all_fit_int4, gathered, parts_of
from mesh.models.coded.scheme import scheme_of
from mesh.models.cuts import Cuts, cuts_of
from mesh.models.end_names import is_end, is_head, is_inputs, parent_of
from mesh.models.gguf.container import SUFFIX
from mesh.models.gguf.contents import only_model, read_gguf
from mesh.models.gguf.rotary import SIDE_TENSORS
from mesh.models.hashing import hash_tensors, weights_sha256
from mesh.models.header import CheckpointContents, TensorEntry, read_header
from mesh.models.hub_cache import checkpoint_name
from mesh.models.layer_names import find_layers, language_part, layer_bytes, number_in
from mesh.models.pairs import with_pairs
from mesh.models.partial import Partial, read_partial, require_present
from mesh.models.standard import goes_by_torch, streams_of
from mesh.types import LayerRange, ModelId

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 << 20
"""An index of half a million tensors."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint: a directory, or the GGUF file `gguf` in it.

    `config` is config.json as it stands, or what a GGUF file says in its terms; `dtype` the dtype
    most of the weights are stored in, as torch spells it, or a type of GGUF's blocks or a kind of
    codes in small letters. `tensors` are those that are stored, `weights` those of the model, which
    may each stand for several. `layer_bytes[i]` is the stored size of decoder layer i, `ends_bytes`
    that of embedding, final norm and head (once when `tied`). Tensors of layer i are named
    ``{layer_prefix}{i}.…``. `max_positions` is None where the config leaves it to its class.
    `eos_ids` come from generation_config.json and config.json, or from the GGUF file.
    `bytes_hashed` is 0 when the hashes came from `cache_dir`, or from the record of a partial
    checkpoint, some of whose `tensors` are not `present`. `heads` has every GGUF file, `gguf`
    first, and where its header ends; `pooling_type` is what they say by this name, or 0.
    """

    model_id: ModelId
    directory: Path
    config: Mapping[str, Any]
    model_type: str
    total_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    dtype: str
    tensors: Mapping[str, TensorEntry]
    weights: Mapping[str, TensorEntry]
    layer_prefix: str
    layer_bytes: tuple[int, ...]
    ends_bytes: int
    tied: bool
    weights_sha256: str
    eos_ids: tuple[int, ...]
    bytes_hashed: int
    cache_dir: Path | None
    heads: Mapping[Path, int]
    pooling_type: int

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, or the first of several that are one model; None for a directory."""
        return next(iter(self.heads), None)

    @property
    def path(self) -> Path:
        """What it is read from: a directory, or the GGUF file, beside which there may be others."""
        return self.gguf or self.directory

    @property
    def base_prefix(self) -> str:
        """What the names of the base model's own tensors begin with, ``model.`` for most."""
        return parent_of(self.layer_prefix)

    def layer_tensors(self, layers: LayerRange) -> tuple[TensorEntry, ...]:
        """The stored tensors of these layers; BadCheckpoint when the model does not have that
        many."""
        return self._of_layers(self.tensors, layers)

    def _of_layers(
        self, tensors: Mapping[str, TensorEntry], layers: LayerRange
    ) -> tuple[TensorEntry, ...]:
        if layers.stop > self.total_layers:
            raise BadCheckpoint(
                f"Layers {layers} were asked of {self.model_id}, which has {self.total_layers}.",
                fix=f"Ask for layers within 0-{self.total_layers - 1}.",
            )
        wanted = tuple(f"{self.layer_prefix}{layer}." for layer in range(layers.start, layers.stop))
        return tuple(entry for name, entry in tensors.items() if name.startswith(wanted))

    def layer_weights(self, layers: LayerRange) -> tuple[TensorEntry, ...]:
        """The same as the model has them."""
        return self._of_layers(self.weights, layers)

    @property
    def is_int4(self) -> bool:
        """Whether all matrices of its layers are stored so that int4 has them without rounding, and
        int8 does not as well."""
        weights = self.layer_weights(LayerRange(0, self.total_layers))
        has_no_int8 = goes_by_torch(self.config, self.model_type)
        return all_fit_int4(weights) or (has_no_int8 and all_are_blocks(weights, "Q4_0"))

    def layers_here(self) -> tuple[LayerRange, ...]:
        """The runs of layers of which every byte is here: all of them, but in a partial one."""
        return LayerRange.runs(
            layer
            for layer in range(self.total_layers)
            if all(each.present for each in self.layer_tensors(LayerRange(layer, layer + 1)))
        )

    @property
    def cuts(self) -> Cuts:
        """Where it may be cut."""
        return cuts_of(self.config, self.total_layers)

    @property
    def row_size(self) -> int:
        """How many numbers go from hop to hop for one position: a hidden state, and what layers are
        given beside it (`mesh.models.row_form`)."""
        tables = (each for each in self.ends_weights() if is_inputs(each.name))
        states = self.hidden_size * streams_of(self.config)
        return states + sum(each.shape[-1] for each in tables)

    def ends_tensors(self) -> tuple[TensorEntry, ...]:
        """Those stored for embedding, final norm and head; towers for other modalities are left
        out."""
        return tuple(part for each in self.ends_weights() for part in parts_of(each))

    def ends_weights(self) -> tuple[TensorEntry, ...]:
        """The same as the model has them."""
        return tuple(e for e in self.weights.values() if is_end(e.name, self.layer_prefix))

    @property
    def ends_dtype(self) -> str:
        """What most of these are stored in, as `dtype` is of all."""
        return _main_dtype(self.ends_weights())

    def settings_tensors(self) -> tuple[TensorEntry, ...]:
        """Those that are read as a part of the config, of GGUF files; small, and always here."""
        return tuple(entry for name, entry in self.tensors.items() if name in SIDE_TENSORS)

    @property
    def has_ends(self) -> bool:
        """Whether the bytes of all those are here."""
        return all(entry.present for entry in self.ends_tensors())


def read_manifest(
    path: Path,
    *,
    model_id: ModelId | None = None,
    cache_dir: Path | None = None,
    is_hashed: bool = True,
) -> Manifest:
    """Read the checkpoint that `path` is, a directory or a GGUF file; `model_id` is
    `checkpoint_name` unless given.

    Blocks: the first time it reads every byte of the weights, afterwards (with a `cache_dir`) only
    the headers; of a partial checkpoint never more than those, nor of one that is not to be hashed,
    whose `weights_sha256` is '' then. Raises ModelNotFound when nothing is
    there, BadCheckpoint when it cannot be used, with the file and the reason, and UnsupportedFamily
    for weights in a quantised format that is not read and for a model that is not read from GGUF.
    """
    try:
        return _manifest(path, model_id, cache_dir, is_hashed=is_hashed)
    except OSError as error:  # a disk of the network that is away, for one
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror or error}.",
            fix="See that its disk is there, and that this user may read it.",
        ) from error


def _manifest(
    path: Path, model_id: ModelId | None, cache_dir: Path | None, *, is_hashed: bool
) -> Manifest:
    directory, found = _read(path)
    config, stored = found.config, found.tensors
    text = language_part(directory, config)
    prefix, total_layers = find_layers(directory, list(stored), text)
    partial = read_partial(directory)
    if partial is not None:
        model_id = model_id or ModelId(partial.record.model_id)
    tensors, bytes_hashed = _hashed(stored, partial, cache_dir) if is_hashed else (stored, 0)
    named = model_id or checkpoint_name(path)
    # A GGUF file says of each tensor how it is stored.
    weights = with_pairs(tensors) if found.heads else gathered(tensors, scheme_of(config, named))
    vocab_size, hidden_size = _widths(directory, text, weights, prefix)
    return Manifest(
        model_id=named,
        directory=directory,
        config=config,
        model_type=str(text.get("model_type", config.get("model_type", ""))),
        total_layers=total_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=number_in(text, "max_position_embeddings", "n_positions", "n_ctx"),
        dtype=_main_dtype(weights.values()),
        tensors=tensors,
        weights=weights,
        layer_prefix=prefix,
        layer_bytes=layer_bytes(tensors, prefix, total_layers),
        ends_bytes=sum(e.nbytes for e in weights.values() if is_end(e.name, prefix)),
        tied=not any(is_head(name) and name.endswith("weight") for name in weights),
        weights_sha256=weights_sha256(tensors.values()) if is_hashed else "",
        eos_ids=found.eos_ids,
        bytes_hashed=bytes_hashed,
        cache_dir=cache_dir,
        heads=found.heads,
        pooling_type=found.pooling_type,
    )


def _hashed(
    stored: Mapping[str, TensorEntry], partial: Partial | None, cache_dir: Path | None
) -> tuple[Mapping[str, TensorEntry], int]:
    """With their hashes, and how many bytes were read for those."""
    if partial is not None:
        marked = partial.mark(stored)
        require_present(marked[name] for name in SIDE_TENSORS & marked.keys())
        return marked, 0
    return hash_tensors(stored, cache_dir=cache_dir)


def looks_like_checkpoint(path: Path) -> bool:
    """Whether there is anything that `read_manifest` would look into."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path.is_file()
    return (path / "config.json").is_file() or any(path.glob(f"[!.]*{SUFFIX}"))


def _read(path: Path) -> tuple[Path, CheckpointContents]:
    """Its directory, and what is there."""
    if path.suffix != SUFFIX and not path.is_dir():
        kind = BadCheckpoint if path.exists() else ModelNotFound
        raise kind(
            f"{path} is not a directory.",
            fix="Give the directory that holds config.json, or a file whose name ends in .gguf; "
            "`hearthnet run ORG/NAME` takes a model of the hub.",
        )
    if (gguf := _gguf_of(path)) is not None:
        return gguf.parent, read_gguf(gguf)
    config = _read_object(path / "config.json")
    scheme_of(config, checkpoint_name(path))  # before a file of weights is looked at
    eos_ids = _eos_ids(path, config, language_part(path, config))
    return path, CheckpointContents({}, config, read_tensors(path), eos_ids)


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is the model of a directory without safetensors."""
    if not path.is_dir():
        return path if path.suffix == SUFFIX else None
    is_other = any((path / name).is_file() for name in (INDEX, SINGLE))
    return None if is_other else only_model(path)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return codec.read_file(file, dict[str, Any], _MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise BadCheckpoint(
            f"{file.parent} has no {file.name}.", fix="Give a Hugging Face checkpoint directory."
        ) from error
    except Fault as fault:
        raise BadCheckpoint(
            f"{file} is not a JSON object: {fault.why}.", fix="Download the file again."
        ) from fault
    except OSError as error:
        raise BadCheckpoint(
            f"{file} cannot be read: {error}.", fix="Copy or download the file again."
        ) from error


def read_tensors(directory: Path) -> Mapping[str, TensorEntry]:
    """The tensors of all weights files by name, without their hashes. Raises as `read_manifest`."""
    if (gguf := _gguf_of(directory)) is not None:
        return read_gguf(gguf).tensors
    # As transformers does: an index beside the whole file is left from a time of several.
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if index.is_file():
        return _read_sharded(directory, _read_object(index).get("weight_map"))
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise BadCheckpoint(
            f"{directory} holds its weights as pickle ({pickles[0]}), which runs code when loaded.",
            fix="Convert it on a machine you can spare: load it with transformers and call"
            " save_pretrained(), which writes safetensors; then use that directory.",
        )
    raise BadCheckpoint(
        f"{directory} has neither {SINGLE} nor {INDEX}, nor a GGUF file.",
        fix="Download the checkpoint's safetensors files.",
    )


def _read_sharded(directory: Path, weight_map: Any) -> dict[str, TensorEntry]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{directory / INDEX} has no weight_map.", fix="Download it again.")
    tensors: dict[str, TensorEntry] = {}
    for file_name in sorted(set(map(str, weight_map.values()))):
        if Path(file_name).name != file_name:
            raise BadCheckpoint(
                f"{INDEX} names {file_name!r}, which is not a file of this directory.",
                fix="Download the index again.",
            )
        for name, entry in read_header(directory / file_name).items():
            if weight_map.get(name) != file_name:
                raise BadCheckpoint(
                    f"Tensor {name} lies in {file_name}; {INDEX} says {weight_map.get(name)}.",
                    fix="Download index and weights again, from the same revision.",
                )
            tensors[name] = entry
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise BadCheckpoint(
            f"{weight_map[missing[0]]} lacks tensor {missing[0]} and {len(missing) - 1} more that"
            f" {INDEX} promises.",
            fix="Download index and weights again, from the same revision.",
        )
    return tensors


def _widths(
    directory: Path, text: Mapping[str, Any], weights: Mapping[str, TensorEntry], prefix: str
) -> tuple[int, int]:
    """How many words and how many numbers in a row: as the config says, else as weights have it."""
    vocab = number_in(text, "vocab_size")
    hidden = number_in(text, "hidden_size", "n_embd", "d_model")
    if vocab and hidden:
        return vocab, hidden
    shape = _largest_end(directory, weights, prefix).shape
    return vocab or shape[0], hidden or shape[1]


def _largest_end(directory: Path, tensors: Mapping[str, TensorEntry], prefix: str) -> TensorEntry:
    """The embedding, or a head of the same shape."""
    matrices = [
        each
        for each in tensors.values()
        if is_end(each.name, prefix) and len(each.shape) == 2 and not is_inputs(each.name)
    ]
    if not matrices:
        raise BadCheckpoint(
            f"{directory} has no embedding beside its layers.", fix="Download the whole checkpoint."
        )
    return max(matrices, key=lambda entry: entry.nbytes)


def _main_dtype(weights: Collection[TensorEntry]) -> str:
    # Of codes, which are few bytes each, the embedding may take more than all layers together.
    has_codes = any(entry.coding for entry in weights)
    sizes: Counter[str] = Counter()
    for entry in weights:
        sizes[entry.dtype] += math.prod(entry.shape) if has_codes else entry.nbytes
    most = sizes.most_common(1)[0][0]
    return _DTYPES.get(most, most.lower())


def _eos_ids(
    directory: Path, config: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    sources = [_read_object(generation)] if generation.is_file() else []
    ids: dict[int, None] = {}
    for source in (*sources, config, text):
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if type(item) is int:
                ids.setdefault(item)
    return tuple(ids)
