"""An engine of four ranks that are lost under running streams, and what must be true of it then."""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import torch
from oracles import Oracle, make
from stage import READY, Stage, answer, eventually, reach, seedrelay, status_of

from clients.engine import EngineClient
from clients.launch import Service
from engine_service.checkpoint.tokenizer import byte_tokenizer
from seedrelay.v1 import engine_pb2

GROUPS = 4
STREAMS = 8
TOKENS = 120
COLLECTIVE_SECONDS = 5
DECIDED_SECONDS = 2 * COLLECTIVE_SECONDS + 15
"""Within twice the collective timeout a rank that hangs is found; a busy machine adds to it."""
WHOLE_SECONDS = 60.0
PROMPTS = [[3 + n, 1, 4, 1, 5 + n, 9, 2, 6] for n in range(STREAMS)]
EXPERT_BYTES = 3 * 64 * 32 * 4
"""Of one expert: gate, up and down, of the sizes in `oracles`, in float32."""
WHOLE = engine_pb2.MEMBERSHIP_STATE_WHOLE
HELD = engine_pb2.MEMBERSHIP_STATE_HELD
Units = set[tuple[str, int]]
"""Names and bytes."""


def experts_model(folder: Path, experts: int = 8) -> Oracle:
    """Makes a model of one dense layer and two with routed and shared experts."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 320, "max_position_embeddings": 1024, "n_routed_experts": experts}
    oracle = make("dots1", folder, **sizes)
    byte_tokenizer(256).tokenizer.save(str(folder / "tokenizer.json"))
    return oracle


@torch.no_grad()
def other_weights(oracle: Oracle, folder: Path) -> Oracle:
    """Writes the same model with other weights."""
    model, dice = copy.deepcopy(oracle.model), torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=dice), alpha=0.1)
    shutil.copytree(oracle.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model.save_pretrained(folder, max_shard_size="100KB")
    shutil.copy(oracle.folder / "config.json", folder)
    return Oracle(folder, model)


def asked(prompt: list[int], count: int = TOKENS) -> engine_pb2.GenerateRequest:
    """Asks for just so many tokens."""
    return engine_pb2.GenerateRequest(
        tokens=engine_pb2.TokenPrompt(token_ids=prompt),
        sampling=engine_pb2.SamplingParams(max_tokens=count, ignore_eos=True),
    )


def minimum(found: engine_pb2.GetExpertMapResponse, lost: Iterable[int]) -> Units:
    """Returns the units that no group holds but those that are lost."""
    units, gone = set(), set(lost)
    for layer in found.map.layers:
        living = [group for number, group in enumerate(layer.groups) if number not in gone]
        left = set(range(found.map.expert_count)).difference(*(g.experts for g in living))
        units |= {(f"layer.{layer.layer}.expert.{e}", EXPERT_BYTES) for e in left}
    return units


def pulled(report: engine_pb2.ExpertReport) -> list[tuple[str, int]]:
    """Returns what came from outside."""
    return [(one.unit, one.bytes) for one in report.pulled]


def digests(found: engine_pb2.GetExpertMapResponse) -> dict[int, list[bytes]]:
    """Returns the digest of each expert, by layer."""
    return {layer.layer: list(layer.digests) for layer in found.map.layers}


def memory_files(service: Service) -> int:
    """Counts the memory files that a service holds open or has mapped."""
    process, found = Path(f"/proc/{service.pid}"), 0
    for one in process.joinpath("fd").iterdir():
        try:
            found += one.readlink().name.startswith("memfd:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found + process.joinpath("maps").read_text().count("/memfd:")


class Elastic:
    """One engine that outlives its ranks, and whoever else holds its weights."""

    def __init__(self, stage: Stage, oracle: Oracle, *flags: str, others: bool = False) -> None:
        self.stage, self.oracle = stage, oracle
        self.relay = stage.relay()
        self.engine = self.start("--ep", str(GROUPS), *flags)
        self.other = self.plain("--ep", "2", "--instance-name", "other") if others else None
        self._greedy = [list[int]() for _ in PROMPTS]

    def start(self, *flags: str) -> Service:
        """Starts an engine whose ranks may be lost."""
        recover = () if "--on-rank-loss" in flags else ("--on-rank-loss", "recover")
        spares = () if "--spare-ranks" in flags else ("--spare-ranks", "0")
        patience = "--collective-timeout", str(COLLECTIVE_SECONDS)
        return self.plain(*recover, *spares, *patience, *flags)

    def plain(self, *flags: str) -> Service:
        """Starts an engine of the same weights."""
        common = "--dtype", "float32", "--relay", self.relay.address
        return self.stage.engine(self.oracle.folder, *common, *flags)

    async def ready(self) -> None:
        """Waits for all."""
        known = [await reach(one) for one in (self.engine, self.other) if one]
        ranks = sum(len(status.ranks) for status in known)
        self.files = memory_files(self.engine), 2 * ranks  # the relay holds and maps each
        await eventually(lambda: self._files == self.files)
        self.first = await self.found()

    def expected(self, prompt: list[int], count: int = TOKENS) -> list[int]:
        """What the oracle says to one of `PROMPTS`."""
        if len(self._greedy[0]) < count:
            self._greedy = self.oracle.continued(PROMPTS, count)
        return self._greedy[PROMPTS.index(prompt)][:count]

    async def found(self) -> engine_pb2.GetExpertMapResponse:
        """Returns the expert map."""
        async with EngineClient(self.engine.address) as client:
            return await client.expert_map()

    @property
    def _files(self) -> tuple[int, int]:
        return memory_files(self.engine), memory_files(self.relay)

    async def streams(self) -> list[asyncio.Task[list[int]]]:
        """Starts eight answers; returns once all of them run."""
        streams = [asyncio.create_task(answer(self.engine, asked(one))) for one in PROMPTS]

        async def all_run() -> bool:
            return (await status_of(self.engine)).running == STREAMS

        await eventually(all_run)
        assert not any(stream.done() for stream in streams)
        return streams

    async def go_on(self, streams: list[asyncio.Task[list[int]]]) -> None:
        """Every answer is whole, and the oracle's."""
        async with asyncio.timeout(WHOLE_SECONDS):
            answers = await asyncio.gather(*streams)
        assert answers == [self.expected(one) for one in PROMPTS]

    async def lose(self, *ranks: int, by: signal.Signals) -> list[int]:
        """Does something to ranks; returns their processes once it is decided who lives."""
        membership = (await status_of(self.engine)).membership
        pids = [membership.members[rank].pid for rank in ranks]
        for pid in pids:
            os.kill(pid, by)

        async def decided() -> bool:
            now = (await status_of(self.engine)).membership
            return not {one.pid for one in now.members} & set(pids)

        await eventually(decided, DECIDED_SECONDS)
        return pids

    async def whole(self) -> engine_pb2.GetExpertMapResponse:
        """Waits until nothing is lost any more, and nobody works at it."""

        async def recovered() -> bool:
            status = await status_of(self.engine)
            assert status.state != 0, status.reason
            now = status.membership
            return now.state == WHOLE and status.state == READY and not now.HasField("progress")

        await eventually(recovered, WHOLE_SECONDS)
        return await self.found()

    async def restore(self) -> None:
        """Puts the experts back where they were; nothing is left of those that were lost."""
        if len((await self.found()).map.layers[0].groups) < GROUPS:
            scaled = await asyncio.to_thread(
                seedrelay, "experts", "scale", self.engine.address, "--ep", str(GROUPS)
            )
            assert scaled.status == 0, scaled.err
        async with EngineClient(self.engine.address) as client:
            await client.set_expert_map(self.first.map.layers)
        status, there = await status_of(self.engine), ()

        def tidy() -> bool:
            nonlocal there
            there = *self._files, sorted(self.engine.processes()[1:])
            return there == wanted

        wanted = *self.files, sorted(one.pid for one in status.membership.members)
        try:
            await eventually(tidy)
        except AssertionError:
            raise AssertionError(f"left behind: {there}, not {wanted}") from None
