"""What do the seed's own streams feel while somebody pulls its weights?

A real seed streams the same answers in every condition, in interleaved rounds; the gaps
between their tokens are measured while a puller fills one arena again and again:

    idle                   nobody pulls
    capped_shm, _grpc      pulls at 64 MiB/s, by its own relay or by another host's
    uncapped_shm, _grpc    pulls as fast as they go

The seed computes on one thread. On a machine of two cores the other one is shared by
its front, the relays and this benchmark, so uncapped pulls are bound to be felt there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import table
from benchmarks.seed_puller import be_puller
from clients.engine import EngineClient
from clients.launch import LaunchError, Service
from engine_service.checkpoint import random_llama, smollm2
from engine_service.checkpoint.random_shape import ShapeWish
from seedrelay.v1 import engine_pb2, weights_pb2

GOALS = {"p99_capped_over_idle": "<= 1.1"}
COLUMNS = {
    "p99_ms": " p99 ms", "p50_ms": " p50 ms", "tokens_per_second": "tokens/s",
    "relay_mib_per_second": "relay MiB/s", "relay_cpu_share": "relay CPU share",
}  # fmt: skip
CAP = 64 << 20
STREAMS = 2
LOAD_SECONDS = 10.0
"""Time in which a pull must have begun to move bytes."""
READY_SECONDS = 120.0


@dataclass
class Load:
    """A condition: who pulls, and how fast. Nobody, when there is no puller."""

    name: str
    puller: Connection | None = None
    limit: int = 0

    def begin(self) -> None:
        """Starts to pull; returns when bytes move. Raises `SystemExit` when none do."""
        if self.puller:
            self.puller.send(self.limit)
            self._expect("moving", LOAD_SECONDS)

    def end(self) -> tuple[int, float]:
        """Stops pulling; returns bytes that landed and in how many seconds."""
        if not self.puller:
            return 0, 1.0
        self.puller.send(None)
        moved, seconds = self._expect("moved", LOAD_SECONDS)
        return int(moved), float(seconds)

    def _expect(self, what: str, seconds: float) -> list[float]:
        if self.puller and self.puller.poll(seconds):
            with contextlib.suppress(EOFError):
                said, *numbers = self.puller.recv()
                if said == what:
                    return list(numbers)
        raise SystemExit(f"{self.name}: the puller does not say {what}")


class Bench:
    """A seed that streams, and the loads that are put on it."""

    def __init__(self, model: Path, folder: Path, tokens: int, stack: ExitStack) -> None:
        listen = ["relay", "--listen", "127.0.0.1:0"]
        near = stack.enter_context(Service(listen, folder / "near.log"))
        far = stack.enter_context(Service([*listen, "--join", near.address], folder / "far.log"))
        arguments = (
            "engine", "--model", str(model), "--listen", "127.0.0.1:0", "--relay", near.address,
            "--instance-name", "seed", "--threads", "1", "--kv-cache-tokens", "8192",
        )  # fmt: skip
        self.seed = stack.enter_context(Service([*arguments], folder / "seed.log"))
        asyncio.run(ready(self.seed))
        self._relays = [near.pid, far.pid]
        self._tokens = tokens
        self.loads = [Load("idle")]
        for limit, name in ((CAP, "capped"), (0, "uncapped")):
            for transport, relay in (("shm", near), ("grpc", far)):
                _, pipe, _ = stack.enter_context(table.peer(be_puller, relay.address, transport))
                self.loads.append(Load(f"{name}_{transport}", pipe, limit))

    def run(self, rounds: int) -> list[table.Row]:
        """Measures every load in every round; the first one warms up and does not count."""
        rows = []
        for number in range(rounds + 1):
            for load in self.loads:
                rows.append(self._measure(load, number))
                said = f"{load.name}, round {number} of {rounds}: p99 {rows[-1]['p99_ms']:.1f} ms"
                print(said, file=sys.stderr)
        return [row for row in rows if row["round"]]

    def _measure(self, load: Load, number: int) -> table.Row:
        load.begin()
        began, cpu = time.monotonic(), table.cpu_seconds(self._relays)
        try:
            gaps = asyncio.run(self._stream())
        finally:
            seconds = time.monotonic() - began
            cpu = table.cpu_seconds(self._relays) - cpu
            moved, loaded = load.end()
        rate = moved / loaded / (1 << 20)
        if load.puller and not 0 < moved / loaded <= 1.2 * (load.limit or 1 << 50):
            raise SystemExit(f"{load.name}: {rate:.0f} MiB/s is not the load that was asked for")
        return {
            "method": load.name, "round": number, "tokens": len(gaps),
            "p50_ms": 1000 * statistics.median(gaps),
            "p99_ms": 1000 * statistics.quantiles(gaps, n=100)[98],
            "tokens_per_second": len(gaps) / seconds, "relay_mib_per_second": rate,
            "relay_cpu_share": cpu / seconds,
        }  # fmt: skip

    async def _stream(self) -> list[float]:
        streams = await asyncio.gather(*(self._gaps(n) for n in range(STREAMS)))
        return [gap for gaps in streams for gap in gaps]

    async def _gaps(self, number: int) -> list[float]:
        """Returns the seconds between the messages of one answer, a token each."""
        request = engine_pb2.GenerateRequest(text=f"Count from {number} to a thousand.")
        request.sampling.max_tokens, request.sampling.ignore_eos = self._tokens, True
        stamps: list[float] = []
        async with EngineClient(self.seed.address) as client:
            async for message in client.generate(request, READY_SECONDS):
                stamps += [time.monotonic()] * bool(message.token_ids)
        return [after - before for before, after in pairwise(stamps)]


async def ready(engine: Service) -> None:
    """Waits until an engine serves. Raises `LaunchError`."""
    async with EngineClient(engine.address) as client, asyncio.timeout(READY_SECONDS):
        async for status in client.watch():
            if status.state == weights_pb2.INSTANCE_STATE_READY:
                return
            if status.state == weights_pb2.INSTANCE_STATE_FAILED:
                break
    raise LaunchError(f"the engine does not come up:\n{engine.log_tail()}")


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures from the rows; without a transport's name, of the worse one."""
    found: dict[str, float] = {}
    for field, name in (("p99_ms", "p99"), ("p50_ms", "p50")):
        for load in ("capped", "uncapped"):
            by_transport = {
                transport: table.median_ratio(rows, f"{load}_{transport}", "idle", field)
                for transport in ("shm", "grpc")
            }
            found[f"{name}_{load}_over_idle"] = max(by_transport.values())
            for transport, ratio in by_transport.items():
                found[f"{name}_{load}_over_idle_{transport}"] = ratio
    return found


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    options = parser.parse_args()
    rounds, tokens = (1, 24) if options.quick else (options.rounds, 192)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if options.quick:
            shape = ShapeWish(hidden_size=256, layers=16, vocab_size=4096).shape("bfloat16")
            tiny = random_llama.RandomLlama(shape=shape, dtype="bfloat16")
            model = random_llama.make(tiny, folder / "tiny").path
        else:
            model = smollm2.fetch("bfloat16").path
        rows = Bench(model, folder, tokens, stack).run(rounds)
    settings = {
        "model": model.name, "rounds": rounds, "streams": STREAMS, "tokens_per_stream": tokens,
        "cap_bytes_per_second": CAP, "seed_threads": 1, "seconds_whole": time.monotonic() - began,
        "gaps": "between the messages of a stream, as its client sees them; the prompt's "
        "time is left out",
        "relay_cpu_share": "of one core, both relays together",
        "versions": table.versions("grpcio", "torch", "xxhash"),
    }  # fmt: skip
    name = "seed_impact_quick" if options.quick else "seed_impact"
    table.write(name, settings, rows, COLUMNS, figures(rows), GOALS)


if __name__ == "__main__":
    main()
