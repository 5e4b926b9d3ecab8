"""A span whose matrices are blocks of few bits: rounded once, kept on disk, mapped from then on.

One safetensors file for each layer, beside the other caches, under the checkpoint's
`weights_sha256` and the format. A file is used while the hash over its tensors, which stands in its
header, is right; otherwise it is made again from the checkpoint. Blocks throughout.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors.torch import save
from torch import nn

from mesh.errors import BadCheckpoint
from mesh.models.header import TensorEntry, read_header, read_metadata
from mesh.models.late_experts import fill_late
from mesh.models.pages import Pages
from mesh.models.progress import Progress
from mesh.models.stored_dtypes import STORED_DTYPES
from mesh.paths import quantised_dir
from mesh.shard.compiled.builder import (
    DOWN,
    UP,
    Product,
    Stored,
)
from mesh.shard.compiled.experts import (
    ExpertMatrices,
    Experts,
    path_of_experts,
)
from mesh.shard.compiled.formats import (
    BITS,
    MIXED_SIZE,
    VERSION,
    BlockMatrix,
    Quant,
    dense_weight,
    joined,
    quantise,
)
from mesh.shard.compiled.latent import LatentRows
from mesh.shard.compiled.parts import ExpertsBeside, LayerParts, layer_parts
from mesh.shard.compiled.products import (
    bias_of,
    count_columns,
    count_rows,
    latent_rows,
    product_modules,
    put_products,
    quant_of,
    without_modules,
)
from mesh.shard.compiled.stored_matrices import matrix_of, matrix_of_experts, stored_experts
from mesh.shard.views import layer_list_name, layers_of

if TYPE_CHECKING:
    from mesh.models.load import LoadedSpan

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_DRAFT = ".part"
_PARTS: dict[Quant, tuple[str, ...]] = {
    "int8": ("codes", "scales"),
    "int4": ("codes", "scales", "zeros"),
}
"""Of a `BlockMatrix`, what is kept of it."""


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """What the graph of a layer is built from."""

    parts: LayerParts
    products: Mapping[str, Product]
    folder: Path | None
    """Where what its products refer to lies."""


@dataclass(frozen=True, slots=True)
class GraphSpan:
    """What the graphs of a span are built from, and the modules that compute the same."""

    loaded: LoadedSpan
    quant: Quant | None
    layers: tuple[GraphLayer, ...]

    @property
    def weight_bytes(self) -> int:
        """What the matrices take."""
        return math.ceil(sum(map(self._taken, self.layers)))

    def _taken(self, layer: GraphLayer) -> float:
        is_mixed = isinstance(layer.parts.feed_forward, Experts)
        more = MIXED_SIZE[self.quant] if is_mixed and self.quant is not None else 1.0
        return sum(
            product.matrix.nbytes * (more if name in (UP, DOWN) else 1.0)
            for name, product in layer.products.items()
        )


def quantised_span(
    loaded: LoadedSpan,
    quant: Quant,
    weights_sha256: str,
    cache_dir: Path | None,
    progress: Progress | None = None,
) -> GraphSpan:
    """`loaded`, changed in place: `BlockLinear` stands for its linear layers. Raises NotCompilable.

    Rounds what `cache_dir` does not hold yet, and holds it there from then on; without one it stays
    in memory.
    """
    module: Any = loaded.module
    name_of_list = layer_list_name(module)
    layers = module.get_submodule(name_of_list)
    experts = [f"{name_of_list}.{i}.{path_of_experts(each)}" for i, each in enumerate(layers)]
    all_parts = [
        layer_parts(layer, loaded.config, number, partial(fill_late, loaded, experts[number]))
        for number, layer in enumerate(layers)
    ]
    stored: dict[int, tuple[TensorEntry, ...]] = {
        id(module.get_submodule(name.removesuffix(".weight"))): (entry,)
        for name, entry in loaded.deferred.items()
    }
    for path, parts in zip(experts, all_parts, strict=True):
        for part in (parts.feed_forward, parts.beside):
            if isinstance(part, Experts | ExpertsBeside):
                stored |= stored_experts(part, loaded.late.get(path, {}))
        for rows, linear in latent_rows(parts.mixer):
            if id(linear) in stored:
                stored[id(rows)] = stored[id(linear)]
    folder = folder_of(weights_sha256, quant, cache_dir)
    progress = progress or Progress()
    progress.begin("rounding", loaded.bytes_read)
    done = []
    for number, (layer, parts) in enumerate(zip(layers, all_parts, strict=True)):
        file = None if folder is None else folder / f"{loaded.layers.start + number}.safetensors"
        products, pages = stored_products(product_modules(parts), quant, file, stored)
        loaded.pages.update(pages)
        put_products(layer, parts, products)
        progress.add(loaded.bytes_read // len(all_parts))
        done.append(GraphLayer(without_modules(parts), products, folder))
    module.float()
    for parameter in module.parameters():  # what is left would keep the whole checkpoint mapped
        parameter.data = parameter.data.clone()
    return GraphSpan(replace(loaded, sha256={}, deferred={}, late={}), quant, tuple(done))


def dense_span(loaded: LoadedSpan) -> GraphSpan:
    """`loaded` with its weights as they are. Raises NotCompilable."""
    layers = enumerate(layers_of(loaded.module))
    parts = [layer_parts(layer, loaded.config, i) for i, layer in layers]
    return GraphSpan(loaded, None, tuple(GraphLayer(p, _dense_products(p), None) for p in parts))


def _dense_products(parts: LayerParts) -> dict[str, Product]:
    """The products of a layer as they are, in fp32."""
    return {
        name: Product(torch.cat([dense_weight(each).float() for each in linears]), bias_of(linears))
        for name, linears in product_modules(parts).items()
    }


def folder_of(weights_sha256: str, quant: Quant, cache_dir: Path | None) -> Path | None:
    """Where what was rounded of a checkpoint is kept."""
    return None if cache_dir is None else quantised_dir(cache_dir, weights_sha256) / quant


def stored_products(
    modules: Mapping[str, Sequence[nn.Module]],
    quant: Quant,
    file: Path | None,
    stored: Mapping[int, tuple[TensorEntry, ...]] | None = None,
) -> tuple[dict[str, Product], list[Pages]]:
    """Products of these linear layers, and the pages in which they lie as far as they are mapped.

    From `file` if it holds them; otherwise rounded now, and kept there if there is one. `stored`
    has, by the ids of the modules, the weights of those that have none yet, one for each expert or
    two.
    """
    kept = None if file is None else _kept(file, modules, quant)
    if kept is not None:
        return kept
    fresh = {
        name: Product(_rounded(linears, quant_of(name, quant), stored or {}), bias_of(linears))
        for name, linears in modules.items()
    }
    if file is None or not _keep(file, fresh, quant):
        return fresh, []
    return _kept(file, modules, quant) or (fresh, [])


def _kept_parts(name: str, quant: Quant) -> tuple[str, ...]:
    return _PARTS[quant_of(name, quant)]


def _rounded(
    linears: Sequence[nn.Module], quant: Quant, stored: Mapping[int, tuple[TensorEntry, ...]]
) -> BlockMatrix:
    if not any(id(each) in stored for each in linears):
        return quantise(torch.cat([dense_weight(each) for each in linears]), quant)
    return joined(
        [
            quantise(dense_weight(each), quant)
            if (entries := stored.get(id(each))) is None
            else _of_stored(each, entries, quant)
            for each in linears
        ]
    )


def _of_stored(linear: nn.Module, entries: tuple[TensorEntry, ...], quant: Quant) -> BlockMatrix:
    if isinstance(linear, ExpertMatrices):
        return matrix_of_experts(entries, quant, linear)
    (entry,) = entries
    if isinstance(linear, LatentRows):
        return linear.of_stored(entry, quant)
    return matrix_of(entry, quant)


def _keep(file: Path, products: Mapping[str, Product], quant: Quant) -> bool:
    """Write them; whether that was possible."""
    tensors = {}
    for name, product in products.items():
        assert isinstance(product.matrix, BlockMatrix)  # noqa: S101 - just rounded
        parts = _kept_parts(name, quant)
        tensors.update({f"{name}.{part}": getattr(product.matrix, part) for part in parts})
    metadata = {"sha256": _digest(io.BytesIO(save(tensors))), "version": str(VERSION)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _drop_abandoned(file)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=_DRAFT)
        draft = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stream.write(save(tensors, metadata))
                stream.flush()
                draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be kept, and is made again next time: %s", file, error)
        return False
    return True


def _drop_abandoned(file: Path) -> None:
    """Delete drafts of `file` whose writer has died: who writes one has it locked."""
    for draft in file.parent.glob(f"{file.name}*{_DRAFT}"):
        with suppress(BlockingIOError), draft.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink(missing_ok=True)


def _kept(
    file: Path, modules: Mapping[str, Sequence[nn.Module]], quant: Quant
) -> tuple[dict[str, Product], list[Pages]] | None:
    """What `file` holds, mapped; None when that is not what is wanted, or damaged."""
    if not file.exists():
        return None
    try:
        entries = read_header(file)
        metadata = read_metadata(file)
        with file.open("rb") as stream:
            digest = _digest(stream)
        if (metadata.get("version"), metadata.get("sha256")) != (str(VERSION), digest):
            return None
        if entries.keys() != {f"{n}.{part}" for n in modules for part in _kept_parts(n, quant)}:
            return None
        pages = Pages.of_file(file)
    except (BadCheckpoint, OSError, ValueError) as error:
        logger.warning("%s is made again: %s", file, error)
        return None
    products = {}
    for name, linears in modules.items():
        tensors, stored = {}, {}
        for part in _kept_parts(name, quant):
            entry = entries[f"{name}.{part}"]
            tensors[part] = pages.tensor(STORED_DTYPES[entry.dtype], entry.shape, entry.offset)
            stored[part] = Stored(file, entry.offset, entry.nbytes)
        shape = (sum(map(count_rows, linears)), count_columns(linears[0]))
        matrix = BlockMatrix(
            BITS[quant_of(name, quant)],
            shape,
            tensors["codes"],
            tensors["scales"],
            tensors.get("zeros"),
        )
        products[name] = Product(matrix, bias_of(linears), stored)
    return products, [pages]


def _digest(stream: BinaryIO) -> str:
    """Of the tensors, and of what the header says of them."""
    header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
