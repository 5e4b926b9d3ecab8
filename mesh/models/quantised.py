"""Checkpoints whose weights are stored quantised, in a format of safetensors that is not read.

Why none is: docs/decisions/stored-quantised.md. GGUF files are another matter (`gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.errors import UnsupportedFamily

_KEYS = ("quantization_config", "compression_config")
"""Where configs say it; the second is that of earlier compressed-tensors."""


def require_unquantised(config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedFamily, naming the format, where this config.json of the model `name` says
    that its weights are stored quantised."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if (said := each.get(key)) is not None:
                fields = said if isinstance(said, Mapping) else {}
                method = str(fields.get("quant_method", "in an unknown way"))[:40]
                raise UnsupportedFamily(
                    f"The weights of {name} are stored quantised ({method}), and not read.",
                    fix="Use its original checkpoint, or a GGUF file of it.",
                )
