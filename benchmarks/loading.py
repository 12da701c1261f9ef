"""How long does a load from disk with its processing take, beside a relay of processed bytes?

Real services on loopback, a random bfloat16 model, formats in turn, their order reversed in
every other round. In a round each format starts a fresh engine from disk, with all files in the
page cache (`disk`), and then a fresh dummy that has captured and waits, and is told to pull
from the first one over shm (`relay`).

Seconds are those of the engine's own phases: `load` (read, process, digest) and `land` (match,
map, copy, verify). Processor seconds are those of all processes that take part, user and
system. Extra memory is the most that they held beyond what they had when the phase began, in
layers of the checkpoint: memory that no file and no other process shares, so without arenas.

A process may keep memory that it has freed, and use it again without holding more. So each
format starts once more from disk beforehand, with a C library that gives back at once what is
freed (`disk, memory`; slower): the figures of memory are of that start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import page_cache, process_watch, table
from clients.engine import EngineClient
from clients.launch import LaunchError, Service
from engine_service.checkpoint import random_llama
from engine_service.checkpoint.random_shape import ShapeWish
from engine_service.device.formats.layouts import choose_layout
from engine_service.errors import ConfigError
from relay_service.core.dtypes import DType
from seedrelay.v1 import engine_pb2, weights_pb2

FORMATS = ("plain", "packed", "int8", "fp8", "int4")
GOALS = {
    "int8_disk_over_relay": ">= 3", "int4_disk_over_relay": ">= 3", "peak_extra_layers": "<= 1.5",
}  # fmt: skip
COLUMNS = {
    "seconds": "seconds", "cpu_seconds": "CPU s", "extra_layers": "extra layers",
    "extra_mib": "extra MiB", "mib": "arena MiB",
}  # fmt: skip
STATE_SECONDS = 120.0
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Larger pieces are the system's again as soon as they are freed (mallopt(3))."""


class Bench:
    """Measures one model."""

    def __init__(self, model: Path, folder: Path, relay: Service) -> None:
        self._model, self._log, self._relay = model, folder / "log", relay
        self._files = [path for path in model.iterdir() if path.is_file()]
        self.layer_bytes = _layer_bytes(json.loads((model / "config.json").read_text()))

    async def memory(self, form: str) -> table.Row:
        """Measures the memory of one format's load."""
        page_cache.warm(self._files)
        with (
            self._engine(form, env=GIVE_BACK) as engine,
            process_watch.ProcessWatch(engine.processes()) as watch,
        ):
            status = await _reach(engine, weights_pb2.INSTANCE_STATE_READY)
            return self._row(f"{form} disk, memory", 0, engine, "load", watch, status)

    async def run(self, number: int, form: str) -> list[table.Row]:
        """Measures one format in one round."""
        page_cache.warm(self._files)
        with ExitStack() as stack:
            seed = stack.enter_context(self._engine(form, "--relay", self._relay.address))
            with process_watch.ProcessWatch(seed.processes()) as watch:
                status = await _reach(seed, weights_pb2.INSTANCE_STATE_READY)
            rows = [self._row(f"{form} disk", number, seed, "load", watch, status)]
            target = stack.enter_context(self._engine(form, "--load-format", "dummy"))
            await _reach(target, weights_pb2.INSTANCE_STATE_DUMMY)
            # It is a dummy before it has captured; a pull waits for that at its end.
            await _phase(target, "capture")
            taking = [*seed.processes(), *target.processes(), self._relay.pid]
            with process_watch.ProcessWatch(taking) as watch:
                await self._pull(target, seed.instance)
                status = await _reach(target, weights_pb2.INSTANCE_STATE_READY)
            rows.append(self._row(f"{form} relay", number, target, "land", watch, status))
        return rows

    async def _pull(self, target: Service, source: str) -> None:
        options = weights_pb2.PullOptions(source_instance=source, transport="shm")
        async with EngineClient(target.address) as client:
            async for _ in client.pull(self._relay.address, options):
                pass

    def _row(
        self, method: str, number: int, engine: Service, name: str,
        watch: process_watch.ProcessWatch, status: engine_pb2.EngineStatus,
    ) -> table.Row:  # fmt: skip
        phase = next(phase for phase in status.phases if phase.name == name)
        origin = process_watch.started(engine.pid)
        use = watch.between(origin + phase.begin_seconds, origin + phase.end_seconds)
        seconds = phase.end_seconds - phase.begin_seconds
        print(f"{method}, round {number}: {seconds:.2f} s", file=sys.stderr)
        return {
            "method": method, "round": number, "seconds": seconds,
            "cpu_seconds": use.cpu_seconds, "extra_bytes": use.extra_bytes,
            "extra_mib": use.extra_bytes / (1 << 20),
            "extra_layers": use.extra_bytes / self.layer_bytes,
            "mib": status.ranks[0].arena_bytes / (1 << 20),
        }  # fmt: skip

    def _engine(self, form: str, *arguments: str, env: dict[str, str] | None = None) -> Service:
        return Service(
            ["engine", "--model", str(self._model), "--listen", "127.0.0.1:0", *arguments,
             "--weight-format", form, "--threads", "1", "--kv-cache-tokens", "2048",
             "--compiled", "off", "--grace", "0"],
            self._log, env,
        )  # fmt: skip


