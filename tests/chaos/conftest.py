"""What every chaos test shares: one household, the right answers, and a list of what was done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import astuple, dataclass

import pytest
import pytest_asyncio
import torch

from mesh.models.builtin import checkpoint_dir
from tests.chaos.household import Household
from tests.chaos.lab import Lab, open_lab


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, as the table at the end shows it."""

    where: str
    fault: str
    position: str
    moment: str
    failovers: int
    verdict: str


_done: list[Row] = []


@pytest.fixture(scope="session")
def record() -> Callable[[Row], None]:
    """Adds a fault to the table."""
    return _done.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        if "tests/chaos/" in report.nodeid:
            terminalreporter.write_line(f"not shown here: {report.nodeid}: {report.longrepr[2]}")
    if not _done:
        return
    terminalreporter.section(f"chaos: {len(_done)} faults")
    rows = [("where", "fault", "hop", "at token", "failovers", "tokens"), *map(astuple, _done)]
    for row in rows:
        terminalreporter.write_line("  ".join(f"{cell!s:<14}" for cell in row).rstrip())


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    """Seven daemons; the module's last test ends them."""
    with Household(tmp_path_factory.mktemp("household")) as all_of_them:
        yield all_of_them


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """One shard process and an asker's ends; its tests share one event loop."""
    torch.set_num_threads(1)
    async with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


@pytest.fixture(scope="session")
def one_machine() -> Callable[[list[int], int], list[int]]:
    """Greedy ids of the built-in model as Hugging Face runs it, whole and in fp32."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def answer(prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    return answer
