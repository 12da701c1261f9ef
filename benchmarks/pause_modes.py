"""What does an update cost the requests that run, by pause mode, and while it is staged?

A real engine on loopback answers 16 streams at a time, whose callers ask again as soon as they
have their answer; meanwhile it is updated from disk, back and forth between two models. In turn:

* each pause mode: how long nothing ran because requests were waited for, the longest gap between
  two tokens of a stream around the commit, tokens that a caller has lost or that are computed
  again, and answers that two versions have made;
* `idle`, `staged` and `staged, limited`: gaps between tokens without an update, and while one is
  staged, as fast as it goes and with a limit on what it reads (64 MiB/s).

Whether KV is that of the weights that serve follows from the mode, and a test holds it to that.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import table
from benchmarks.update_pause import ready
from clients.engine import EngineClient
from clients.launch import Service
from engine_service.checkpoint import random_llama
from engine_service.checkpoint.random_shape import ShapeWish
from seedrelay.v1 import engine_pb2

MODES = ("abort", "wait", "keep", "retract")
COLUMNS = {
    "seconds_drained": "waited s", "longest_gap_seconds": "longest gap s",
    "tokens_again": "tokens again", "mixed": "mixed", "p99_seconds": "p99 s",
    "seconds_staged": "staged s", "seconds_paused": "paused s",
}  # fmt: skip
STREAMS, TOKENS, PROMPT_TOKENS = 16, 64, 64
LIMIT_BYTES = 64 << 20
GOALS: dict[str, str] = {}


@dataclass
class Load:
    """What all streams have seen since it was begun."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When a token came, and how long after the one before it."""
    mixed: int = 0
    tokens_before: int = 0
    """Prompt and answer of mixed answers, as far as they were when the version changed."""
    lost_tokens: int = 0
    """Of answers that were ended."""

    async def ask(self, client: EngineClient, number: int, stop: asyncio.Event) -> None:
        """Asks again and again."""
        prompt = [(number * 31 + index) % 256 for index in range(PROMPT_TOKENS)]
        request = engine_pb2.GenerateRequest(
            tokens=engine_pb2.TokenPrompt(token_ids=prompt),
            sampling=engine_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        )
        while not stop.is_set():
            before, count = 0.0, 0
            async for chunk in client.generate(request):
                now = time.monotonic()
                if before:
                    self.gaps.append((now, now - before))
                before, count = now, count + len(chunk.token_ids)
            if len(chunk.version_spans) > 1:
                self.mixed += 1
                self.tokens_before += PROMPT_TOKENS + chunk.version_spans[0].end
            if chunk.finish_reason == engine_pb2.FINISH_REASON_ABORT:
                self.lost_tokens += count

    def between(self, begin: float, end: float) -> list[float]:
        """Returns the gaps that overlap a time, in order of their length."""
        return sorted(gap for at, gap in self.gaps if at >= begin and at - gap <= end)


@asynccontextmanager
async def load(client: EngineClient) -> AsyncIterator[Load]:
    """Keeps all streams busy."""
    found, stop = Load(), asyncio.Event()
    tasks = [asyncio.create_task(found.ask(client, n, stop)) for n in range(STREAMS)]
    try:
        await asyncio.sleep(2.0)  # until all of them decode
        yield found
    finally:
        stop.set()
        await asyncio.gather(*tasks)


