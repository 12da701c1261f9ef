"""How long from the start of a process to its first correct token, from disk and by relay?

Real services on loopback, one seed per model, and in every round a fresh instance each:

    disk_cold    from disk, after the pages of its files were dropped (and proven gone)
    disk_warm    from disk, with all its files in the page cache
    relay        from the seed through the relay of its host, into an empty folder (shm)
    relay_tcp    the same through a relay of another host; in a few rounds

Correct is a first answer of the seed's very tokens. The phases are the engine's own
(`GetStatus`); a table's columns may overlap: memory is allocated, and weights land, while
the rank imports torch and captures its graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page_cache, table
from clients.engine import EngineClient
from clients.launch import LaunchError, Service
from engine_service.checkpoint import random_llama, smollm2
from engine_service.checkpoint.folder import ModelFolder
from engine_service.checkpoint.random_shape import ShapeWish
from seedrelay.v1 import engine_pb2, weights_pb2

GOALS = {
    "weights_phase_disk_cold_over_relay": ">= 1.5",
    "weights_phase_disk_warm_over_relay": ">= 1.0",
    "relay_extra_mib": "< 256",
}
COLUMNS = {
    "seconds": "  token", "seconds_ready": "  ready", "seconds_imports": "imports",
    "seconds_config": "config", "seconds_allocate": "allocate", "seconds_graphs": "graphs",
    "seconds_attach": "attach", "seconds_weights": "weights", "seconds_verify": "verify",
    "seconds_probe": "  probe", "seconds_first_token": "first token", "device_mib": "device MiB",
}  # fmt: skip
PHASES = {
    "imports": ("imports",), "config": ("config",), "allocate": ("allocate", "build"),
    "graphs": ("capture",), "attach": ("attach",), "weights": ("load", "land"),
    "verify": ("commit",), "probe": ("probe",),
}  # fmt: skip
"""The engine's phases by column; blocks are digested while weights load or land."""

READY_SECONDS = 120.0
SAMPLE_SECONDS = 0.01
TOKENS = 8
TCP_ROUNDS = 3
PROMPT = "Why is the sea salty?"


@dataclass(frozen=True)
class Model:
    """A model to start, and in how many rounds."""

    name: str
    folder: Path
    rounds: int

    @property
    def files(self) -> list[Path]:
        """Files of the folder."""
        return [path for path in self.folder.iterdir() if path.is_file()]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files with weights."""
        return page_cache.total_bytes([f for f in self.files if f.suffix == ".safetensors"])


class Bench:
    """Measures one model: its relays, its seed, and what the seed answers."""

    def __init__(self, model: Model, folder: Path, stack: ExitStack) -> None:
        self.model = model
        self._log = folder / "log"
        self._empty = folder / "empty"
        self._empty.mkdir(exist_ok=True)
        listen = ("relay", "--listen", "127.0.0.1:0")
        self.near = stack.enter_context(Service([*listen], self._log))
        self.far = stack.enter_context(Service([*listen, "--join", self.near.address], self._log))
        self._seed = stack.enter_context(self._engine(model.folder, self.near))

    async def run(self) -> list[table.Row]:
        """Measures all rounds. Everything has been read, imported and mapped once before."""
        await _ready(self._seed)
        self._expected, _ = await _answer(self._seed)
        rows = []
        for number in range(1, self.model.rounds + 1):
            rows += [await self._disk(number, cold=True), await self._disk(number, cold=False)]
            rows.append(await self._relay(number, "relay", self.near))
            if number <= TCP_ROUNDS:
                rows.append(await self._relay(number, "relay_tcp", self.far))
        return rows

    async def _disk(self, number: int, *, cold: bool) -> table.Row:
        prepare = page_cache.chill if cold else page_cache.warm
        prepare(self.model.files)
        row = await self._start("disk_cold" if cold else "disk_warm", number, self.model.folder)
        if cold and row["device_mib"] < 0.99 * self.model.weight_bytes / (1 << 20):
            raise SystemExit(f"{self.model.name}: {row['device_mib']} MiB came from the device")
        return row

    async def _relay(self, number: int, path: str, relay: Service) -> table.Row:
        highest = [page_cache.own_bytes(relay.pid)]
        sampling = asyncio.create_task(_sample(relay.pid, highest))
        try:
            row = await self._start(path, number, self._empty, relay)
        finally:
            sampling.cancel()
        return {**row, "relay_extra_bytes": max(highest)}

    async def _start(
        self, path: str, number: int, folder: Path, relay: Service | None = None
    ) -> table.Row:
        began = time.monotonic()
        with self._engine(folder, relay) as engine:
            status = await _ready(engine)
            ready = time.monotonic()
            tokens, first = await _answer(engine)
            if tokens != self._expected:
                raise SystemExit(f"{self.model.name} {path}: {tokens}, seed: {self._expected}")
            device = page_cache.device_bytes(engine.processes())
        row = {
            "method": f"{self.model.name} {path}", "model": self.model.name, "path": path,
            "round": number, "seconds": first - began, "seconds_ready": ready - began,
            "seconds_first_token": first - ready, "device_mib": device / (1 << 20),
            "transport": status.fill.transport, "page_kind": status.ranks[0].page_kind,
            **{f"seconds_{name}": _spent(status, of) for name, of in PHASES.items()},
        }  # fmt: skip
        print(
            f"{row['method']}, round {number} of {self.model.rounds}: "
            f"ready {row['seconds_ready']:.2f} s, weights {row['seconds_weights']:.2f} s",
            file=sys.stderr,
        )
        return row

    @contextmanager
    def _engine(self, folder: Path, relay: Service | None) -> Iterator[Service]:
        dummy = ("--load-format", "dummy") if folder == self._empty else ()
        attached = ("--relay", relay.address) if relay else ()
        arguments = ["engine", "--model", str(folder), "--listen", "127.0.0.1:0", *dummy]
        limits = ("--threads", "1", "--kv-cache-tokens", "4096", "--grace", "0")
        with Service([*arguments, *attached, *limits], self._log) as engine:
            yield engine


async def _ready(engine: Service) -> engine_pb2.EngineStatus:
    """Waits until an engine is ready, and returns its status then."""
    async with EngineClient(engine.address) as client, asyncio.timeout(READY_SECONDS):
        async for status in client.watch():
            if status.state == weights_pb2.INSTANCE_STATE_READY:
                return await client.status()
            if status.state == weights_pb2.INSTANCE_STATE_FAILED:
                raise LaunchError(f"an engine failed: {status.reason}")
    raise LaunchError(f"an engine has gone:\n{engine.log_tail()}")


async def _answer(engine: Service) -> tuple[list[int], float]:
    """Returns the greedy tokens of an answer, and when the first of them came."""
    request = engine_pb2.GenerateRequest(text=PROMPT)
    request.sampling.max_tokens, request.sampling.ignore_eos = TOKENS, True
    tokens: list[int] = []
    first = 0.0
    async with EngineClient(engine.address) as client:
        async for message in client.generate(request, READY_SECONDS):
            first = first or time.monotonic()
            tokens += message.token_ids
    return tokens, first


async def _sample(pid: int, highest: list[int]) -> None:
    while True:
        highest[0] = max(highest[0], page_cache.own_bytes(pid))
        await asyncio.sleep(SAMPLE_SECONDS)


def _spent(status: engine_pb2.EngineStatus, names: tuple[str, ...]) -> float:
    return sum(p.end_seconds - p.begin_seconds for p in status.phases if p.name in names)


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures from the rows: one per model, and of these the least favourable."""
    found: dict[str, float] = {}
    for path, field, name in (
        ("disk_cold", "seconds_weights", "weights_phase_disk_cold_over_relay"),
        ("disk_warm", "seconds_weights", "weights_phase_disk_warm_over_relay"),
        ("disk_cold", "seconds_ready", "ready_disk_cold_over_relay"),
        ("disk_warm", "seconds_ready", "ready_disk_warm_over_relay"),
    ):
        by_model = {
            model: table.median_ratio(rows, f"{model} {path}", f"{model} relay", field)
            for model in dict.fromkeys(row["model"] for row in rows)
        }
        found[name] = min(by_model.values())
        found |= {f"{name}[{model}]": ratio for model, ratio in by_model.items()}
    extra = [row["relay_extra_bytes"] for row in rows if "relay_extra_bytes" in row]
    ready = [row["seconds_ready"] for row in rows if row["path"] == "relay"]
    return {
        **found, "relay_extra_bytes": max(extra), "relay_extra_mib": max(extra) / (1 << 20),
        "seconds_ready_relay_fastest": min(ready), "seconds_ready_relay": statistics.median(ready),
    }  # fmt: skip


