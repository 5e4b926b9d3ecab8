"""Attacks through the door that everybody uses: HTTP, queue, jail of a daemon, which lives on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from nnsight.modeling.transformers import TransformersModel

from mesh.cli.local_node import LocalNode
from mesh.paths import StatePaths
from tests.interventions.cases import CASES, Parts
from tests.interventions.households import HOUSES, chat, move_in, remotely, undisturbed
from tests.interventions.jail.hostile_bodies import DEEDS, WASTE
from tests.interventions.jail.trapped import TrapField
from tests.interventions.jobs import doors, hostile_jobs
from tests.interventions.jobworld import client
from tests.interventions.weight_attacks import JOBS
from tests.interventions.worlds import equal, whole
from tests.mesh_e2e.conftest import StartNode, start_node  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(1800)
BODIES = {**DEEDS, **WASTE, **doors.DEEDS}
SHORT = {
    "deeds": [
        "execution/fork", "file_read/open", "network/tcp", "time/loop_that_catches_everything",
        "space/huge_result",
        "weights/of_another_hop", "weights/overwritten", "environment/of_the_daemon", "daemon/kill",
    ],
    "refused": [
        "weights/state_dict", "formats/globals", "formats/formatter", "sympy/of_a_function",
    ],
    "payloads": ["os_system", "huge_bytes"],
    "edits": ["linear/in_place", "linear/transposed", "linear/requires_grad", "silu_in_place"],
}  # fmt: skip
LIMITS = {
    "HEARTHNET_JOBS__WALL_SECONDS": "6", "HEARTHNET_JOBS__CPU_SECONDS": "3",
    "HEARTHNET_JOBS__MEMORY_MB": "512", "HEARTHNET_JOBS__RESULT_MB": "1",
}  # fmt: skip
_PATIENCE_S = 30.0
_A_WHILE_S = 0.5
"""Far longer than the next job's process waits before it is forked."""
_AN_END = ("COMPLETED", "ERROR")


class Siege:
    """A daemon, the traps around it, and how attacks on it end."""

    def __init__(self, node: LocalNode, field: TrapField) -> None:
        self.node = node
        self.field = field
        assert node.process is not None
        self.pid = node.process.pid

    def told(self) -> dict[str, Any]:
        """What an attacker knows: everything but the secrets."""
        paths = StatePaths(self.node.state_dir)
        # Of the first hop, which runs layers 0-1, and of the second.
        weights = ["0.mlp.up_proj", "4.mlp.up_proj"]
        return {
            **self.field.traps(), "daemon": self.pid, "weights": weights,
            "runtime_file": str(paths.runtime_file), "state_dir": str(paths.root),
            "api_port": self.node.record.api_port,
        }  # fmt: skip

    def harm(self, result: bytes, said: str, lines: list[str]) -> str:
        """What an attack achieved; nothing when it was contained."""
        out = b"\n".join([result, said.encode(), *(line.encode() for line in lines)])
        found = self.field.escaped(result, said.encode(), lines)
        if (self.node.record.api_key or "").encode() in out:
            found += "; the owner's key came out"
        return found

    def as_client(self, attack: Callable[[TransformersModel], Any], key: str | None) -> str:
        """What an attack through the real client achieved, or how it ended in no known way."""
        begun = time.monotonic()
        result, said = None, ""
        # As it is, or what is too large would be small.
        with remotely(self.node, key=key, compress=False) as told:
            try:
                result = attack(client("llama"))
            except RemoteError as error:
                said = str(error)
        printed = [str(each.description) for each in told if each.status.value == "LOG"]
        lines = "\n".join(printed).split("\n")
        raw = result if isinstance(result, bytes) else str(result).encode()
        harm = self.harm(raw, said, lines)
        if not told or told[-1].status.value not in _AN_END:
            harm += f"; it did not end: {told[-1:]}"
        if key is None and "begun" not in lines:
            harm += f"; never began: {said}"
        if key is not None and not said:
            harm += f"; it was not refused, it got {raw[:200]!r}"
        if time.monotonic() - begun > _PATIENCE_S:
            harm += "; it ended late"
        return harm

    def as_bytes(self, blob: bytes, *, compress: bool) -> str:
        """The same of a payload that no client makes."""
        envelope = {
            "model_key": client("llama").to_model_key(), "session_id": "",
            "compress": compress, "env": {},
        }  # fmt: skip
        with httpx.Client(base_url=self.node.url, trust_env=False, timeout=_PATIENCE_S) as http:
            answer = http.post(
                "/request",
                headers={"nnsight-version": "0.8.1"},
                data={"data": json.dumps(envelope)},
                files={"blob": ("request", blob, "application/octet-stream")},
            )
            deadline = time.monotonic() + _PATIENCE_S
            state = answer.json()
            while answer.status_code == 200 and state["status"] not in _AN_END:
                if time.monotonic() > deadline:
                    return f"it does not end: {state}"
                time.sleep(0.02)
                state = http.get(f"/response/{state['id']}").json()
        said = str(state.get("description") or state.get("detail"))
        harm = self.harm(b"", said, [])
        return harm if state.get("status", "ERROR") == "ERROR" and said else f"{harm}; {state}"

    def deeds(self, names: Iterable[str]) -> dict[str, str]:
        """Of bodies that a trusted key has run; those that got through, and how."""
        return self.each_of(
            names,
            lambda name: self.as_client(
                lambda model: hostile_jobs.trace(model, BODIES[name], self.told()), None
            ),
        )

    def refused(self, names: Iterable[str]) -> dict[str, str]:
        """Of traces that another key has run."""
        return self.each_of(
            names,
            lambda name: self.as_client(lambda model: doors.knock(model, name, self.told()), ""),
        )

    def edits(self, names: Iterable[str]) -> dict[str, str]:
        """Of traces by somebody without a key that want to change the model; who is answered
        another model afterwards sees it in `is_well`."""

        def edit(name: str) -> str:
            with remotely(self.node, key="") as told, suppress(RemoteError):
                JOBS[name](Parts(client("llama")))
            ended = told and told[-1].status.value in _AN_END
            return "" if ended else f"it did not end: {told[-1:]}"

        return self.each_of(names, edit)

    def payloads(self, names: Iterable[str]) -> dict[str, str]:
        """Of payloads that are attacks themselves."""
        return self.each_of(
            names,
            lambda name: self.as_bytes(
                hostile_jobs.payloads(self.field.traps())[name], compress=False
            ),
        )

    def each_of(self, names: Iterable[str], attack: Callable[[str], str]) -> dict[str, str]:
        found = {}
        for name in names:
            self.field.reset()
            if how := attack(name):
                found[name] = how
        return found

    def processes(self) -> set[int]:
        """The daemon and all that descends from it."""
        daemon = psutil.Process(self.pid)
        return {self.pid, *(each.pid for each in daemon.children(recursive=True))}

    def at_rest(self) -> set[int]:
        """The same, once they have been the same for a while: the next job's process is forked
        shortly after the end of the last."""
        deadline = time.monotonic() + _PATIENCE_S
        seen, since = self.processes(), time.monotonic()
        while time.monotonic() < since + _A_WHILE_S < deadline:
            time.sleep(0.05)
            if (now := self.processes()) != seen:
                seen, since = now, time.monotonic()
        return seen

    def is_well(self) -> None:
        """Fail unless it is the same daemon, and answers honest people as ever."""
        assert self.node.process is not None
        assert self.node.process.poll() is None
        assert self.node.get("/mesh/v1/status")["node"]["name"] == self.node.name
        assert chat(self.node, "llama") == undisturbed("llama")
        for key in (None, ""):
            with remotely(self.node, key=key) as told:
                seen = CASES["edit_in_place"](Parts(client("llama")))
            equal(seen, CASES["edit_in_place"](Parts(whole("llama"))), 0.0)
            assert told[-1].meta["hops"] == list(HOUSES[2].route)


