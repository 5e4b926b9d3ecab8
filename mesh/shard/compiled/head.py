"""The output head in 8 or 4 bit: of a model's ends what is read for every token, and is largest."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mesh.models.ends import Ends
from mesh.shard.compiled.builder import Product
from mesh.shard.compiled.engine import Binding, compiled
from mesh.shard.compiled.formats import BlockMatrix, Quant
from mesh.shard.compiled.graph import product_model
from mesh.shard.compiled.lone_rows import fewest_rows
from mesh.shard.compiled.store import folder_of, stored_products

_HEAD = "head"


class CompiledLinear(nn.Module):
    """A linear layer over a `BlockMatrix`, computed by onnxruntime."""

    def __init__(self, product: Product, threads: int, folder: Path | None) -> None:
        super().__init__()
        assert isinstance(product.matrix, BlockMatrix)  # noqa: S101 - what is stored in blocks
        self.out_features, self.in_features = product.matrix.shape
        self._session = compiled(product_model(product, *product.matrix.shape), threads, folder)
        self._fewest_rows = fewest_rows([product])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) fp32 -> (…, out_features) fp32."""
        rows = x.reshape(-1, self.in_features).contiguous()
        count = len(rows)
        if count < self._fewest_rows:
            rows = F.pad(rows, (0, 0, 0, self._fewest_rows - count))
        output = torch.empty(len(rows), self.out_features)
        Binding.of(self._session, {"x": rows}, {"y": output}).run()
        return output[:count].view(*x.shape[:-1], self.out_features)


def compile_head(
    ends: Ends, weights_sha256: str, cache_dir: Path | None, threads: int, quant: Quant
) -> str:
    """Replace the head of `ends` by one in this format, and have what comes before it compute in
    fp32; what it is, for people.

    The embedding stays as it is stored: only the rows of a prompt are read of it.
    """
    head = ends.head
    folder = folder_of(weights_sha256, quant, cache_dir)
    file = None if folder is None else folder / f"{_HEAD}.safetensors"
    stored = {} if ends.deferred_head is None else {id(head): (ends.deferred_head,)}
    products, pages = stored_products({_HEAD: (head,)}, quant, file, stored)
    ends.widen()
    ends.replace_head(CompiledLinear(products[_HEAD], threads, folder))
    del products
    for each in pages:
        each.forget()
    return f"head compiled: {quant}"
