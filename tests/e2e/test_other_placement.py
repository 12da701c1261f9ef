"""Targets of another number of ranks: filled with weights that are cut anew, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failures import RATE, halfway, start_pull
from stage import DUMMY, Stage, answer, reach, request, seedrelay, status_of

from clients.launch import Service
from seedrelay.v1 import engine_pb2


@pytest.fixture
def model_of(make_model: Callable[..., Path]) -> Callable[[str], Path]:
    """Returns the folder of a float32 model by name; one has a tied head."""

    def folder(name: str) -> Path:
        wish: dict[str, Any] = {"hidden_size": 128, "layers": 4, "vocab_size": 4096}
        return make_model(name, **wish, tied=name == "tied")

    return folder


async def _pull(relay: Service, target: Service, *options: str) -> dict[str, Any]:
    """Fills a dummy as an operator would; returns the report."""
    pulled = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address, "--json", *options
    )
    assert pulled.status == 0, pulled.err
    return pulled.json()


def _same_weights(one: engine_pb2.EngineStatus, other: engine_pb2.EngineStatus) -> bool:
    ranks = [[rank.digest for rank in status.ranks] for status in (one, other)]
    assert all(all(each) for each in ranks)
    return ranks[0] == ranks[1] and one.weights_digest == other.weights_digest


@pytest.mark.parametrize(
    ("name", "held", "wanted", "transport"),
    [
        ("even", 1, 2, "grpc"),
        pytest.param("tied", 2, 1, "shm", marks=pytest.mark.full),
        pytest.param("even", 2, 1, "grpc", marks=pytest.mark.full),
        pytest.param("even", 4, 2, "shm", marks=pytest.mark.full),
        pytest.param("tied", 1, 4, "shm", marks=pytest.mark.full),
    ],
)
async def test_another_number_of_ranks_is_filled(
    stage: Stage, model_of: Callable[[str], Path], name: str, held: int, wanted: int,
    transport: str,
) -> None:  # fmt: skip
    """The target equals one that read the model from disk, to the digest and to the token.

    Nothing in it has moved, its report says what was done, and it seeds its like.
    """
    folder, relay, ranks = model_of(name), stage.relay(), ("--tp", str(wanted))
    fresh = stage.engine(folder, *ranks)
    right = await reach(fresh)
    expected = await answer(fresh, request(max_tokens=24))
    fresh.stop()
    seed = stage.engine(
        folder, "--tp", str(held), "--relay", relay.address, "--weight-version", "v7"
    )
    seeded = await reach(seed)
    target = stage.engine(folder, *ranks, "--load-format", "dummy", "--instance-name", "first")
    before = await reach(target, DUMMY)
    listed = await asyncio.to_thread(
        seedrelay, "sources", "--relay", relay.address, "--for", target.address
    )
    words = f"tensor_parallel_size: seed {held}, target {wanted}"
    assert f"v7  fits if its weights can be cut anew: {words}" in listed.out
    report = await _pull(relay, target, "--transport", transport)
    filled = await reach(target)
    assert [(step["recut"], step["reason"]) for step in report["path"]] == [(words, "complete")]
    assert report["bytes_reread"] == 0
    assert report["source_weights_digest"] == seeded.weights_digest
    assert report["weights_digest"] == filled.weights_digest
    assert filled.fill.path[0].recut == words
    assert _same_weights(filled, right)
    assert filled.weight_version == "v7"
    assert [r.arena_address for r in filled.ranks] == [r.arena_address for r in before.ranks]
    assert all(rank.sealed for rank in filled.ranks)
    assert await answer(target, request(max_tokens=24)) == expected
    seed.stop()
    like = stage.target(relay, *ranks, model=folder)
    assert _same_weights(await reach(like), right)
    assert (await status_of(like)).fill.path[0].recut == ""
    assert await answer(like, request(max_tokens=24)) == expected


@pytest.mark.full
async def test_a_format_that_cannot_be_cut_is_refused(
    stage: Stage, model_of: Callable[[str], Path]
) -> None:
    """A seed of two ranks does not fill a target of one in such a format; it says why."""
    folder, relay, packed = model_of("even"), stage.relay(), ("--weight-format", "int4")
    seed = stage.engine(folder, *packed, "--tp", "2", "--relay", relay.address)
    await reach(seed)
    target = stage.engine(folder, *packed, "--load-format", "dummy")
    await reach(target, DUMMY)
    refused = await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address, "--json"
    )
    assert refused.status == 1
    assert "tensor_parallel_size: seed 2, target 1" in refused.err
    assert "cannot be cut anew: it is packed" in refused.err
    assert "hint: start the target placed like a source" in refused.err
    error = refused.json()["error"]
    assert (error["code"], error["details"]["field"]) == ("FAILED_PRECONDITION", "placement")
    assert (await status_of(target)).state == DUMMY


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
async def test_a_host_that_is_killed(
    stage: Stage, make_model: Callable[..., Path], ranks: int
) -> None:
    """Another seed goes on, of the same placement with the rest, of another one from the start."""
    folder = make_model("cast", hidden_size=256, size_bytes=16 << 20, max_positions=256)
    there = stage.relay()
    here = stage.relay("--join", there.address, "--egress-limit", str(RATE))
    third = stage.relay("--join", there.address)  # from where neither is nearer
    fresh = stage.engine(folder)
    right = await reach(fresh)
    expected = await answer(fresh)
    fresh.stop()
    for name, count, relay in (("a", 2, here), ("b", ranks, there)):
        tp = ("--tp", str(count), "--instance-name", name)
        await reach(stage.engine(folder, *tp, "--relay", relay.address))
    target = stage.engine(folder, "--load-format", "dummy")
    await reach(target, DUMMY)
    filling = start_pull(target, third)
    await halfway(third, 30)
    here.kill()
    outcome = await filling
    assert (outcome.path[0][0], outcome.path[-1]) == ("a", ("b", "complete"))
    total = sum(step.bytes_verified for step in outcome.report.path)
    again = outcome.report.bytes_reread
    assert again == 0 if ranks == 2 else 0 < again < total
    assert _same_weights(await reach(target), right)
    assert await answer(target) == expected
