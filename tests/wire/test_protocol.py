"""The session as a state machine: hellos, order, flow control, and what it carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import (
    BadFrame,
    BadRequest,
    Busy,
    LinkLost,
    MeshError,
    SessionGone,
    VersionMismatch,
)
from mesh.types import WireDtype
from mesh.wire.call_back import CallBack, CalledBack
from mesh.wire.control import pack_map
from mesh.wire.frames import Frame, FrameType
from mesh.wire.inbox import MAX_ROWS_ASKED
from mesh.wire.messages import (
    CONTROL_MESSAGES,
    Advertise,
    Bye,
    Close,
    CopyPrefix,
    Drain,
    Failure,
    FileAsk,
    FilePart,
    Gossip,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    OpenEnds,
    OpenNormed,
    OpenPart,
    OpenTaps,
    Park,
    Part,
    Ping,
    Pong,
    PrefixCopied,
    Result,
    Resume,
    RowAsk,
    Seal,
    Sealed,
    Step,
    WeightsAsk,
    WireTensor,
)
from mesh.wire.protocol import TensorSession
from mesh.wire.tensors import ITEMSIZE, MAX_OPEN_TENSORS
from tests.wire.support import SMALL, answer, exchange, frames, hello, pass_on, same, session_pair
from tests.wire.support import tensor as make_tensor

BIG = make_tensor("fp16", (40, 8))  # ten chunks of SMALL


def kinds(messages: list[bytes]) -> list[FrameType]:
    return [Frame.parse(message, 1 << 20).type for message in messages]


def test_both_hellos_open_the_session() -> None:
    a, b = (
        TensorSession(hello("a"), SMALL),
        TensorSession(hello("b", fields={"x": [1, None]}), SMALL),
    )
    a.start()
    assert not a.is_open
    assert [type(message) for message in pass_on(a, b)] == [Hello]
    assert not b.is_open
    b.start()
    assert b.is_open
    assert pass_on(b, a) == [b.hello]
    assert a.is_open
    assert (a.peer, b.peer) == (b.hello, a.hello)


@pytest.mark.parametrize(("version", "old"), [(0, "b"), (2, "a")])
def test_another_version_is_nacked_and_both_sides_learn_who_is_too_old(
    version: int, old: str
) -> None:
    a, b = TensorSession(hello("a"), SMALL), TensorSession(hello("b", version=version), SMALL)
    b.start()
    (frame,) = frames(b)
    with pytest.raises(VersionMismatch, match=f"{old} is too old"):
        a.receive(frame)
    with pytest.raises(VersionMismatch, match=f"{old} is too old"):
        pass_on(a, b)
    assert a.is_closed
    assert b.is_closed


def test_a_newer_hello_with_another_layout_is_still_a_version_mismatch() -> None:
    a = TensorSession(hello("a"), SMALL)
    newer = pack_map({"version": 2, "node_name": "new", "novelty": True})
    with pytest.raises(VersionMismatch, match="a is too old"):
        a.receive(Frame(FrameType.HELLO, 0, newer).serialize())


@pytest.mark.parametrize(
    ("purpose", "message"),
    [
        ("control", Step(1, 0, 0, BIG)), ("control", Step(1, 0, 0, make_tensor())),
        ("control", Park(1)), ("weights", Park(1)), ("tensors", Gossip({})),
        ("weights", Gossip({})), ("tensors", FileAsk(1, "a" * 64, 0)),
    ],
)  # fmt: skip
def test_what_belongs_on_other_links_is_refused(purpose: str, message: Message) -> None:
    a, b = TensorSession(hello("a"), SMALL), TensorSession(hello("b", purpose=purpose), SMALL)
    for side in (a, b):
        side.start()
    exchange(a, b)
    a.send(message)
    with pytest.raises(BadFrame, match=f"does not belong on a link for {purpose}"):
        pass_on(a, b)
    assert b.held_bytes == 0


def test_nothing_can_be_sent_before_the_hellos_and_after_the_end() -> None:
    a = TensorSession(hello(), SMALL)
    with pytest.raises(LinkLost):
        a.send(Park(1))
    a, b = session_pair()
    a.send(Bye("enough"))
    with pytest.raises(LinkLost):
        a.send(Park(1))
    assert pass_on(a, b) == [Bye("enough")]
    assert b.is_closed
    assert b.receive(b"anything at all") == []


CONTROL: list[Message] = [
    OpenPart(1, b"\0" * 64),
    Open(1, "model", "ab" * 32, 0, 4, 2048, WireDtype.BF16, [{"layer": 1, "strength": 0.5}]),
    OpenEnds(1, "m", "ab" * 32, 0, 4, 9, WireDtype.FP16, ids=True, candidates=64, rows=9),
    OpenNormed(1, "m", "ab" * 32, 0, 4, 9, WireDtype.FP32, ids=True),
    RowAsk(1, 2, 2**32 - 1),
    OpenTaps(1, "model", "ab" * 32, 0, 4, "token"),
    Loading(1),
    Opened(1, 2048),
    Park(2**32 - 1),
    Resume(3, 64),
    CopyPrefix(3, 2, 640),
    PrefixCopied(3, 0),
    Seal(3),
    Sealed(3, [{"file": "f", "rows": 4}]),
    Close(4),
    Failure({"code": "busy", "message": "m", "fix": "f"}, 1, 2),
    Failure({"code": "busy"}),
    Drain("stopping"),
    Advertise(b"body", b"signature"),
    FileAsk(1, "ab" * 32, 1 << 20),
    CallBack(1, [1, 65535]),
    CalledBack(1, 1_893_456_000_000, ["", "timed out"], "busy"),
    FilePart(1, b""),
    WeightsAsk(1, "ab" * 32, Part.TENSOR, "model.norm.weight", 0, 1 << 40),
    Gossip({"kind": "ask", "number": 1, "heads": [["a", 1, b"x"]]}),
]


def purpose_of(message: Message) -> str:
    daemons = isinstance(message, Advertise | Gossip | FileAsk | FilePart | CallBack | CalledBack)
    if isinstance(message, WeightsAsk):
        return "weights"
    return "control" if daemons else "tensors"


@pytest.mark.parametrize("message", CONTROL, ids=lambda m: type(m).__name__)
def test_control_messages_survive_the_round_trip(message: Message) -> None:
    a, b = session_pair(purpose=purpose_of(message))
    a.send(message)
    assert pass_on(a, b) == [message]


def test_every_control_message_is_tried_here() -> None:
    assert {type(message) for message in CONTROL} | {Hello, Bye} >= set(CONTROL_MESSAGES.values())


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Park(-1), "session"),
        (Park(2**32), "session"),
        (Open(1, "m" * 513, "", 0, 1, 1, WireDtype.FP16), "model_id"),
        (Bye(5), "reason"),  # type: ignore[arg-type]
        (Advertise("text", b""), "body"),  # type: ignore[arg-type]
        (CallBack(1, list(range(1, 18))), "ports"),
        (CallBack(1, [0]), "ports"),
        (Gossip({"a": object()}), None),
        (Gossip({"a": 2**64}), None),
        (Step(2**32, 0, 0, make_tensor()), "step"),
        (Step(1, 0, -1, make_tensor()), "step"),
        (Step(2**32, 0, 0, BIG), "step"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_where_it_is_made(
    message: Message, param: str | None
) -> None:
    a, b = session_pair()
    with pytest.raises(BadRequest) as caught:
        a.send(message)
    assert caught.value.param == param
    a.send(Park(1))
    assert pass_on(a, b) == [Park(1)]


def test_a_large_control_body_travels_compressed() -> None:
    limits = replace(SMALL, control_bytes=1 << 20)
    a, b = session_pair(limits, "control")
    message = Gossip({"texts": ["event" * 40 for _ in range(500)]})
    a.send(message)
    (frame,) = frames(a)
    assert len(frame) < 10_000
    assert b.receive(frame) == [message]


tensors = st.builds(
    make_tensor,
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    shape=st.lists(st.integers(0, 3), max_size=8).map(tuple)
    | st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple),
    fill=st.integers(0, 255),
).filter(lambda wire: len(wire.data) <= SMALL.tensor_bytes)


@given(wire=tensors, gradient=st.booleans(), position=st.integers(0, 2**32 - 1))
def test_steps_and_results_survive_the_round_trip(
    wire: WireTensor, gradient: bool, position: int
) -> None:
    wire = replace(wire, gradient=gradient)
    a, b = session_pair()
    a.send(Step(9, 1, position, wire))
    _, (step,) = exchange(a, b)
    assert isinstance(step, Step)
    assert (step.session, step.step, step.position) == (9, 1, position)
    assert same(step.tensor, wire)
    b.send(Result(9, 1, step.tensor, 2**40, 7))
    (result,), _ = exchange(a, b)
    assert isinstance(result, Result)
    assert (result.session, result.step) == (9, 1)
    assert (result.compute_us, result.queue_us) == (2**32 - 1, 7)
    assert same(result.tensor, wire)


def test_a_decode_step_is_one_frame_out_and_one_back_however_long_it_goes_on() -> None:
    a, b = session_pair()
    for number in range(100):
        a.send(Step(1, number, number, make_tensor()))
        out = frames(a)
        assert kinds(out) == [FrameType.STEP]
        (step,) = b.receive(out[0])
        assert isinstance(step, Step)
        b.send(answer(step))
        back = frames(b)
        assert kinds(back) == [FrameType.RESULT]
        assert len(a.receive(back[0])) == 1
    assert frames(a) == frames(b) == []
    assert b.held_bytes == 0
    assert a.in_flight == 0


def test_a_large_tensor_travels_in_chunks_and_ends_with_its_metadata() -> None:
    a, _ = session_pair()
    a.send(Step(1, 0, 0, BIG))
    assert kinds(frames(a)) == [FrameType.DATA] * 10 + [FrameType.END]


def test_sessions_take_turns_so_that_a_decode_step_overtakes_a_prefill() -> None:
    a, b = session_pair()
    a.send(Step(1, 0, 0, make_tensor("int8", (64 * 40,))))
    a.send(Step(2, 0, 0, make_tensor()))
    a.send(Close(1))
    _, got = exchange(a, b)
    assert [(type(m), m.session) for m in got] == [(Step, 2), (Step, 1), (Close, 1)]  # type: ignore[union-attr]


def test_chunks_of_two_tensors_interleave() -> None:
    a, b = session_pair()
    ones, twos = make_tensor("int8", (64 * 20,), 1), make_tensor("int8", (64 * 20,), 2)
    a.send(Step(1, 0, 0, ones))
    a.send(Step(2, 0, 0, twos))
    _, got = exchange(a, b)
    assert {m.session: bytes(m.tensor.data)[:1] for m in got} == {1: b"\1", 2: b"\2"}  # type: ignore[union-attr]


def test_a_tensor_the_peer_could_not_hold_yet_waits() -> None:
    a, b = session_pair()
    size = SMALL.tensor_bytes  # two of them exceed reassembly_bytes
    for session in (1, 2, 3):
        a.send(Step(session, 0, 0, make_tensor("int8", (size,), session)))
    _, got = exchange(a, b)
    assert [m.session for m in got] == [1]  # type: ignore[union-attr]
    for _ in range(2):  # over unanswered_bytes, so credits are withheld until the answer
        (step,) = got
        b.send(Failure(SessionGone("gone", fix="").to_dict(), step.session, 0))  # type: ignore[union-attr]
        _, got = exchange(a, b)
    assert [m.session for m in got] == [3]  # type: ignore[union-attr]


def test_no_more_tensors_are_begun_than_the_peer_holds_incomplete() -> None:
    limits = replace(SMALL, unanswered_bytes=6000)
    a, b = session_pair(limits)
    for session in range(3 * MAX_OPEN_TENSORS):
        a.send(Step(session, 0, 0, make_tensor("int8", (65,), session)))
    got: list[Message] = []
    while len(got) < 3 * MAX_OPEN_TENSORS:
        _, more = exchange(a, b)
        assert more
        for step in more:
            assert isinstance(step, Step)
            b.send(answer(step))
        got += more
    assert not a.is_closed


def test_unanswered_steps_are_bounded_by_the_window() -> None:
    a, b = session_pair()
    for number in range(40):
        a.send(Step(1, number, 0, make_tensor()))
    _, got = exchange(a, b)
    assert len(got) == a.in_flight == 16
    assert a.queued_bytes == 24 * 16
    for step in got:
        assert isinstance(step, Step)
        b.send(answer(step))
    _, more = exchange(a, b)
    assert [m.step for m in more] == list(range(16, 32))  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [None, 0])
def test_a_failure_answers(step: int | None) -> None:
    a, b = session_pair()
    for number in range(17):
        a.send(Step(1, 0 if step == 0 else number, 0, make_tensor()))
    exchange(a, b)
    for _ in range(16 if step == 0 else 1):
        b.send(Failure({"code": "busy"}, 1, step))
    got_a, got_b = exchange(a, b)
    assert all(isinstance(message, Failure) for message in got_a)
    assert len(got_b) == 1
    assert b.held_bytes == 16


def test_close_gives_back_the_credits_of_steps_nobody_answers() -> None:
    a, b = session_pair()
    for number in range(16):
        a.send(Step(1, number, 0, make_tensor()))
    a.send(Close(1))
    a.send(Step(2, 0, 0, make_tensor()))
    _, got = exchange(a, b)
    assert [type(m) for m in got] == [Step] * 16 + [Close, Step]
    b.send(Result(1, 0, make_tensor(), 0, 0))  # late: nobody waits for it
    assert frames(b) == []


def test_rows_asked_for_and_not_answered_are_bounded() -> None:
    a, b = session_pair()
    for step in range(MAX_ROWS_ASKED):
        a.send(RowAsk(1, step, 0))
    exchange(a, b)
    a.send(Close(1))  # nobody waits for them any more
    for step in range(MAX_ROWS_ASKED):
        a.send(RowAsk(1, step, 0))
    exchange(a, b)
    assert b.is_open
    a.send(RowAsk(1, MAX_ROWS_ASKED, 0))
    with pytest.raises(Busy, match="Too many rows"):
        exchange(a, b)
    assert b.is_closed


def test_results_for_a_closed_session_do_not_pile_up() -> None:
    a, b = session_pair()
    a.limit_window(0)
    for number in range(3):
        a.send(Step(1, number, 0, BIG if number else make_tensor()))
    _, got = exchange(a, b)
    for step in got:
        assert isinstance(step, Step)
        b.send(answer(step))
    assert b.queued_bytes > 1000
    a.send(Close(1))
    pass_on(a, b)
    assert b.queued_bytes <= 20  # an ACK


def test_a_result_partly_sent_is_finished_after_close() -> None:
    a, b = session_pair()
    a.send(Step(1, 0, 0, make_tensor("int8", (64 * 40,))))
    _, (step,) = exchange(a, b)
    assert isinstance(step, Step)
    b.send(answer(step))
    a.send(Close(1))
    pass_on(a, b)
    got, _ = exchange(a, b)
    assert [type(m) for m in got] == [Result]


def test_the_peer_can_shrink_the_window() -> None:
    a, b = session_pair()
    b.limit_window(2)
    pass_on(b, a)
    for number in range(5):
        a.send(Step(1, number, 0, make_tensor()))
    assert len(frames(a)) == 2
    b.limit_window(99)
    pass_on(b, a)
    assert len(frames(a)) == 3


def test_the_queue_is_bounded() -> None:
    a, b = session_pair()
    b.limit_window(0)
    pass_on(b, a)
    step = Step(1, 0, 0, BIG)
    for _ in range(SMALL.queued_bytes // len(BIG.data)):
        a.send(step)
    with pytest.raises(Busy):
        a.send(step)
    assert SMALL.queued_bytes - 1000 < a.queued_bytes <= SMALL.queued_bytes


def test_ping_is_answered_at_once_and_only_once() -> None:
    a, b = session_pair()
    a.send(Ping(77))
    assert pass_on(a, b) == []
    assert pass_on(b, a) == [Pong(77)]
    b.send(Pong(77))
    with pytest.raises(BadFrame, match="PONG for no PING"):
        pass_on(b, a)


def test_unanswered_pings_are_bounded() -> None:
    a, _ = session_pair()
    for token in range(100):
        a.send(Ping(token))
    assert len(frames(a)) == 8


def test_close_says_bye_once() -> None:
    a, b = session_pair()
    a.close("done")
    a.close("done")
    assert pass_on(a, b) == [Bye("done")]
    never_started = TensorSession(hello(), SMALL)
    never_started.close("x")
    assert frames(never_started) == []


def test_a_refusal_replaces_what_was_queued() -> None:
    a, b = TensorSession(hello("a"), SMALL), TensorSession(hello("b"), SMALL)
    b.start()
    pass_on(b, a)
    a.start()
    a.send(Park(1))
    a.refuse(Busy("full", fix="wait"))
    a.refuse(Busy("full", fix="wait"))
    with pytest.raises(Busy, match="full"):
        pass_on(a, b)
    assert b.peer is None


def test_sequence_numbers_wrap() -> None:
    a, b = session_pair()
    a._outbox._sequence = b._expected = 2**32 - 2
    for number in range(4):
        a.send(Step(1, number, 0, BIG if number == 1 else make_tensor()))
        a.send(Park(number))
    _, got = exchange(a, b)
    assert len(got) == 8


def test_an_unknown_error_code_still_arrives() -> None:
    a, b = session_pair()
    error = MeshError("strange", fix="none")
    error.code = "from_the_future"
    a.refuse(error)
    with pytest.raises(MeshError, match="strange") as caught:
        pass_on(a, b)
    assert caught.value.code == "from_the_future"
