"""Two shards beside llama.cpp over RPC on the same two cores, alternating: ``make bench-peers``.

llama.cpp is built once from the source package of llama-cpp-python on PyPI, into the directory
given by ``--build`` (default: the system's temporary one), and runs models of the same shapes with
random weights, over RPC and, for comparison, in one process with both cores. Medians over rounds;
every sample waits for an idle machine, and those for which none came are counted. With ``--out``
the rows are kept as JSON, from which ``docs/plots.py`` draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from mesh.cli.local_node import LocalNode
from tests.bench.gguf_file import write_gguf
from tests.bench.mesh_speed import PREFILL_PROMPT, SHAPES, mesh_run, pin, start_halves
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

PACKAGE = "llama-cpp-python==0.3.36"
FORMATS = {"bf16": ("none", "auto"), "q8_0": ("int8", "auto"), "q4_0": ("int4", "auto")}
"""By llama.cpp's names: our quant and dtype."""
STREAMS = (1, 2, 4, 8, 16)
PROMPT, TOKENS = 32, 64
ROUNDS = 3
TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "ggml-rpc-server")


def build(root: Path) -> Path:
    """The directory of llama.cpp's programs, built if it is not there."""
    root.mkdir(parents=True, exist_ok=True)
    source = next(root.glob("llama_cpp_python-*/vendor/llama.cpp"), None)
    if source is None:
        download = [
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            PACKAGE,
        ]
        subprocess.run([sys.executable, *download, "-d", str(root)], check=True)
        with tarfile.open(next(root.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(root, filter="data")
        source = next(root.glob("llama_cpp_python-*/vendor/llama.cpp"))
    target, cmake = source / "build", shutil.which("cmake") or "cmake"
    options = ["-DGGML_NATIVE=ON", "-DGGML_RPC=ON", "-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    options += ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_SERVER=OFF"]
    subprocess.run([cmake, "-S", str(source), "-B", str(target), *options], check=True)
    subprocess.run([cmake, "--build", str(target), "--target", *TOOLS], check=True)
    return target / "bin"


class Llama:
    """llama.cpp with two RPC servers, one on each core."""

    def __init__(self, tools: Path, model: Path, stack: contextlib.ExitStack) -> None:
        self._tools, self._model = tools, model
        self.processes = [self._server(core, stack) for core in (0, 1)]
        self._rpc = ",".join(f"127.0.0.1:{PORT + core}" for core in (0, 1))

    def _server(self, core: int, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        address = ["-H", "127.0.0.1", "-p", str(PORT + core), "-t", "1"]
        process = subprocess.Popen(
            [str(self._tools / TOOLS[3]), *address],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        pin(process.pid, core)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        _wait_for(PORT + core)
        return process

    def run(self) -> dict[str, float]:
        """Tokens per second by what was measured."""
        common = ["-m", str(self._model), "--rpc", self._rpc, "-ngl", "99", "-t", "1"]
        found = self._single(common)
        local = self._single(["-m", str(self._model), "-ngl", "0", "-t", "2"])
        found |= {f"{key} in one process": value for key, value in local.items()}
        several = [*common, "-c", "2048", "-npp", str(PROMPT), "-ntg", str(TOKENS)]
        several += ["-npl", ",".join(map(str, STREAMS)), "--output-format", "jsonl"]
        for line in self._output("llama-batched-bench", several).splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found[f"streams_{row['pl']}"] = row["speed_tg"]
                if row["pl"] == 1:
                    found["first_token_ms"] = row["t_pp"] * 1e3
        return found

    def _single(self, common: list[str]) -> dict[str, float]:
        single = [*common, "-p", str(PREFILL_PROMPT), "-n", str(TOKENS), "-r", "1", "-o", "json"]
        rows = json.loads(self._output("llama-bench", single))
        return {("prefill" if row["n_prompt"] else "decode"): row["avg_ts"] for row in rows}

    def _output(self, tool: str, arguments: list[str]) -> str:
        command = [str(self._tools / tool), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


PORT = 50152


def _wait_for(port: int, patience_s: float = 20.0) -> None:
    """Until something answers there: who connects to a server that is not up yet is aborted."""
    deadline = monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if monotonic() > deadline:
            raise TimeoutError(port)
        sleep(0.1)


def ours(asker: LocalNode, rng: random.Random) -> dict[str, float]:
    """The same of the mesh."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, 30000) for _ in range(count)]

    short = mesh_run(asker, ids(PROMPT), TOKENS)
    found = {"decode": short["tokens_per_second"], "first_token_ms": short["first_token_ms"]}
    long = mesh_run(asker, ids(PREFILL_PROMPT), 1)
    found["prefill"] = PREFILL_PROMPT / long["first_token_ms"] * 1e3
    for count in STREAMS:
        prompts = [ids(PROMPT) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            # Prompts are read before, as there; what is asked for again goes on behind them.
            list(pool.map(lambda prompt: mesh_run(asker, prompt, 1), prompts))
            started = perf_counter()
            facts = list(pool.map(lambda prompt: mesh_run(asker, prompt, TOKENS), prompts))
            took_s = perf_counter() - started
        first_s = min(each["first_token_ms"] for each in facts) / 1e3
        found[f"streams_{count}"] = count * (TOKENS - 1) / (took_s - first_s)
    return found


@contextlib.contextmanager
def mesh(directory: Path, root: Path, layers: int, flags: tuple[str, str]) -> Iterator[LocalNode]:
    """Who asks two nodes with half of the layers each, one core each.

    Its own part, embedding and head, has both cores, which nobody else needs while there is one
    answer: a model's head is with llama.cpp on the last server's core.
    """
    quant, dtype = flags
    common = ("--model", f"{directory}=bench", "--quant", quant, "--dtype", dtype)
    environment = {
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__MAX_CONCURRENT_STREAMS": "16",
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__MAX_CONCURRENT_PIPELINES": "16",
    }
    folder = root / f"{directory.name}-{quant}"
    with contextlib.ExitStack() as stack:
        nodes = start_halves(layers, folder, common, stack, environment, asker_threads="2")
        mesh_run(nodes[2], list(range(3, 11)), 4)
        yield nodes[2]


def measure_one(shape: str, name: str, directory: Path, tools: Path, root: Path) -> dict[str, Any]:
    """One shape in one format: medians of ratios, ours over llama.cpp's, and of both."""
    model = root / f"{shape}-{name}.gguf"
    plain = root / f"{shape}-bf16.gguf"
    if not plain.exists():
        write_gguf(plain, directory, tools.parents[1] / "gguf-py")
    if not model.exists():
        quantize = [str(tools / "llama-quantize"), "--pure", str(plain), str(model), name]
        subprocess.run(quantize, check=True, capture_output=True)
    rng, rows, busy = random.Random(0), defaultdict(list), 0
    halves = mesh(directory, root, SHAPES[shape], FORMATS[name])
    with halves as asker, contextlib.ExitStack() as own:
        llama = Llama(tools, model, own)
        for number in range(ROUNDS):
            both: dict[str, dict[str, float]] = {}
            for side in ("ours", "llama") if number % 2 == 0 else ("llama", "ours"):
                busy += not wait_for_idle()
                both[side] = ours(asker, rng) if side == "ours" else llama.run()
            for key, value in both["llama"].items():
                rows[f"{key} llama"].append(value)
                if key in both["ours"]:
                    rows[f"{key} ours"].append(both["ours"][key])
                    rows[f"{key} ratio"].append(both["ours"][key] / value)
    medians = {key: round(statistics.median(values), 2) for key, values in sorted(rows.items())}
    return {"shape": shape, "format": name, "busy samples": busy, **medians}


def cpu() -> str:
    """The processor, and which of its vector extensions count here."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    flags = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if f in text]
    return f"{name[1] if name else 'unknown'}: {' '.join(flags)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    default = Path(tempfile.gettempdir()) / "hearthnet-peers"
    parser.add_argument("--build", type=Path, default=default)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--out", type=Path, help="where the rows are written as JSON")
    options = parser.parse_args()
    tools = build(options.build)
    print(cpu(), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for shape in options.shapes:
            directory = make_large_checkpoint(Path(name) / shape, shape)
            for each in options.formats:
                found = measure_one(shape, each, directory, tools, Path(name))
                print(json.dumps(found, indent=1), flush=True)
                rows.append(found)
                if options.out is not None:
                    kept = {"cpu": cpu(), "rows": rows}
                    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
