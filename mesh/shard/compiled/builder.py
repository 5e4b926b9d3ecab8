"""The nodes of one ONNX graph, and the matrices that it multiplies by.

Floats are fp32 throughout.
Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from mesh.shard.compiled.formats import BLOCK, BlockMatrix, rows_of
from mesh.shard.compiled.parts import Norm

FLOAT = TensorProto.FLOAT
_CONTRIB = "com.microsoft"
_OPSET = 24
_IR = 10

INT8_PRODUCTS = 4
"""``accuracy_level`` of a product: the rows are rounded to 8 bit, each block by a scale of its own,
which is what the kernels for few bits are written for. A row's neighbours have no part in it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's bytes lie in a file."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """What a row is multiplied by: a dense (out, in) matrix or one of blocks, and a bias.

    `stored` says by the names of a `BlockMatrix` where its tensors lie; the graph then refers to
    those instead of holding copies.
    """

    matrix: torch.Tensor | BlockMatrix
    bias: torch.Tensor | None
    stored: Mapping[str, Stored] | None = None


QKV, OUTPUT, UP, DOWN, RATES = "qkv", "output", "up", "down", "rates"
FORGETTING, GATES = "forgetting", "gates"
"""Of states whose every number decays by itself, what makes decays and gates of few numbers."""
QUERIES, LATENT_KEYS, LATENT_VALUES = "queries", "latent_keys", "latent_values"
"""Of attention over latents (`mesh.shard.compiled.latent`); the last two have a matrix for each
head."""
SHARED_UP, SHARED_DOWN, SHARED_GATE = "shared_up", "shared_down", "shared_gate"
"""Of what rows go through beside their experts."""
NARROWING, WIDENING = "narrowing", "widening"
"""Of experts for rows of another width."""
BESIDE_UP, BESIDE_DOWN = "beside_up", "beside_down"
"""Of experts that rows go through beside their feed-forward."""
INPUTS_GATE, INPUTS_PROJECTION = "inputs_gate", "inputs_projection"
"""Of what a layer does with the numbers that it is given beside hidden states."""


class GraphBuilder:
    """Collects the nodes of one graph."""

    def __init__(self, products: Mapping[str, Product]) -> None:
        self._products = products
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """Declare one."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: Sequence[int | str]) -> None:
        """Declare one; floats."""
        self._outputs.append(helper.make_tensor_value_info(name, FLOAT, shape))

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        *,
        outputs: Sequence[str] | None = None,
        contrib: bool = False,
        **attributes: Any,
    ) -> str:
        """Add a node; the name of its first output."""
        name = f"{kind}.{len(self._nodes)}"
        domain = _CONTRIB if contrib else ""
        given = list(outputs or [name])
        node = helper.make_node(kind, list(inputs), given, name=name, domain=domain, **attributes)
        self._nodes.append(node)
        return given[0]

    def constant(self, value: torch.Tensor | np.ndarray[Any, Any]) -> str:
        """Hold a small tensor."""
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        name = f"constant.{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def numbers(self, *values: int) -> str:
        """Hold a few, as int64."""
        return self.constant(np.array(values, np.int64))

    def by_head(self, x: str, heads: int, width: int) -> str:
        """(1, rows, heads * width) as (1, heads, rows, width)."""
        x = self.op("Reshape", [x, self.numbers(1, -1, heads, width)])
        return self.op("Transpose", [x], perm=[0, 2, 1, 3])

    def norm(self, x: str, norm: Norm | None, gamma: str = "") -> str:
        """`x` normalised over its last axis; by the input `gamma` instead of its own, if given."""
        if norm is None:
            return x
        gamma = gamma or self.constant(norm.gamma)
        if norm.beta is None:
            return self.op(
                "SimplifiedLayerNormalization", [x, gamma], axis=-1, epsilon=norm.epsilon
            )
        beta = self.constant(norm.beta)
        return self.op("LayerNormalization", [x, gamma, beta], axis=-1, epsilon=norm.epsilon)

    def product(self, x: str, name: str) -> str:
        """`x` times the product of that name."""
        return self._multiplied(x, self._products[name], name)

    def each_product(self, parts: Sequence[str], name: str) -> list[str]:
        """Each of `parts` times its share of the product of that name, which has a matrix for each
        of them, one behind the other."""
        product, count = self._products[name], len(parts)
        return [
            self._multiplied(part, _share(product, number, count), f"{name}.{number}")
            for number, part in enumerate(parts)
        ]

    def _multiplied(self, x: str, product: Product, name: str) -> str:
        bias = "" if product.bias is None else self.constant(product.bias.detach().float())
        if isinstance(product.matrix, torch.Tensor):
            y = self.op("MatMul", [x, self.constant(product.matrix.detach().float().t())])
            return self.op("Add", [y, bias]) if bias else y
        matrix = product.matrix
        rows, columns = matrix.shape
        return self.op(
            "MatMulNBits",
            [x, *self._blocks(product, name), "", bias],
            contrib=True,
            N=rows,
            K=columns,
            bits=matrix.bits,
            block_size=BLOCK,
            accuracy_level=INT8_PRODUCTS,
        )

    def blocks(self, name: str, experts: int | None = None) -> tuple[str, str, str]:
        """Codes, scales and zero points of the product of that name, which is one in blocks; the
        last is empty in 8 bit. Those of so many `experts` are apart, with a row's codes together.
        """
        return self._blocks(self._products[name], name, experts)

    def _blocks(
        self, product: Product, name: str, experts: int | None = None
    ) -> tuple[str, str, str]:
        assert isinstance(product.matrix, BlockMatrix)  # noqa: S101 - says the caller
        found = []
        for part in ("codes", "scales", "zeros"):
            tensor = getattr(product.matrix, part)
            if tensor is None:
                found.append("")
                continue
            if experts is not None:
                tensor = tensor.view(experts, len(tensor) // experts, -1)
            found.append(self._tensor(f"{name}.{part}", tensor, product.stored))
        return found[0], found[1], found[2]

    def product_of(self, name: str) -> Product:
        """The product of that name."""
        return self._products[name]

    def add(self, x: str, multiplier: float, y: str) -> str:
        """``x + multiplier * y``."""
        if multiplier != 1.0:
            y = self.op("Mul", [y, self.constant(np.array(multiplier, np.float32))])
        return self.op("Add", [x, y])

    def split(self, x: str, widths: Sequence[int]) -> list[str]:
        """`x` cut along its last axis."""
        sizes = self.constant(np.array(widths, np.int64))
        return self.outputs("Split", [x, sizes], len(widths), axis=-1)

    def outputs(self, kind: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Add a node with so many outputs; their names."""
        names = [f"{kind}.{len(self._nodes)}.{i}" for i in range(count)]
        self.op(kind, inputs, outputs=names, **attributes)
        return names

    def norm_heads(self, x: str, norm: Norm | None, heads: int, width: int, gamma: str = "") -> str:
        """(sessions, rows, heads * width), each head normalised; `gamma` as in `norm`."""
        if norm is None:
            return x
        apart = self.constant(np.array([0, 0, heads, width], np.int64))
        together = self.constant(np.array([0, 0, heads * width], np.int64))
        each = self.norm(self.op("Reshape", [x, apart]), norm, gamma)
        return self.op("Reshape", [each, together])

    def serialised(self) -> bytes:
        """The model."""
        graph = helper.make_graph(
            self._nodes, "layer", self._inputs, self._outputs, self._constants
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
        data: bytes = model.SerializeToString()
        return data

    def _tensor(self, name: str, tensor: torch.Tensor, stored: Mapping[str, Stored] | None) -> str:
        if stored is None:
            return self.constant(tensor)
        place = stored[name.rpartition(".")[2]]
        proto = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype),
            dims=tensor.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place_of = {"location": place.file.name, "offset": place.offset, "length": place.nbytes}
        for key, value in place_of.items():
            proto.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
        self._constants.append(proto)
        return name


def _share(product: Product, number: int, count: int) -> Product:
    """One of so many equal parts of its rows."""
    assert product.bias is None  # noqa: S101 - there is none of that kind
    matrix, stored = product.matrix, product.stored
    height = matrix.shape[0] // count
    rows = slice(number * height, (number + 1) * height)
    if isinstance(matrix, torch.Tensor):
        return Product(matrix[rows], None)
    if stored is None:
        return Product(rows_of(matrix, rows), None)
    parts = {
        name: Stored(each.file, each.offset + number * (each.nbytes // count), each.nbytes // count)
        for name, each in stored.items()
    }
    return Product(rows_of(matrix, rows), None, parts)