@pytest.fixture(scope="module")
def siege(start_node: StartNode) -> Iterator[Siege]:  # noqa: F811
    torch.set_num_threads(1)
    field = TrapField()
    environment = {**LIMITS, "CANARY_OF_A_TEST": field.secret}
    try:
        yield Siege(move_in(start_node, HOUSES[2], ["llama"], environment=environment), field)
    finally:
        field.close()


def unharmed(siege: Siege, attacks: Callable[[], dict[str, str]]) -> None:
    """Run attacks on a daemon that was well; it still is, and nothing of them is left."""
    siege.is_well()
    before = siege.at_rest()
    assert attacks() == {}
    siege.is_well()
    deadline = time.monotonic() + _PATIENCE_S
    now = siege.at_rest()
    while not only_another_stands_by(before, now) and time.monotonic() < deadline:
        now = siege.at_rest()
    assert only_another_stands_by(before, now), (before - now, now - before)


def only_another_stands_by(before: set[int], now: set[int]) -> bool:
    """Whether the same processes run, but for the one that waits for the next job: as many."""
    return len(now) == len(before) and len(before - now) <= 1


@pytest.mark.slow
def test_attacks_on_a_daemon(siege: Siege) -> None:
    unharmed(
        siege,
        lambda: {
            **siege.deeds(SHORT["deeds"]),
            **siege.refused(SHORT["refused"]),
            **siege.payloads(SHORT["payloads"]),
            **siege.edits(SHORT["edits"]),
        },
    )


def test_there_are_enough_attacks() -> None:
    field = TrapField()
    try:
        payloads = hostile_jobs.payloads(field.traps())
    finally:
        field.close()
    assert len({*BODIES, *doors.REFUSED, *payloads}) >= 200
    assert len({*doors.DEEDS, *doors.REFUSED}) >= 60


@pytest.mark.chaos
def test_every_deed_on_a_daemon(siege: Siege) -> None:
    unharmed(siege, lambda: siege.deeds(BODIES))


@pytest.mark.chaos
def test_every_door_of_a_daemon(siege: Siege) -> None:
    unharmed(siege, lambda: siege.refused(doors.REFUSED))


@pytest.mark.chaos
def test_every_edit_of_a_weight_on_a_daemon(siege: Siege) -> None:
    unharmed(siege, lambda: siege.edits(JOBS))


@pytest.mark.chaos
def test_every_payload_on_a_daemon(siege: Siege) -> None:
    def attacks() -> dict[str, str]:
        bombs = siege.each_of(
            hostile_jobs.bombs(), lambda name: siege.as_bytes(bombs_made[name], compress=True)
        )
        return {**siege.payloads(hostile_jobs.payloads(siege.field.traps())), **bombs}

    bombs_made = hostile_jobs.bombs()
    unharmed(siege, attacks)


def test_the_key_is_where_the_test_looks_for_it(siege: Siege) -> None:
    record = StatePaths(siege.node.state_dir).runtime_file.read_text()
    assert siege.node.record.api_key in record
    environ = Path(f"/proc/{siege.pid}/environ").read_text()
    assert siege.field.secret in environ
