"""Experts over several ranks: relayed, shown, moved under a running stream; whole or gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator

import pytest
from oracles import Oracle, make
from stage import DUMMY, Stage, answer, eventually, health, reach, refusal, request, seedrelay

from clients.engine import EngineClient
from clients.errors import CallFailed, ClientError
from clients.launch import Service
from engine_service.checkpoint.tokenizer import byte_tokenizer
from seedrelay.v1 import engine_pb2

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 200
NEW = [[7, 5, 2, 1, 4], [1, 3, 6, 4, 0]]
SERVICE = "seedrelay.v1.EngineService"
SPREAD = ("--ep", "2", "--redundant-experts", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A model of one dense layer and two with eight routed and two shared experts."""
    folder = tmp_path_factory.mktemp("experts")
    oracle = make("dots1", folder, vocab_size=320, max_position_embeddings=1024)
    byte_tokenizer(256).tokenizer.save(str(folder / "tokenizer.json"))
    return oracle


def _asked(max_tokens: int) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(
        tokens=engine_pb2.TokenPrompt(token_ids=PROMPT),
        sampling=engine_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def _command(*arguments: str) -> dict:
    done = await asyncio.to_thread(seedrelay, *arguments, "--json")
    assert done.status == 0, done.err
    return done.json()


def _layer(number: int) -> engine_pb2.LayerExperts:
    groups = [engine_pb2.GroupExperts(experts=held) for held in NEW]
    return engine_pb2.LayerExperts(layer=number, groups=groups)


async def _while_streaming(seed: Service) -> list[engine_pb2.GenerateResponse]:
    """Returns an answer in the midst of which the experts of a layer were moved."""
    async with EngineClient(seed.address) as client:
        stream = client.generate(_asked(LONG))
        chunks = [await anext(stream)]
        done, rest = await asyncio.gather(client.set_expert_map([_layer(1)]), _rest(stream))
    assert (done.layers_changed, done.epoch) == (1, 2)
    return chunks + rest


async def _rest(
    stream: AsyncIterator[engine_pb2.GenerateResponse],
) -> list[engine_pb2.GenerateResponse]:
    return [chunk async for chunk in stream]


async def test_experts_are_relayed_and_moved(stage: Stage, oracle: Oracle) -> None:
    """Tokens are the oracle's before, meanwhile and after; a map that was shown starts another."""
    relay = stage.relay()
    seed = stage.engine(oracle.folder, *SPREAD, "--relay", relay.address)
    bare = shutil.copytree(
        oracle.folder, stage.folder / "bare", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    target = stage.engine(bare, *SPREAD, "--load-format", "dummy")
    seeded, before = await reach(seed), await reach(target, DUMMY)
    await _command("pull", "--engine", target.address, "--relay", relay.address)
    filled = await reach(target)
    assert [rank.digest for rank in filled.ranks] == [rank.digest for rank in seeded.ranks]
    assert [r.arena_address for r in filled.ranks] == [r.arena_address for r in before.ranks]
    expected = oracle.greedy(PROMPT, 24)
    assert await answer(seed, _asked(24)) == await answer(target, _asked(24)) == expected
    whole = await answer(target, _asked(LONG))

    known = await _command("experts", "show", seed.address)
    chunks = await _while_streaming(seed)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole
    epochs = [span.epoch for span in chunks[-1].version_spans]
    assert epochs == [1, 2], "no tokens came before, or none after"
    file = stage.folder / "map.json"
    file.write_text(json.dumps({"layers": {"1": NEW, "2": NEW}}))
    done = await _command("experts", "set", seed.address, "--map", str(file))
    assert (done["layers_changed"], done["epoch"]) == (1, 3)
    shown = await _command("experts", "show", seed.address)
    assert (shown["layers"], shown["digests"]) == ({"1": NEW, "2": NEW}, known["digests"])
    file.write_text(json.dumps(shown))

    other = stage.target(relay, *SPREAD, "--expert-map", str(file), "--from", seeded.instance)
    filled, moved = await reach(other), await reach(seed)
    assert [rank.digest for rank in filled.ranks] == [rank.digest for rank in moved.ranks]
    assert filled.weights_digest == moved.weights_digest != seeded.weights_digest
    assert await answer(other, _asked(24)) == expected
    wrong = await asyncio.to_thread(
        seedrelay, "sources", "--relay", relay.address, "--for", target.address
    )
    assert "expert_map: seed" in wrong.out


async def test_a_rank_that_dies_while_experts_move(stage: Stage, oracle: Oracle) -> None:
    """The instance fails and says which; no token comes from what is half moved."""
    engine = stage.engine(oracle.folder, *SPREAD, "--collective-timeout", "600")
    status = await reach(engine)
    async with EngineClient(engine.address) as client:
        before = (await client.expert_map()).map
        os.kill(status.ranks[1].pid, signal.SIGSTOP)  # it gets its experts, and never gives any
        moving = asyncio.create_task(client.set_expert_map([_layer(1), _layer(2)]))
        tokens: list[int] = []

        async def read() -> None:
            async for chunk in client.generate(request(max_tokens=4)):
                tokens.extend(chunk.token_ids)

        reading = asyncio.create_task(read())
        assert (await client.expert_map()).map == before
        assert not moving.done()
        os.kill(status.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(CallFailed) as failed:
            await moving
        with pytest.raises(ClientError):
            await reading
    assert (failed.value.code, tokens) == ("UNAVAILABLE", [])

    async def not_serving() -> bool:
        return await health(engine, SERVICE) == "NOT_SERVING"

    await eventually(not_serving, seconds=2)
    assert (await refusal(engine, request())).code == "UNAVAILABLE"
    assert engine.wait() == 1
    assert "rank 1" in engine.log_tail()
