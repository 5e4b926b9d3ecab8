"""One layer's graph in onnxruntime, and the buffers that it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

_PROVIDERS = ("CPUExecutionProvider",)
_FOLDER = "session.model_external_initializers_file_folder_path"
_SPINNING = "session.intra_op.allow_spinning"
_ERRORS_ONLY = 3

_KINDS = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}

Buffers = Mapping[str, torch.Tensor]
"""Contiguous tensors by the names of a graph's inputs or outputs."""


def compiled(model: bytes, threads: int, folder: Path | None = None) -> Any:
    """A session for `model`; `folder` is where its stored tensors lie."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    # A thread that spins while it waits takes a core from whoever shares the machine.
    options.add_session_config_entry(_SPINNING, "0")
    # Each session would keep an arena of its own for what it takes between its operators.
    options.enable_cpu_mem_arena = False
    if folder is not None:
        options.add_session_config_entry(_FOLDER, str(folder))
    return onnxruntime.InferenceSession(model, options, providers=list(_PROVIDERS))


@dataclass(frozen=True, slots=True)
class Binding:
    """A session with its inputs and outputs bound to memory, which it keeps alive."""

    session: Any
    binding: Any
    buffers: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, session: Any, inputs: Buffers, outputs: Buffers) -> Binding:
        """Bind `session`, as far as its graph has inputs and outputs of those names."""
        binding = session.io_binding()
        kept = []
        for value in session.get_inputs():
            kept.append(inputs[value.name])
            binding.bind_input(value.name, "cpu", 0, *_described(inputs[value.name]))
        for value in session.get_outputs():
            kept.append(outputs[value.name])
            binding.bind_output(value.name, "cpu", 0, *_described(outputs[value.name]))
        return cls(session, binding, tuple(kept))

    def run(self) -> None:
        """Compute what is in the inputs into the outputs."""
        self.session.run_with_iobinding(self.binding)


def _described(tensor: torch.Tensor) -> tuple[Any, list[int], int]:
    return _KINDS[tensor.dtype], list(tensor.shape), tensor.data_ptr()