class Bench:
    """Measures one engine."""

    def __init__(self, engine: Service, folders: tuple[Path, Path]) -> None:
        self._engine, self._folders = engine, folders
        self._count = 0

    async def mode(self, number: int, mode: str) -> table.Row:
        """Updates in one mode under load."""
        async with EngineClient(self._engine.address) as client, load(client) as found:
            done = await self._update(client, mode, 0)
            end = time.monotonic()
            await asyncio.sleep(1.0)  # the first tokens after it
            gaps = found.between(end - done.seconds_paused - 0.2, end)
        again = found.tokens_before if mode == "retract" else found.lost_tokens
        return self._row(mode, number, gaps, done) | {
            "tokens_again": float(again), "mixed": float(found.mixed),
        }  # fmt: skip

    async def staged(self, number: int, method: str, limit: int) -> table.Row:
        """Measures gaps while an update is staged."""
        async with EngineClient(self._engine.address) as client, load(client) as found:
            begin = time.monotonic()
            done = await self._update(client, "keep", limit)
            gaps = found.between(begin, begin + done.seconds_staged)
        return self._row(method, number, gaps, done)

    async def idle(self, number: int) -> table.Row:
        """Measures gaps without an update."""
        async with EngineClient(self._engine.address) as client, load(client) as found:
            begin = time.monotonic()
            await asyncio.sleep(3.0)
            gaps = found.between(begin, time.monotonic())
        return self._row("idle", number, gaps, engine_pb2.UpdateReport())

    async def _update(self, client: EngineClient, mode: str, limit: int) -> engine_pb2.UpdateReport:
        self._count += 1
        disk = engine_pb2.DiskSource(
            folder=str(self._folders[self._count % 2]), rate_limit_bytes_per_second=limit
        )
        update = engine_pb2.WeightUpdate(
            weight_version=f"v{self._count}", pause_mode=f"PAUSE_MODE_{mode.upper()}",
            source=engine_pb2.WeightSource(disk=disk),
        )  # fmt: skip
        request = engine_pb2.UpdateWeightsRequest(update=update)
        return [message.report async for message in client.update(request)][-1]

    def _row(
        self, method: str, number: int, gaps: list[float], done: engine_pb2.UpdateReport
    ) -> table.Row:
        p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        print(f"{method}, round {number}: p99 {p99:.3f} s", file=sys.stderr)
        return {
            "method": method, "round": number, "seconds_drained": done.seconds_drained,
            "longest_gap_seconds": gaps[-1], "p99_seconds": p99, "tokens_again": 0.0, "mixed": 0.0,
            "seconds_staged": done.seconds_staged, "seconds_paused": done.seconds_paused,
        }  # fmt: skip


def _figures(rows: list[table.Row]) -> dict[str, float]:
    return {
        f"p99_{name}_over_idle": table.median_ratio(rows, method, "idle", "p99_seconds")
        for name, method in (("staged", "staged"), ("staged_limited", "staged, limited"))
    }


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    options = parser.parse_args()
    rounds, mib = (1, 24) if options.quick else (options.rounds, options.mib)
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, shape = Path(name), ShapeWish(size_bytes=mib << 20).shape("bfloat16")
        folders = tuple(
            random_llama.make(
                random_llama.RandomLlama(shape=shape, dtype="bfloat16", seed=seed),
                folder / f"model-{seed}",
            ).path
            for seed in (0, 1)
        )
        engine = stack.enter_context(
            Service(
                ["engine", "--model", str(folders[0]), "--listen", "127.0.0.1:0", "--threads", "1",
                 "--kv-cache-tokens", "8192", "--compiled", "off"],
                folder / "log",
            )
        )  # fmt: skip
        asyncio.run(ready([engine]))
        bench = Bench(engine, (folders[0], folders[1]))
        for number in range(1, rounds + 1):
            rows.append(asyncio.run(bench.idle(number)))
            for method, limit in (("staged", 0), ("staged, limited", LIMIT_BYTES)):
                rows.append(asyncio.run(bench.staged(number, method, limit)))
            rows += [asyncio.run(bench.mode(number, mode)) for mode in MODES]
    settings = {
        "mib": mib, "rounds": rounds, "threads": 1, "streams": STREAMS, "tokens": TOKENS,
        "prompt_tokens": PROMPT_TOKENS, "limit_bytes_per_second": LIMIT_BYTES,
    }  # fmt: skip
    table.write("pause_modes", settings, rows, COLUMNS, _figures(rows), GOALS)


if __name__ == "__main__":
    main()
