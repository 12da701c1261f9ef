"""How long does a busy engine take to say that it is alive, and how it is?

A real engine is asked by two methods, the standard `Check` and `GetStatus`, at a fixed
pace whatever the answers do, so that a stall counts for every probe that fell into it:

    idle       it serves nobody
    prefill    it reads a prompt as long as its context
    structure  it answers the first JSON Schema of its life, for which it makes tables
    loading    it starts: from its first line until it is READY, weights from disk

In every round an instance is started for `loading` and then asked for `structure`: of a real
model, which has a large tokenizer, and of one whose weights take long to read.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import table
from benchmarks.seed_impact import ready
from clients.channel import open_channel
from clients.engine import EngineClient
from clients.launch import Service
from engine_service.checkpoint import random_llama, smollm2
from engine_service.checkpoint.random_shape import ShapeWish
from seedrelay.v1 import engine_pb2, engine_pb2_grpc, weights_pb2

GOALS = {"health_p99_seconds_prefill": "< 0.5", "health_p99_seconds_loading": "< 0.5"}
COLUMNS = {
    "health_p99_seconds": "check p99 s", "health_p50_seconds": "check p50 s",
    "health_max_seconds": "check max s", "status_p50_seconds": "status p50 s",
    "status_p99_seconds": "status p99 s", "status_max_seconds": "status max s",
}  # fmt: skip
PACE_SECONDS = 0.02
LIMIT_SECONDS = 60.0
"""A probe without an answer in this time fails the benchmark."""
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Model:
    """A model to start."""

    name: str
    folder: Path


class Probes:
    """What the probes of one condition saw."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"health": [], "status": []}
        self.states: Counter[str] = Counter()

    async def run(self, address: str, over: asyncio.Future[Any]) -> None:
        """Probes until something is over. Raises what the first probe that fails does."""
        async with open_channel(address) as channel, asyncio.TaskGroup() as group:
            health = health_pb2_grpc.HealthStub(channel)
            engine = engine_pb2_grpc.EngineServiceStub(channel)

            async def check() -> None:
                asked = health_pb2.HealthCheckRequest()
                answer = await health.Check(asked, timeout=LIMIT_SECONDS)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    raise SystemExit("an engine that lives says that it does not")

            async def status() -> None:
                asked = engine_pb2.GetStatusRequest()
                answer = await engine.GetStatus(asked, timeout=LIMIT_SECONDS)
                self.states[weights_pb2.InstanceState.Name(answer.status.state)] += 1

            while not over.done():
                group.create_task(self._time("health", check))
                group.create_task(self._time("status", status))
                await asyncio.sleep(PACE_SECONDS)

    def row(self) -> table.Row:
        """Returns the figures of one round."""
        found: table.Row = {"probes": len(self.seconds["health"]), "states": dict(self.states)}
        for kind, seconds in self.seconds.items():
            found[f"{kind}_p50_seconds"] = statistics.median(seconds)
            found[f"{kind}_p99_seconds"] = statistics.quantiles(seconds, n=100, method="inclusive")[
                98
            ]
            found[f"{kind}_max_seconds"] = max(seconds)
        return found

    async def _time(self, kind: str, probe: Callable[[], Awaitable[None]]) -> None:
        begin = time.monotonic()
        await probe()
        self.seconds[kind].append(time.monotonic() - begin)