async def _reach(engine: Service, state: weights_pb2.InstanceState) -> engine_pb2.EngineStatus:
    """Waits until an engine is in a state, and returns its status then."""
    async with EngineClient(engine.address) as client, asyncio.timeout(STATE_SECONDS):
        async for status in client.watch():
            if status.state == state:
                return await client.status()
            if status.state == weights_pb2.INSTANCE_STATE_FAILED:
                raise LaunchError(f"an engine failed: {status.reason}")
    raise LaunchError(f"an engine has gone:\n{engine.log_tail()}")


async def _phase(engine: Service, name: str) -> None:
    """Waits until an engine has ended a phase."""
    async with EngineClient(engine.address) as client, asyncio.timeout(STATE_SECONDS):
        while True:
            if name in {phase.name for phase in (await client.status()).phases}:
                return
            await asyncio.sleep(0.05)


def _layer_bytes(config: dict[str, int]) -> int:
    """Returns the bytes of a layer's matrices in a bfloat16 checkpoint."""
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    return 2 * hidden * (heads * size + 3 * ffn)


def _served() -> list[str]:
    """Returns the formats that this processor can serve."""
    found = []
    for name in FORMATS:
        try:
            found.append(choose_layout(name, DType.BF16, "cpu").name)
        except ConfigError as error:
            print(error, file=sys.stderr)
    return found


def _figures(rows: list[table.Row], formats: list[str]) -> dict[str, float]:
    """Draws the figures from the rows; of the memory the least favourable."""
    found = {
        f"{form}_disk_over_relay": table.median_ratio(
            rows, f"{form} disk", f"{form} relay", "seconds"
        )
        for form in formats
    }
    extra = {form: table.median(rows, f"{form} disk, memory", "extra_layers") for form in formats}
    return {
        **found, "peak_extra_layers": max(extra.values()),
        **{f"peak_extra_layers[{form}]": layers for form, layers in extra.items()},
    }  # fmt: skip


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=int, default=1, help="size of the model in the checkpoint")
    parser.add_argument("--formats", default="", help="some of them, with commas between")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds = 1 if options.quick else options.rounds
    formats = [one for one in _served() if one in (options.formats or one).split(",")]
    wish = (
        ShapeWish(hidden_size=256, layers=4)
        if options.quick
        else ShapeWish(size_bytes=options.gib << 30)
    )
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, shape = Path(name), wish.shape("bfloat16")
        wanted = random_llama.RandomLlama(shape=shape, dtype="bfloat16")
        model = random_llama.make(wanted, folder / "tiny" if options.quick else None).path
        relay = stack.enter_context(Service(["relay", "--listen", "127.0.0.1:0"], folder / "log"))
        bench = Bench(model, folder, relay)
        rows += [asyncio.run(bench.memory(form)) for form in formats]
        for number in range(1, rounds + 1):
            for form in formats if number % 2 else formats[::-1]:
                rows += asyncio.run(bench.run(number, form))
    settings = {
        "layer_mib": bench.layer_bytes / (1 << 20), "layers": shape.layers, "rounds": rounds,
        "threads": 1, "page_cache": "warm",
    } | table.versions("torch")  # fmt: skip
    table.write("loading", settings, rows, COLUMNS, _figures(rows, formats), GOALS)


if __name__ == "__main__":
    main()