def models(*, quick: bool, rounds: int, only: str, out: Path) -> list[Model]:
    """Makes or finds the models: SmolLM2 and a random one of 2 GiB, in two types each.

    `only` is a part of their names.
    """

    def random(dtype: str, folder: Path | None, **wish: int) -> ModelFolder:
        shape = ShapeWish(**wish).shape(dtype)
        return random_llama.make(random_llama.RandomLlama(shape=shape, dtype=dtype), folder)

    if quick:
        tiny = random("float32", out / "tiny", hidden_size=128, layers=4, vocab_size=4096)
        return [Model("tiny float32", tiny.path, 1)]
    return [
        Model(f"{name} {dtype}", make(dtype).path, rounds)
        for name, make in (
            ("smollm2", smollm2.fetch),
            ("random", lambda dtype: random(dtype, None, size_bytes=2 << 30)),
        )
        for dtype in ("float32", "bfloat16")
        if only in f"{name} {dtype}"
    ]


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of each model")
    parser.add_argument("--only", default="", help="part of the models' names, such as smollm2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[table.Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = models(quick=options.quick, rounds=options.rounds, only=options.only, out=folder)
        for model in chosen:
            with ExitStack() as stack:
                rows += asyncio.run(Bench(model, folder, stack).run())
        weighed = {m.name: {"weight_bytes": m.weight_bytes, "rounds": m.rounds} for m in chosen}
    settings = {
        "models": weighed,
        "rounds_relay_tcp": min(TCP_ROUNDS, chosen[0].rounds), "threads": 1,
        "kv_cache_tokens": 4096, "tokens_compared": TOKENS, "prompt": PROMPT,
        "seconds_whole": time.monotonic() - began,
        "weights": "disk: the phase load; relay: land, that is matching, mapping, moving and "
        "verifying every block, and fetching the manifests of what landed, while torch is "
        "imported",
        "cold": "pages dropped by fadvise and proven gone by mincore; device_mib is read_bytes "
        "of the instance's processes until its answer",
        "relay_extra_bytes": "highest RssAnon + RssFile of the target's relay during a start, "
        "sampled; all its shared memory is arenas",
        "versions": table.versions("grpcio", "torch", "xxhash"),
    }  # fmt: skip
    name = "time_to_ready_quick" if options.quick else "time_to_ready"
    table.write(name, settings, rows, COLUMNS, figures(rows), GOALS)


if __name__ == "__main__":
    main()
