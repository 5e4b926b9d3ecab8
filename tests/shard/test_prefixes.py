"""A session that begins as another: its cache is copied, in turns with what is computed."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from transformers import Phi3Config, Phi3Model

from mesh.errors import BadRequest, ContextTooLong, SessionGone
from mesh.shard.prefixes import PIECE
from mesh.shard.runtime import Runtime
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from mesh.wire.messages import CopyPrefix, PrefixCopied
from tests.shard.asker import Asker, Attic, CountedLoader, close_to
from tests.shard.compiled.spans import compiled
from tests.shard.spans import HIDDEN, of_module, rows, runtime, step

LONG = 2 * PIECE + 40


async def copied(asker: Asker, session: int, source: int, positions: int) -> int:
    asker.link.send(CopyPrefix(session, source, positions))
    answer = await asker.unwrapped()
    assert isinstance(answer, PrefixCopied)
    assert answer.session == session
    return answer.positions


@pytest.mark.parametrize("kind", ["torch", "int8", "int4"])
def test_what_is_copied_has_the_bits_of_what_was_computed(kind: str) -> None:
    span: Runtime = runtime() if kind == "torch" else compiled("int8" if kind == "int8" else "int4")
    hidden, other = rows(90), rows(20, seed=1)
    source, whole, copy = (span.new_cache(200) for _ in range(3))
    for start, stop in ((0, 60), (60, 61), (61, 90)):
        step(span, source, start, hidden[:, start:stop])
    for start, stop in ((0, 60), (60, 61)):
        step(span, whole, start, hidden[:, start:stop])
    copy.copy(source, 20)
    copy.copy(source, 61)
    assert copy.length == 61
    for at in (0, 1):
        expected = step(span, whole, 61 + 10 * at, other[:, 10 * at : 10 * at + 10])
        assert torch.equal(
            step(span, copy, 61 + 10 * at, other[:, 10 * at : 10 * at + 10]), expected
        )
    assert source.length == 90
    with pytest.raises(ContextTooLong):
        span.new_cache(30).copy(source, 31)


async def test_a_long_prefix_is_copied_in_pieces_between_the_steps_of_others() -> None:
    async with Attic(kv_tokens=8 * LONG) as attic:
        asker, other = attic.asker(), attic.asker()
        for session in (1, 2, 3):
            await asker.open(session, max_tokens=LONG + 10)
        await other.open(1)
        hidden = rows(LONG + 1)
        await asker.step(0, 0, hidden[:, :LONG], 1)
        asker.link.send(CopyPrefix(2, 1, LONG - 5))
        await other.step(0, 0, rows(1))
        assert await asker.answer() == PrefixCopied(2, LONG - 5)
        await asker.step(0, 0, hidden[:, : LONG - 5], 3)
        found = await asker.step(0, LONG - 5, hidden[:, LONG - 5 : LONG], 2)
        assert close_to(found, await asker.step(1, LONG - 5, hidden[:, LONG - 5 : LONG], 3))


async def test_a_parked_session_may_be_the_source_and_a_missing_one_gives_nothing() -> None:
    async with Attic() as attic:
        asker, stranger = attic.asker(), attic.asker()
        for session in (1, 2, 3):
            await asker.open(session)
        await asker.step(0, 0, rows(80), 1)
        asker.park(1)
        assert await copied(asker, 2, 1, 70) == 70
        assert await copied(asker, 3, 9, 70) == 0
        # Numbers are a link's own: nobody reaches another asker's session by one.
        asker.close(3)
        await stranger.open(3)
        assert await copied(stranger, 3, 1, 70) == 0
        assert await copied(asker, 2, 1, 90) == 80, "a fresh session may ask again"


async def test_of_other_layers_nothing_is_copied() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(1)
        layers = LayerRange(0, 3)
        await asker.open(2, start=layers.start, stop=layers.stop)
        await asker.step(0, 0, rows(80), 1)
        assert await copied(asker, 2, 1, 70) == 0


async def test_a_session_is_of_a_long_text_or_of_a_short_one_from_its_beginning_on() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8}
    rope |= {"long_factor": [4.0] * 8, "original_max_position_embeddings": 40}
    config = Phi3Config(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        num_hidden_layers=4, vocab_size=64, rope_parameters=rope, pad_token_id=0,
        original_max_position_embeddings=40,
    )  # fmt: skip
    given = of_module(Phi3Model(config))
    async with Attic(CountedLoader(given=given)) as attic:
        asker = attic.asker()
        await asker.open(1, max_tokens=30)
        await asker.open(2, max_tokens=50)
        await asker.open(3, max_tokens=40)
        hidden = rows(41)
        short = await asker.step(0, 0, hidden[:, :20], 1)
        assert await copied(asker, 2, 1, 20) == 0, "it is turned otherwise"
        assert await copied(asker, 3, 1, 20) == 20
        assert not close_to(await asker.step(0, 0, hidden[:, :20], 2), short)
        assert close_to(await asker.step(1, 20, hidden[:, 20:40], 1), given_rows(given, hidden))
        with pytest.raises(ContextTooLong, match="at most 40 positions"):
            await asker.step(2, 40, hidden[:, 40:], 1)


def given_rows(given: TorchRuntime, hidden: torch.Tensor) -> torch.Tensor:
    """The rows from 20 to 40, of transformers' own code over all of them at once."""
    with torch.no_grad():
        module = given.loaded.module
        return module(inputs_embeds=hidden[:, :40], use_cache=False).last_hidden_state[:, 20:]


async def test_only_what_was_fed_nothing_begins_as_another() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(1)
        await asker.open(2)
        await asker.step(0, 0, rows(80), 1)
        await asker.step(0, 0, rows(2), 2)
        with pytest.raises(BadRequest, match="fed nothing"):
            await copied(asker, 2, 1, 70)
        with pytest.raises(SessionGone):
            await copied(asker, 7, 1, 70)


async def test_until_it_has_begun_as_another_a_session_is_neither_fed_nor_begun_as_a_third() -> (
    None
):
    gate = threading.Event()
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(1)
        await asker.open(2)
        await asker.step(0, 0, rows(80), 1)
        attic.server.scheduler.visit(lambda: gate.wait(10), lambda _: None)
        asker.link.send(CopyPrefix(2, 1, 70))
        await asyncio.sleep(0.01)  # it waits for the device
        asker.send_step(0, 0, rows(1), 2)
        asker.link.send(CopyPrefix(2, 1, 60))
        for _ in range(2):
            with pytest.raises(BadRequest):
                await asker.unwrapped()
        gate.set()
        assert await asker.answer() == PrefixCopied(2, 70)


async def test_a_copy_longer_than_the_session_has_room_for_is_refused() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open(1)
        await asker.open(2, max_tokens=30)
        await asker.step(0, 0, rows(80), 1)
        with pytest.raises(ContextTooLong):
            await copied(asker, 2, 1, 70)
