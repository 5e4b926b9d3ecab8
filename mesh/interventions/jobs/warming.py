"""How the warmed parent of a model's jobs begins: what all models need is imported, then the model
loaded.

Apart from `inside`, which imports transformers: that reads each of its modelling files unless it is
told before what is in them. Knows nothing of jobs.
"""

from __future__ import annotations

import json
from pathlib import Path

from mesh.processes import model_names


def warm(argument: str) -> None:
    """Load what `inside.warm` does. Runs in the warmed parent, once, and as its first import of
    transformers."""
    with model_names.remembered(Path(json.loads(argument)["cache_dir"])):
        from mesh.interventions.jobs import inside
    inside.warm(argument)
