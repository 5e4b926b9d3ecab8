"""Askers without a model's ends who ask a shard process for what it does not give: each is told why
in a typed error, and the shard goes on serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from mesh.errors import BadRequest, ContextTooLong, MeshError, NoRoute, SessionGone
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import WireDtype
from mesh.wire.activations import to_wire
from mesh.wire.messages import (
    MAX_CANDIDATES,
    MAX_HEAD_ROWS,
    Message,
    OpenEnds,
    Result,
    RowAsk,
    Step,
    WireTensor,
)
from mesh.wire.token_rows import ids_to_wire
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.shard.asker import MODEL, Asker
from tests.shard.spans import HIDDEN

LAYERS = 4
POSITIONS, VOCAB = 64, 384
IDS = ids_to_wire([5, 6, 7])
HIDDEN_ROWS = to_wire(torch.zeros(1, 3, HIDDEN), WireDtype.FP32)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardSupervisor]:
    """GPT-2, whose ends know where a token stands, as a whole and in two halves."""
    root = tmp_path_factory.mktemp("ends")
    directory = make_checkpoint(
        root / "gpt2", "gpt2", layers=LAYERS, vocab=VOCAB, max_position_embeddings=POSITIONS
    )
    loads = [
        {"directory": str(directory), "model_id": MODEL, "layers": layers, "dtype": "fp32",
         "advertise_host": "127.0.0.1"}
        for layers in ("0-1", "2-3", "0-3")
    ]  # fmt: skip
    async with secure.hosting(root / "cache", *loads) as host:
        yield host


@pytest_asyncio.fixture(loop_scope="module")
async def asker(host: ShardSupervisor) -> AsyncIterator[EndedAsker]:
    """A link; afterwards the shard still says what comes next, to somebody else."""
    asker = await linked(host)
    yield asker
    asker.link.close()
    other = await linked(host)
    await open_ends(other, host)
    said = await stepped(other, 0, 0, IDS)
    assert said.tensor.shape[:2] == (1, 2)
    other.link.close()


class EndedAsker(Asker):
    """One that tells why its link has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()

    def closed(self, error: MeshError | None) -> None:
        self.ended.set_result(error)


async def linked(host: ShardSupervisor) -> EndedAsker:
    asker = EndedAsker()
    endpoint = next(iter(host.shards.values())).descriptor.endpoint
    asker.use(await secure.dial("127.0.0.1", int(endpoint.rpartition(":")[2]), asker))
    return asker


async def open_ends(asker: Asker, host: ShardSupervisor, **changes: Any) -> None:
    """Raises what the shard refuses it with."""
    shard = next(iter(host.shards.values())).descriptor
    asked: dict[str, Any] = {
        "model_id": MODEL, "weights_sha256": shard.weights_sha256, "start": 0, "stop": LAYERS,
        "max_tokens": 4 * POSITIONS, "wire_dtype": WireDtype.FP32, "ids": True, "candidates": 8,
        "rows": 2,
    }  # fmt: skip
    request = OpenEnds(1, **asked | changes)
    assert asker.permit is not None
    asker.link.send(replace(request, token=asker.permit(request)))
    await asker.unwrapped()


async def stepped(asker: Asker, number: int, position: int, tensor: WireTensor) -> Result:
    asker.link.send(Step(1, number, position, tensor))
    answer = await asker.unwrapped()
    assert isinstance(answer, Result)
    return answer


@pytest.mark.parametrize(
    ("changes", "refusal", "words"),
    [
        ({"start": 2}, NoRoute, "runs no embedding or no head"),
        ({"stop": 2}, NoRoute, "runs no embedding or no head"),
        ({"start": 1, "stop": 3, "candidates": 0}, NoRoute, "runs no embedding or no head"),
        ({"rows": 0}, BadRequest, "Candidates of no rows"),
        ({"start": 3, "stop": 3}, BadRequest, "are not a session"),
        ({"stop": LAYERS + 1}, NoRoute, "serves"),
    ],
)
async def test_ends_that_are_not_to_be_had(
    changes: dict[str, Any],
    refusal: type[MeshError],
    words: str,
    asker: Asker,
    host: ShardSupervisor,
) -> None:
    with pytest.raises(refusal, match=words) as refused:
        await open_ends(asker, host, **changes)
    assert refused.value.fix
    await open_ends(asker, host)  # the link and the number are as before


