"""Every benchmark after the other: ``python -m tests.bench [NAME ...]``. Prints ratios."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if not path.stem.startswith("_")
    and path.stem
    not in ("noise", "reference", "peers", "gguf_file", "soak", "cuda_steps", "layers")
)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        print(f"== {name}", flush=True)
        print(json.dumps(importlib.import_module(f"tests.bench.{name}").measure(), indent=1))


if __name__ == "__main__":
    main()
