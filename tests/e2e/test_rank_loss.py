"""Ranks are lost under eight running streams: these go on with the tokens of the oracle.

Just what no live rank holds comes from outside, whoever gives it, and weighs what it did.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from losses import (
    PROMPTS,
    Elastic,
    asked,
    digests,
    experts_model,
    minimum,
    other_weights,
    pulled,
)
from sampling import covering, pairs
from stage import Stage, answer, eventually, status_of

from clients.engine import EngineClient
from clients.errors import CallFailed
from engine_service.core.update_request import Phase
from seedrelay.v1 import engine_pb2

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
RATE = 1 << 18
"""Bytes per second of an update: it takes seconds to stage."""


class Cell(NamedTuple):
    """What is lost, how, when, and where it comes from."""

    experts: int
    redundant: str
    source: str
    by: signal.Signals
    when: str


REPLICAS = {"none": 0.0, "part": 0.5, "all": 1.0}
"""Slots beside one for each expert, by expert: with one more, everything has a replica."""
CELLS = [
    Cell(*one)
    for one in itertools.product(
        (8, 64), REPLICAS, ("relay", "disk"), (KILL, STOP), ("one", "two", "second", "staging")
    )
    # Where slots of others suffice a recovery takes milliseconds: nothing comes in between.
    if one[1] == "none" or one[4] != "second"
]
SAMPLE = covering(CELLS, {cell: pairs(cell) for cell in CELLS})
"""Every pair of values that occurs."""


def _named(cell: Cell) -> object:
    marks = () if cell in SAMPLE else pytest.mark.full
    name = f"{cell.experts}-{cell.redundant}-{cell.source}-{cell.by.name}-{cell.when}"
    return pytest.param(cell, id=name, marks=marks)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable]:
    """Gives the engine of a cell, which cells that follow each other share; it ends cleanly."""
    present: dict[tuple, Elastic] = {}

    def close() -> None:
        for scene in present.values():
            processes = scene.engine.processes()
            mapped = "".join(Path(f"/proc/{one}/maps").read_text() for one in processes)
            assert "/dev/shm" not in mapped, "that would outlive a rank that is killed"  # noqa: S108
            scene.stage.close()
            assert scene.engine.process.returncode == 0
            assert not [one for one in processes if Path(f"/proc/{one}").exists()]
        present.clear()

    async def scene(cell: Cell) -> Elastic:
        key = cell[:3]
        if key not in present:
            close()
            folder = tmp_path_factory.mktemp("losses")
            oracle = experts_model(folder / "model", cell.experts)
            other_weights(oracle, folder / "update")
            more = str(int(cell.experts * REPLICAS[cell.redundant]))
            flags = "--redundant-experts", more
            made = Elastic(Stage(folder), oracle, *flags, others=cell.source == "relay")
            present[key] = made
            await made.ready()
        return present[key]

    yield scene
    close()


@pytest.mark.parametrize("cell", [*map(_named, CELLS)])
async def test_ranks_are_lost(cell: Cell, scenes: Callable[[Cell], Awaitable[Elastic]]) -> None:
    """S67: tokens, weights and what was pulled are what they must be; nobody hangs."""
    scene = await scenes(cell)
    before = await scene.found()
    streams = await scene.streams()
    updating = await _staging(scene) if cell.when == "staging" else None
    lost = [1, 3] if cell.when == "two" else [2]
    gone = await scene.lose(*lost, by=cell.by)
    if cell.when == "second":
        held = await scene.found()
        gone += await scene.lose(0, by=cell.by)
        lost = [2, 0]
        assert len(held.map.layers[0].groups) == 3, "it had recovered by then"
    after = await scene.whole()
    if updating:
        with pytest.raises(CallFailed, match="rank"):
            await updating
    await scene.go_on(streams)
    assert digests(after) == digests(before)
    came = pulled(after.last_report)
    assert len(came) == len(set(came)), "a unit came twice"
    assert set(came) == minimum(before, lost)
    if (cell.redundant, cell.when) == ("all", "one"):
        assert not came
    giver = "relay:other" if cell.source == "relay" else f"disk:{scene.oracle.folder}"
    assert {one.source for one in after.last_report.pulled} <= {giver}
    whole, fresh = asked(PROMPTS[0], 24), scene.other
    assert await answer(scene.engine, whole) == scene.expected(PROMPTS[0], 24)
    assert not fresh or await answer(fresh, whole) == scene.expected(PROMPTS[0], 24)
    await eventually(lambda: not [one for one in gone if Path(f"/proc/{one}").exists()])
    await scene.restore()


async def _staging(scene: Elastic) -> asyncio.Task[None]:
    """Begins an update; returns once some of it is staged."""
    folder = str(scene.oracle.folder.with_name("update"))
    source = {"folder": folder, "rate_limit_bytes_per_second": RATE}
    wanted = engine_pb2.WeightUpdate(weight_version="v1", source={"disk": source})

    async def update() -> None:
        async with EngineClient(scene.engine.address) as client:
            async for _ in client.update(engine_pb2.UpdateWeightsRequest(update=wanted)):
                pass

    updating = asyncio.create_task(update())

    async def staging() -> bool:
        assert not updating.done()
        update = (await status_of(scene.engine)).update
        return update.phase == Phase.STAGING and update.bytes_done > 0

    await eventually(staging)
    return updating