@dataclass(frozen=True)
class AnyEnds(OpenEnds):
    """Travels as its parent, with whatever is in it."""

    ids: Any = False
    candidates: Any = 0
    rows: Any = 0
    since: Any = 0


@dataclass(frozen=True)
class AnyAsk(RowAsk):
    """Likewise."""

    session: Any
    step: Any
    position: Any


@pytest.mark.parametrize(
    "message",
    [
        AnyEnds(1, "m", "0", 0, 1, 1, WireDtype.FP32, candidates=MAX_CANDIDATES + 1, rows=1),
        AnyEnds(1, "m", "0", 0, 1, 1, WireDtype.FP32, candidates=8, rows=MAX_HEAD_ROWS + 1),
        AnyEnds(1, "m", "0", 0, 1, 1, WireDtype.FP32, since=-1),
        AnyEnds(1, "m", "0", 0, 1, 1, WireDtype.FP32, ids="no"),
        AnyAsk(1, 0, 2**32),
        AnyAsk(1, -1, 0),
    ],
)
async def test_what_the_wire_does_not_allow_ends_the_link_with_the_reason(
    message: Message, asker: EndedAsker
) -> None:
    asker.link.send(message)
    error = await asyncio.wait_for(asker.ended, 10)
    assert isinstance(error, MeshError)
    assert "wrong type or size" in error.message


@pytest.mark.parametrize(
    ("tensor", "position", "refusal", "words"),
    [
        (ids_to_wire([VOCAB]), 0, BadRequest, "vocabulary"),
        (ids_to_wire([-1]), 0, BadRequest, "vocabulary"),
        (HIDDEN_ROWS, 0, BadRequest, "no row of token ids"),
        (WireTensor("int8", (1, 2, 8), bytes(16)), 0, BadRequest, "no row of token ids"),
        (IDS, 1, BadRequest, "the session holds 0"),
        (ids_to_wire([5] * (POSITIONS + 1)), 0, ContextTooLong, f"embedding of {POSITIONS}"),
    ],
)
async def test_steps_that_bear_no_ids_of_the_model(
    tensor: WireTensor,
    position: int,
    refusal: type[MeshError],
    words: str,
    asker: Asker,
    host: ShardSupervisor,
) -> None:
    await open_ends(asker, host)
    with pytest.raises(refusal, match=words):
        await stepped(asker, 0, position, tensor)
    assert (await stepped(asker, 1, 0, IDS)).step == 1  # the session is as before


async def test_a_session_with_layers_alone_takes_hidden_states(
    asker: Asker, host: ShardSupervisor
) -> None:
    await open_ends(asker, host, start=2, ids=False)
    with pytest.raises(BadRequest, match="hidden states"):
        await stepped(asker, 0, 0, IDS)
    assert (await stepped(asker, 1, 0, HIDDEN_ROWS)).tensor.shape[1] == 2


async def test_rows_that_are_not_to_be_had(asker: Asker, host: ShardSupervisor) -> None:
    asker.link.send(RowAsk(1, 0, 0))
    with pytest.raises(SessionGone):
        await asker.unwrapped()
    await open_ends(asker, host)
    asker.link.send(RowAsk(1, 0, 0))
    with pytest.raises(BadRequest, match="not among them"):
        await asker.unwrapped()
    await stepped(asker, 0, 0, IDS)
    for position in (0, 3, 2**32 - 1):
        asker.link.send(RowAsk(1, 0, position))
        with pytest.raises(BadRequest, match="not among them"):
            await asker.unwrapped()
    asker.link.send(RowAsk(1, 0, 2))
    row = await asker.unwrapped()
    assert isinstance(row, Result)
    assert row.tensor.shape == (1, 1, VOCAB)


async def test_a_session_without_candidates_has_no_rows(
    asker: Asker, host: ShardSupervisor
) -> None:
    await asker.open(
        1,
        weights_sha256=next(iter(host.shards.values())).descriptor.weights_sha256,
        start=2,
        stop=4,
    )
    asker.link.send(RowAsk(1, 0, 0))
    with pytest.raises(BadRequest, match="no row to give"):
        await asker.unwrapped()
