"""Experts that nobody holds are passed over: answers say so, and are what such a model says."""

from __future__ import annotations

import asyncio
import copy
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from losses import HELD, PROMPTS, Elastic, asked, experts_model, minimum
from oracles import Oracle
from stage import Stage, answer, eventually, seedrelay, status_of

from clients.engine import EngineClient
from clients.errors import CallFailed
from seedrelay.v1 import engine_pb2

ROUTED = engine_pb2.MEMBERSHIP_STATE_ROUTED


@torch.no_grad()
def _without(oracle: Oracle, lost: dict[int, list[int]]) -> Oracle:
    """Returns a model whose routers choose none of some experts."""
    model = copy.deepcopy(oracle.model)
    for layer, experts in lost.items():
        model.model.layers[layer].mlp.gate.e_score_correction_bias[experts] = -torch.inf
    return Oracle(oracle.folder, model)


async def _tokens(
    chunks: AsyncIterator[engine_pb2.GenerateResponse], into: list[tuple[int, bool]]
) -> None:
    async for chunk in chunks:
        into += [(token, chunk.degraded) for token in chunk.token_ids]


async def test_lost_experts_are_passed_over(stage: Stage, tmp_path: Path) -> None:
    """One answer is healthy, marked, and healthy again; each token is what its model says."""
    oracle = experts_model(tmp_path / "model")
    scene = Elastic(stage, oracle, "--on-rank-loss", "degrade", "--lost-experts", "route")
    await scene.ready()
    before, prompt, said = await scene.found(), PROMPTS[0], []
    async with EngineClient(scene.engine.address) as client, asyncio.TaskGroup() as tasks:
        wanted = asked(prompt, 400)
        refusing = asked(PROMPTS[1], 400)
        refusing.refuse_degraded = True
        tasks.create_task(_tokens(client.generate(wanted), said))
        refused = asyncio.create_task(answer(scene.engine, refusing))
        await eventually(lambda: len(said) > 5)
        await scene.lose(2, by=signal.SIGKILL)
        with pytest.raises(CallFailed, match="experts are lost") as gone:
            await refused
        assert gone.value.code == "UNAVAILABLE"
        await eventually(lambda: any(marked for _, marked in said))
        membership = (await status_of(scene.engine)).membership
        assert membership.state == ROUTED
        lost = {one.layer: list(one.experts) for one in membership.lost}
        masked = _without(oracle, lost)
        shown = await asyncio.to_thread(
            seedrelay, "generate", "--engine", scene.engine.address, "--json", "--max-tokens", "5",
            "--ignore-eos", "seed",
        )  # fmt: skip
        assert (shown.status, shown.json()["degraded"]) == (0, True)
        assert await answer(scene.engine, asked(PROMPTS[2], 24)) == masked.greedy(PROMPTS[2], 24)
        with pytest.raises(CallFailed, match="experts are lost"):
            await answer(scene.engine, refusing)
        recovered = await asyncio.to_thread(
            seedrelay, "experts", "recover", scene.engine.address, "--json"
        )
        assert recovered.status == 0, recovered.err
        units = {(one["unit"], one["bytes"]) for one in recovered.json()["pulled"]}
        assert units == minimum(before, [2])
    _is_right(prompt, said, oracle, masked)
    assert await answer(scene.engine, asked(PROMPTS[2], 24)) == oracle.greedy(PROMPTS[2], 24)


def _is_right(
    prompt: list[int], said: list[tuple[int, bool]], healthy: Oracle, masked: Oracle
) -> None:
    assert said[-1][1], "the last message of an answer that is marked is not"
    marks = [marked for _, marked in said[:-1]]
    first, last = marks.index(True), len(marks) - marks[::-1].index(True)
    assert all(marks[first:last]), "an answer was whole in the midst of a loss"
    assert 0 < first < last < len(marks) == 399, "nothing came before, or nothing after"
    tokens = [token for token, _ in said]
    assert tokens[:first] == healthy.greedy(prompt, first)
    assert tokens[first:last] == masked.greedy(prompt + tokens[:first], last - first)
    assert tokens[last : last + 24] == healthy.greedy(prompt + tokens[:last], 24)


async def test_the_end_comes_during_a_recovery(stage: Stage, tmp_path: Path) -> None:
    """SIGTERM then ends all as ever: nobody waits for what is held, and no process is left."""
    scene = Elastic(stage, experts_model(tmp_path / "model"))
    await scene.ready()
    streams = await scene.streams()
    await scene.lose(2, by=signal.SIGKILL)
    assert (await status_of(scene.engine)).membership.state == HELD

    await eventually(lambda: len(scene.engine.processes()) == 5)  # the one in its place is there
    processes = scene.engine.processes()
    assert await asyncio.to_thread(scene.engine.stop) == 0
    assert not [one for one in processes if Path(f"/proc/{one}").exists()]
    await asyncio.gather(*streams, return_exceptions=True)
