"""What lies in an arena outlives the relay that filled it, and the engine that served from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from failures import RATE, halfway, held, relay_status, settles, writers
from stage import Stage, answer, eventually, flip, reach, seedrelay, status_of

from clients.launch import Service
from clients.relay import RelayClient
from relay_service.rpc import convert
from seedrelay.v1 import relay_pb2

BLOCK_BYTES = 1 << 20


async def test_a_relay_that_is_killed_in_the_middle_of_a_fill(
    stage: Stage, make_model: Callable[..., Path]
) -> None:
    """The target goes on by itself at the next relay, which finds what had landed."""
    model = make_model("cast", hidden_size=256, size_bytes=16 << 20, max_positions=256)
    relay = stage.relay()
    seed = stage.engine(model, "--relay", relay.address, "--instance-name", "seed")
    target = stage.target(relay, "--rate-limit", str(RATE))
    serves = await reach(seed)
    at = await halfway(relay, 50)
    relay.kill()
    again = stage.relay_again(relay)
    status = await reach(target)
    assert status.weights_digest == serves.weights_digest
    assert await answer(target) == await answer(seed)
    assert status.fill.blocks_reused >= at.bytes_verified // BLOCK_BYTES
    assert 0 < status.fill.bytes_moved <= at.bytes_total - at.bytes_verified
    assert status.fill.bytes_reread == 0
    assert writers(target, [again]) == [status.ranks[0].pid]


class Kept:
    """An engine that is killed and started again in the same way, and its relay."""

    def __init__(self, stage: Stage, model: Path, *arguments: str) -> None:
        self.stage = stage
        self.relay = stage.relay()
        self.folder = stage.folder / "model"
        shutil.copytree(model, self.folder)
        self.arguments = (
            "--relay", self.relay.address, "--instance-name", "kept", "--weight-version", "v1",
            "--keep-arena", "60", *arguments,
        )  # fmt: skip

    def start(self, *arguments: str) -> Service:
        """Starts it."""
        return self.stage.engine(self.folder, *self.arguments, *arguments)

    async def kill(self, engine: Service) -> relay_pb2.KeptArena:
        """Kills it once its relay knows what it serves; returns what that keeps then."""
        serves = (await status_of(engine)).weights_digest
        await eventually(lambda: self._serves(serves))
        engine.kill()
        await eventually(self._kept)
        (kept,) = await self._kept()
        return kept

    def forget_weights(self) -> None:
        """Leaves a folder from which nobody can read weights."""
        for file in self.folder.glob("*.safetensors"):
            file.unlink()

    async def _serves(self, digest: str) -> bool:
        listed = (await relay_status(self.relay)).instances
        known = [convert.instance_from_proto(one) for one in listed]
        return ("kept", digest) in [(one.instance, one.weights.digest) for one in known]

    async def _kept(self) -> list[relay_pb2.KeptArena]:
        return list((await relay_status(self.relay)).kept_arenas)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_an_engine_that_is_killed_and_started_again(
    stage: Stage, make_model: Callable[..., Path], model: Path, tp: int
) -> None:
    """It serves what it served last, without disk or transfer, and its relay keeps no more."""
    new = make_model("newer", seed=5, hidden_size=128, layers=4, vocab_size=4096)
    scene = Kept(stage, model, "--tp", str(tp), "--model-root", str(new.parent))
    first = scene.start()
    before = await reach(first)
    assert before.ranks[0].HasField("load")
    old = await answer(first)
    mapped = held(scene.relay)[scene.relay.pid]
    done = seedrelay(
        "update", "--engine", first.address, "--from", f"disk:{new.name}", "--version", "v2"
    )
    assert done.status == 0, done.err
    tokens, updated = await answer(first), await reach(first)
    assert tokens != old
    kept = await scene.kill(first)
    assert (kept.instance, kept.weight_version) == ("kept", "v2")
    scene.forget_weights()
    again = scene.start()
    status = await reach(again)
    assert await answer(again) == tokens
    assert status.weights_digest == updated.weights_digest
    assert (status.weight_version, status.epoch) == ("v2", updated.epoch)
    assert status.generation != before.generation
    assert status.fill.bytes_moved == 0
    assert not any(rank.HasField("load") for rank in status.ranks)
    assert all(rank.sealed for rank in status.ranks)
    assert not (await relay_status(scene.relay)).kept_arenas
    await settles(lambda: held(scene.relay)[scene.relay.pid], mapped)
    if tp == 1:
        assert writers(again, [scene.relay]) == [status.ranks[0].pid]


async def test_a_kept_byte_that_is_wrong(stage: Stage, model: Path) -> None:
    """It's never served: the block that it lies in, and no other, comes from another instance."""
    scene = Kept(stage, model, "--load-format", "dummy")
    other = stage.engine(
        model, "--relay", scene.relay.address, "--instance-name", "other", "--weight-version", "v1"
    )
    good = await reach(other)
    first = scene.start()
    status = await reach(first)
    async with RelayClient(scene.relay.address) as relay:
        manifest = await relay.manifest("kept", status.generation, 0)
    block = manifest.block(manifest.block_count // 2)
    flip(status.ranks[0].pid, status.ranks[0].arena_address + block.offset)
    await scene.kill(first)
    again = scene.start()
    status = await reach(again)
    assert status.weights_digest == good.weights_digest
    assert await answer(again) == await answer(other)
    assert (status.fill.bytes_moved, status.fill.blocks_reused) == (
        block.nbytes, manifest.block_count - 1,
    )  # fmt: skip
    assert f"{manifest.block_count - 1} of {manifest.block_count} blocks" in again.log_tail()


@pytest.mark.full
async def test_a_target_that_is_killed_in_the_middle_of_a_fill(
    stage: Stage, make_model: Callable[..., Path]
) -> None:
    """Started again, it is sent what had not come."""
    model = make_model("cast", hidden_size=256, size_bytes=16 << 20, max_positions=256)
    scene = Kept(stage, model, "--load-format", "dummy", "--rate-limit", str(RATE))
    seed = stage.engine(model, "--relay", scene.relay.address, "--instance-name", "seed")
    good = await reach(seed)
    first = scene.start()
    at = await halfway(scene.relay, 50)
    first.kill()
    status = await reach(scene.start())
    assert status.weights_digest == good.weights_digest
    assert status.fill.blocks_reused >= at.bytes_verified // BLOCK_BYTES
    assert 0 < status.fill.bytes_moved <= at.bytes_total - at.bytes_verified


async def test_what_is_forgotten_or_unfit_is_loaded(stage: Stage, model: Path) -> None:
    """Without what was kept an engine starts as ever, and an operator can have it so."""
    scene = Kept(stage, model)
    first = scene.start()
    before = await reach(first)
    await scene.kill(first)
    shown = seedrelay("status", scene.relay.address)
    assert "  kept kept  v1  " in shown.out
    unfit = scene.start("--dtype", "bfloat16")
    status = await reach(unfit)
    assert status.weights_digest != before.weights_digest
    assert status.ranks[0].HasField("load")
    assert "dtype: seed float32, target bfloat16" in unfit.log_tail()
    assert unfit.stop() == 0
    forgotten = seedrelay("forget", "kept", "--relay", scene.relay.address)
    assert (forgotten.status, forgotten.out) == (0, "the arena of kept is kept no longer\n")
    assert seedrelay("forget", "kept", "--relay", scene.relay.address).status == 1
    assert held(scene.relay)[scene.relay.pid]["memfd"] == 0
