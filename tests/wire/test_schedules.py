"""Windows, credits and bounds under random schedules of sends, deliveries and answers."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.wire.messages import Result, Step
from tests.wire.support import SMALL, answer, session_pair
from tests.wire.support import tensor as make_tensor


class Schedule:
    """Two sessions, two wires with a delay, and a seeded idea of what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sessions = session_pair()
        self.wires: tuple[list[bytes], list[bytes]] = ([], [])
        self.waiting: list[Step] = []
        self.sent = 0
        self.results: list[tuple[int, bytes]] = []

    def turn(self) -> None:
        a, b = self.sessions
        choice = self.random.randrange(6)
        if choice == 0 and self.sent < 40:
            size = self.random.choice([0, 1, 60, 64, 65, 200, 1500, 4096])
            wire = make_tensor("int8", (size,), self.sent)
            a.send(Step(self.random.randrange(4), self.sent, 0, wire))
            self.sent += 1
        elif choice == 1 and self.waiting:
            b.send(answer(self.waiting.pop(self.random.randrange(len(self.waiting)))))
        elif choice < 4:
            side = choice - 2
            frame = self.sessions[side].next_frame()
            if frame is not None:
                self.wires[side].append(frame)
        else:
            self.deliver(choice - 4)
        self.check()

    def deliver(self, side: int) -> None:
        if self.wires[side]:
            for message in self.sessions[1 - side].receive(self.wires[side].pop(0)):
                if isinstance(message, Step):
                    self.waiting.append(message)
                elif isinstance(message, Result):
                    self.results.append((message.step, bytes(message.tensor.data)))

    def check(self) -> None:
        for session in self.sessions:
            assert 0 <= session.in_flight <= SMALL.window
            unanswered = SMALL.unanswered_bytes + SMALL.tensor_bytes
            bound = unanswered + SMALL.window * SMALL.chunk_bytes + SMALL.reassembly_bytes
            assert session.held_bytes <= bound
        assert len(self.waiting) <= SMALL.window

    def finish(self) -> None:
        for _ in range(20_000):
            if len(self.results) == self.sent == 40:
                return
            self.turn()
        raise AssertionError("stuck")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_windows_hold_and_everything_arrives_under_any_schedule(seed: int) -> None:
    schedule = Schedule(seed)
    schedule.finish()
    assert {step: data[:1] for step, data in schedule.results} == {
        step: bytes([step]) if data else b"" for step, data in schedule.results
    }
    assert len(dict(schedule.results)) == 40