class Bench:
    """Engines that are probed, and the rows of what came of it."""

    def __init__(self, folder: Path, rounds: int, idle_seconds: float) -> None:
        self._folder = folder
        self._rounds = rounds
        self._idle_seconds = idle_seconds
        self._random = random.Random(7)  # noqa: S311 (prompts, not secrets)
        self.rows: list[table.Row] = []

    def starts(self, model: Model) -> None:
        """Measures the start of an engine, and its first structure, in every round."""
        for number in range(1, self._rounds + 1):
            with self._engine(model) as engine:
                self._measure(f"loading {model.name}", number, engine, ready)
                self._measure(f"structure {model.name}", number, engine, _structure)

    def serves(self, model: Model) -> None:
        """Measures an engine that is idle, and one that reads a long prompt, in turns."""
        with self._engine(model) as engine:
            asyncio.run(ready(engine))
            for number in range(1, self._rounds + 1):
                self._measure("idle", number, engine, self._idle)
                self._measure("prefill", number, engine, self._prefill)

    @contextmanager
    def _engine(self, model: Model) -> Iterator[Service]:
        arguments = ["engine", "--model", str(model.folder), "--listen", "127.0.0.1:0"]
        with Service([*arguments, "--grace", "0"], self._folder / "log") as engine:
            yield engine

    def _measure(
        self, method: str, number: int, engine: Service, work: Callable[[Service], Awaitable[None]]
    ) -> None:
        probes = Probes()

        async def measure() -> None:
            working = asyncio.ensure_future(work(engine))
            await probes.run(engine.address, working)
            await working

        began = time.monotonic()
        asyncio.run(measure())
        seconds = time.monotonic() - began
        self.rows.append({"method": method, "round": number, "seconds": seconds, **probes.row()})
        said = f"{method}, round {number} of {self._rounds}: {seconds:.1f} s"
        p99 = self.rows[-1]["health_p99_seconds"]
        print(f"{said}, check p99 {1000 * p99:.1f} ms", file=sys.stderr)

    async def _idle(self, _engine: Service) -> None:
        await asyncio.sleep(self._idle_seconds)

    async def _prefill(self, engine: Service) -> None:
        async with EngineClient(engine.address) as client:
            status = await client.status()
            count = status.limits.max_context_tokens - ANSWER_TOKENS
            prompt = [self._random.randrange(10, 4000) for _ in range(count)]
            request = engine_pb2.GenerateRequest(
                tokens=engine_pb2.TokenPrompt(token_ids=prompt),
                sampling=engine_pb2.SamplingParams(max_tokens=1),
            )
            async for _ in client.generate(request, LIMIT_SECONDS * 10):
                pass


async def _structure(engine: Service) -> None:
    request = engine_pb2.GenerateRequest(text="A person:")
    request.sampling.max_tokens = ANSWER_TOKENS
    request.sampling.structure.json_schema = '{"type": "object"}'
    async with EngineClient(engine.address) as client:
        async for _ in client.generate(request, LIMIT_SECONDS):
            pass


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures: p99 is the median of the rounds, of the least favourable model."""
    found: dict[str, float] = {}
    for condition in ("idle", "prefill", "structure", "loading"):
        methods = {row["method"] for row in rows if row["method"].split()[0] == condition}
        for kind in ("health", "status"):
            field = f"{kind}_p99_seconds"
            found[f"{field}_{condition}"] = max(table.median(rows, one, field) for one in methods)
        worst = [row["health_max_seconds"] for row in rows if row["method"] in methods]
        found[f"health_max_seconds_{condition}"] = max(worst)
    return found


def models(*, quick: bool, out: Path) -> list[Model]:
    """Makes or finds the models: a real one that serves too, and one that takes long to read."""

    def make(folder: Path | None, **wish: int) -> Path:
        shape = ShapeWish(**wish).shape("float32")
        return random_llama.make(
            random_llama.RandomLlama(shape=shape, dtype="float32"), folder
        ).path

    if quick:
        return [Model("tiny", make(out / "tiny", hidden_size=128, layers=4, vocab_size=4096))]
    real = Model("smollm2", smollm2.fetch("bfloat16").path)
    return [real, Model("2 GiB", make(None, size_bytes=2 << 30))]


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every condition")
    options = parser.parse_args()
    rounds, idle_seconds = (1, 0.5) if options.quick else (options.rounds, 10.0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        chosen = models(quick=options.quick, out=Path(name))
        bench = Bench(Path(name), rounds, idle_seconds)
        for model in chosen:
            bench.starts(model)
        bench.serves(chosen[0])
    settings = {
        "models": {model.name: model.folder.name for model in chosen}, "rounds": rounds,
        "pace_seconds": PACE_SECONDS, "seconds_whole": time.monotonic() - began,
        "loading": "from the line that says that it listens until READY; the files are in the "
        "page cache",
        "versions": table.versions("grpcio", "torch", "llguidance", "tokenizers"),
    }  # fmt: skip
    name = "health_latency_quick" if options.quick else "health_latency"
    table.write(name, settings, bench.rows, COLUMNS, figures(bench.rows), GOALS)


if __name__ == "__main__":
    main()
