"""A finished job's answer with the result inside: what ``torch.save`` would write of it.

Made without torch and without looking into the result: the archive that torch reads is a zip file
with a pickle, and ours holds texts, numbers and the result's bytes. Nothing is ever loaded here.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

_PROTOCOL = 4
"""The one that nnsight's own servers write: protocol 2 has no bytes."""


def inline_answer(answer: Mapping[str, Any], result: bytes) -> bytes:
    """`answer`, a JSON-able ``ResponseModel``, with `result` as its data."""
    content = pickle.dumps({**answer, "data": result}, protocol=_PROTOCOL)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("answer/data.pkl", content)
        archive.writestr("answer/version", "3\n")
    return file.getvalue()
