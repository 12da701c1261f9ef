"""A byte that flips in the memory of a rank is found, named and forgiven, by the command."""

from __future__ import annotations

import asyncio
from typing import Any

from stage import Fleet, Result, Stage, answer, flip, reach, seedrelay

from clients.engine import EngineClient
from clients.launch import Service
from clients.relay import RelayClient
from relay_service.core.manifest import TensorEntry
from seedrelay.v1 import engine_pb2

TENSOR = "layer.2.gate_up"


async def _check(engine: Service, *arguments: str, status: int = 0) -> Any:
    done = await _run(engine, *arguments, "--json")
    assert done.status == status, done.err
    return done.json()


async def _run(engine: Service, *arguments: str) -> Result:
    return await asyncio.to_thread(seedrelay, "check", "--engine", engine.address, *arguments)


async def _equal(engine: Service, mode: engine_pb2.CheckMode, against: str = "") -> bool:
    async with EngineClient(engine.address) as client:
        request = engine_pb2.CheckWeightsRequest(mode=mode, against=against)
        return (await client.check(request)).equal


async def _entry(fleet: Fleet, instance: str, generation: str) -> tuple[TensorEntry, range]:
    async with RelayClient(fleet.relay.address) as relay:
        manifest = await relay.manifest(instance, generation, 0)
    (entry,) = [one for unit in manifest.units for one in unit.tensors if one.name == TENSOR]
    return entry, manifest.blocks_at(entry.offset, entry.nbytes)


async def test_a_byte_that_flipped_in_a_process(stage: Stage, fleet: Fleet) -> None:
    """Checked against what came, a snapshot and the seed; put right, all of them agree again."""
    target = stage.target(fleet.relay, "--instance-name", "checked")
    status = await reach(target)
    before = await answer(target)
    whole = await _check(target, "--tensors")
    assert whole["ranks"][0]["digest"] == status.ranks[0].digest
    assert (whole["equal"], whole["differences"], whole["epoch"]) == (True, [], 1)
    names = {one["name"]: one["digest"] for one in whole["ranks"][0]["tensors"]}
    assert {TENSOR, "rotary.cos", "rotary.sin"} < names.keys()
    assert (await _check(target, "--snapshot"))["equal"]

    entry, blocks = await _entry(fleet, status.instance, status.generation)
    pid, address = status.ranks[0].pid, status.ranks[0].arena_address + entry.offset
    flip(pid, address)
    (one,) = (await _check(target, status=1))["differences"]
    assert (one["rank"], one["tensor"], one["what"]) == (0, TENSOR, "contents")
    assert one["block"] in blocks
    assert one["expected"] == names[TENSOR] != one["found"]
    found = await _check(target, "--against", "seed", status=1)
    assert (0, TENSOR) in {(one["rank"], one["tensor"]) for one in found["differences"]}
    shown = await _run(target, "--compare")
    assert (shown.status, shown.err) == (1, "error: the weights differ: 1 found\n")
    assert f"{TENSOR}: contents, expected {names[TENSOR]}" in shown.out
    # What it says to hold is what it should hold, and the seed is whole.
    assert await _equal(fleet.seed, engine_pb2.CHECK_MODE_DIFF, "checked")

    flip(pid, address)
    assert await _equal(target, engine_pb2.CHECK_MODE_DIGEST)
    assert await _equal(target, engine_pb2.CHECK_MODE_COMPARE)
    assert await _equal(target, engine_pb2.CHECK_MODE_DIFF, "seed")
    assert await answer(target) == before


async def test_what_cannot_be_checked(fleet: Fleet) -> None:
    """Ends the command with the reason; asking for two things at once is wrong usage."""
    refused = await _run(fleet.seed, "--against", "nobody")
    assert refused.status == 1
    assert "nobody is not in the fleet" in refused.err
    assert (await _run(fleet.seed, "--snapshot", "--compare")).status == 2
