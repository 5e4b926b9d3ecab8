"""Steering edits: the file that holds one, and the place in a model where it is applied.

A file is safetensors in fp32 with either ``vector`` (hidden,), which is added, or ``a``
(hidden, rank) and ``b`` (rank, hidden), the low-rank edit x + strength * (x a) b. Knows no torch:
the daemon checks edits, and the daemon computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import safetensors
from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, finite
from mesh.errors import SAME_VERSION, BadSteering
from mesh.types import Edit, Site

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_EDITS = 16
MAX_EDIT_BYTES = 2 << 20
MAX_TOTAL_BYTES = 4 << 20
PARTS = ("", "mlp", "self_attn", "attn")
"""The layer itself and what every layer has: places whose values have the hidden width."""
SIDES = ("output", "input")


def _is_side(text: str) -> None:
    if text not in SIDES:
        raise ValueError(f"is none of {', '.join(SIDES)}")


Side = Annotated[str, _is_side]

_PATH = re.compile(r"((?:[^\W\d]\w*\.)+)(\d{1,5})(?:\.(\w+(?:\.\w+)*))?")
_PART = re.compile(r"(\w{1,64}(\.\w{1,64}){0,7})?")
_FORMS = "one tensor `vector` (hidden,), or `a` (hidden, rank) and `b` (rank, hidden)"


@dataclass(frozen=True, slots=True)
class EditTensors:
    """The tensors of one edit: a `vector` (hidden,), or the factors `a` and `b` of a low rank."""

    vector: NDArray[np.float32] | None = None
    a: NDArray[np.float32] | None = None
    b: NDArray[np.float32] | None = None

    @property
    def kind(self) -> str:
        """``vector`` or ``low_rank``."""
        return "low_rank" if self.vector is None else "vector"

    @property
    def hidden_size(self) -> int:
        """The width of what it is for: of the model, or of what passes inside a layer."""
        first = self.a if self.vector is None else self.vector
        return 0 if first is None else int(first.shape[0])


def read_edit(data: bytes) -> EditTensors:
    """Read one file. Raises BadSteering for anything but the two forms, in fp32, all finite."""
    import numpy as np  # not above: most nodes never see an edit
    from safetensors.numpy import load

    if len(data) > MAX_EDIT_BYTES:
        raise _refused(f"it has {len(data)} bytes; the limit is {MAX_EDIT_BYTES}")
    try:
        arrays = load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _refused(f"it is not safetensors: {error}") from error
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise _refused(f"`{name}` is {array.dtype}, not float32")
        if not np.isfinite(array).all():
            raise _refused(f"`{name}` has values that are not finite")
    shapes = {name: array.shape for name, array in arrays.items()}
    match sorted(shapes.items()):
        case [("vector", (hidden,))] if hidden:
            return EditTensors(vector=arrays["vector"])
        case [("a", (hidden, rank)), ("b", (inner, width))] if (
            hidden == width and rank == inner and hidden and rank
        ):
            return EditTensors(a=arrays["a"], b=arrays["b"])
    raise _refused(f"it holds {shapes}")


def parse_site(
    path: str, side: str, layer_prefix: str, total_layers: int, tensors: Iterable[str] = ()
) -> Site:
    """The place that a module path like ``model.layers.5.mlp`` names. Raises BadSteering.

    Beside `PARTS`, whatever some of `tensors`, the checkpoint's names, belong to.
    A shard may compute with other modules than the checkpoint has; it then refuses the place.
    """
    match = _PATH.fullmatch(path)
    known = (
        match is not None
        and match[1] == layer_prefix
        and ((match[3] or "") in PARTS or any(n.startswith(f"{path}.") for n in tensors))
    )
    if match is None or not known:
        raise BadSteering(
            f"{path!r} is no place for an edit in this model.",
            fix=f"Name {layer_prefix}N for the output of layer N, or {layer_prefix}N.mlp and the"
            " like.",
            param="path",
        )
    if int(match[2]) >= total_layers:
        raise BadSteering(
            f"{path!r}: this model has layers 0-{total_layers - 1}.",
            fix="Name one of them.",
            param="path",
        )
    if side not in SIDES:
        raise BadSteering(
            f"{side!r} is no side of a module.", fix="Use output or input.", param="side"
        )
    return Site(int(match[2]), match[3] or "", side)


def check_edits(edits: Sequence[Edit]) -> None:
    """Raise BadSteering when one request asks for too many or too large edits."""
    size = sum(len(edit.data) for edit in edits)
    if len(edits) > MAX_EDITS or size > MAX_TOTAL_BYTES:
        raise BadSteering(
            f"{len(edits)} edits of {size} bytes in one request; {MAX_EDITS} of {MAX_TOTAL_BYTES}"
            " bytes are allowed.",
            fix="Attach fewer, or add vectors of one place together.",
            param="hearthnet.steer",
        )


def describe(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """`Open.edits`; the data goes before it, in the same order."""
    return [
        {
            "layer": edit.site.layer,
            "part": edit.site.part,
            "side": edit.site.side,
            "strength": float(edit.strength),
            "size": len(edit.data),
        }
        for edit in edits
    ]


def assemble(described: Sequence[Mapping[str, Any]], data: bytes) -> tuple[Edit, ...]:
    """The inverse of `describe`, with the data of all edits in a row. Raises BadSteering."""
    edits = tuple(_assembled(described, data))
    if sum(len(edit.data) for edit in edits) != len(data):
        raise _garbled()
    check_edits(edits)
    return edits


@dataclass(frozen=True, slots=True)
class _Described:
    """An edit as `describe` says it."""

    layer: int
    part: Annotated[str, Meta(pattern=rf"\A(?:{_PART.pattern})\Z")]
    side: Side
    strength: Annotated[float, finite]
    size: Annotated[int, Meta(ge=1)]


def _assembled(described: Sequence[Mapping[str, Any]], data: bytes) -> Iterator[Edit]:
    position = 0
    for fields in described:
        try:
            said = codec.convert(dict(fields), _Described)
        except Fault as fault:
            raise _garbled() from fault
        if type(fields["strength"]) is not float:  # one description, one spelling
            raise _garbled()
        position += said.size
        if position > len(data):
            raise _garbled()
        site = Site(said.layer, said.part, said.side)
        yield Edit(site, said.strength, data[position - said.size : position])


def _garbled() -> BadSteering:
    return BadSteering(
        "The edits of a session cannot be read.",
        fix=SAME_VERSION,
        param="hearthnet.steer",
    )


def _refused(why: str) -> BadSteering:
    return BadSteering(
        f"The file is no steering edit: {why}.",
        fix=f"Save {_FORMS} as float32 safetensors.",
        param="tensors",
    )
