"""A span as compiled graphs: one for each layer, in 8 or 4 bit, with no Python inside a layer."""

import os

# onnxruntime tells its makers what it runs on and runs unless this is set before it is imported:
# https://github.com/microsoft/onnxruntime/blob/main/docs/Privacy.md.
os.putenv("ORT_DISABLE_TELEMETRY", "1")
