"""More and fewer groups of ranks, under running streams: an instance like any comes of it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from losses import PROMPTS, Elastic, asked, digests, experts_model, other_weights
from stage import Stage, answer, eventually, reach, seedrelay, status_of

from clients.launch import Service


async def _experts(*arguments: str, status: int = 0) -> dict[str, Any]:
    done = await asyncio.to_thread(seedrelay, "experts", *arguments, "--json")
    assert done.status == status, done.err
    return done.json()


async def _pids(engine: Service) -> list[int]:
    return [one.pid for one in (await status_of(engine)).membership.members]


async def test_scaled_up_and_down(stage: Stage, tmp_path: Path) -> None:
    """S16, S17, S63: sources, updates and losses go on as if it had been started so."""
    oracle = experts_model(tmp_path / "model")
    update = other_weights(oracle, tmp_path / "update")
    scene = Elastic(stage, oracle, "--ep", "2", "--spare-ranks", "1")
    await scene.ready()
    engine, before = scene.engine, await scene.found()
    first = await _pids(engine)
    await eventually(lambda: len(engine.processes()) == 1 + 2 + 1)
    (spare,) = set(engine.processes()[1:]) - set(first)

    streams = await scene.streams()
    up = await _experts("scale", engine.address, "--ep", "4")
    assert (up["ranks_started"], up["pulled"]) == (2, [])
    assert (await _pids(engine))[:3] == [*first, spare], "the one that stood ready was not taken"
    await scene.go_on(streams)
    assert digests(await scene.found()) == digests(before)
    await eventually(lambda: len(engine.processes()) == 1 + 4 + 1)

    shown = await _experts("show", engine.address)
    file = stage.folder / "map.json"
    file.write_text(json.dumps(shown))
    target = stage.target(
        scene.relay, "--ep", "4", "--redundant-experts", "8", "--expert-map", str(file),
        "--dtype", "float32", "--from", (await status_of(engine)).instance,
    )  # fmt: skip
    filled, serves = await reach(target), await reach(engine)
    assert [one.digest for one in filled.ranks] == [one.digest for one in serves.ranks]
    assert len({one.digest for one in filled.ranks}) == 4
    assert await answer(target, asked(PROMPTS[0], 24)) == scene.expected(PROMPTS[0], 24)
    target.stop()

    for version, weights in (("v1", update), ("v2", oracle), ("v3", update)):
        done = await asyncio.to_thread(
            seedrelay, "update", "--engine", engine.address, "--version", version,
            "--from", f"disk:{weights.folder}", "--json",
        )  # fmt: skip
        assert done.status == 0, done.err
        checked = await asyncio.to_thread(seedrelay, "check", "--engine", engine.address, "--json")
        assert (checked.status, len(checked.json()["ranks"])) == (0, 4)
        tokens = await answer(engine, asked(PROMPTS[0], 24))
        assert tokens == weights.greedy(PROMPTS[0], 24)

    running = asyncio.create_task(answer(engine, asked(PROMPTS[1], 200)))
    down = await _experts("scale", engine.address, "--ep", "2")
    assert (down["ranks_started"], down["pulled"]) == (0, [])
    assert await running == update.greedy(PROMPTS[1], 200)
    assert await _pids(engine) == first
    error = (await _experts("scale", engine.address, "--ep", "1", status=1))["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "cannot hold 8 experts" in error["message"]
    decided = (await status_of(engine)).membership.epoch

    await scene.lose(1, by=signal.SIGKILL)  # whose experts have left with those of before

    async def held() -> bool:
        return (await status_of(engine)).membership.epoch > decided

    await eventually(held)
    assert await asyncio.to_thread(engine.stop) == 0
