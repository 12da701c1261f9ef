"""How long do requests wait while weights are updated in place, and what does a delta move?

A real engine on loopback serves a random bfloat16 model and is updated from disk, back and
forth between the model and a copy of it in which some blocks differ: 1 %, 10 % and all of
them. Beside it, in the same round:

* `copy`: the pause of an update, from the closing of the gate until it is open again;
* `memcpy`: one thread copies as many bytes as changed, from memory to memory;
* `whole`: the gate is closed before the update begins and opened after it: what it would cost
  to hold requests back for the whole transfer.

What a delta moves is counted once per share: a second instance takes over, through the relay,
what the first one was updated to (`delta`). Changed bytes are those of blocks that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import table
from clients.engine import EngineClient
from clients.launch import Service
from engine_service.checkpoint import random_llama
from engine_service.checkpoint.random_shape import ShapeWish
from relay_service.core.buffers import address_of
from relay_service.core.manifest import BLOCK_BYTES
from seedrelay.v1 import engine_pb2, weights_pb2

SHARES = {"1pct": 0.01, "10pct": 0.1, "100pct": 1.0}
GOALS = {"pause_over_memcpy": "<= 1.5", "delta_1pct_bytes_over_changed": "<= 1.05"}
COLUMNS = {
    "seconds_paused": "paused s", "seconds_copied": "copied s", "seconds_staged": "staged s",
    "mib_changed": "changed MiB", "mib_moved": "moved MiB", "extra_mib": "extra MiB",
}  # fmt: skip
READY_SECONDS = 300.0


class Bench:
    """Measures one engine."""

    def __init__(self, engine: Service, folders: dict[str, Path], base: Path) -> None:
        self._engine, self._folders, self._base = engine, folders, base
        self._version = 0

    async def round(self, number: int, share: str) -> list[table.Row]:
        """Updates to a changed copy and back, in each way."""
        async with EngineClient(self._engine.address) as client:
            done = await self._update(client, self._folders[share])
            rows = [_row(f"copy {share}", number, done)]
            rows.append(_memcpy_row(f"memcpy {share}", number, done.bytes_changed))
            await client.pause(engine_pb2.PauseGenerationRequest())
            began = time.monotonic()
            back = await self._update(client, self._base)
            await client.resume()
            seconds = time.monotonic() - began
        rows.append(_row(f"whole {share}", number, back) | {"seconds_paused": seconds})
        for row in rows:
            print(
                f"{row['method']}, round {number}: {row['seconds_paused']:.3f} s", file=sys.stderr
            )
        return rows

    async def delta(self, share: str, other: Service) -> table.Row:
        """Counts what a second instance moves to follow the first one."""
        async with EngineClient(self._engine.address) as client:
            await self._update(client, self._folders[share])
        source = engine_pb2.WeightSource(
            relay=engine_pb2.RelaySource(
                options=weights_pb2.PullOptions(source_instance=self._engine.instance)
            )
        )
        async with EngineClient(other.address) as client:
            done = await self._follow(client, source)
            row = _row(f"delta {share}", 1, done)
        async with EngineClient(self._engine.address) as client:
            await self._update(client, self._base)
        async with EngineClient(other.address) as client:
            await self._follow(client, source)
        return row

    async def _update(self, client: EngineClient, folder: Path) -> engine_pb2.UpdateReport:
        source = engine_pb2.WeightSource(disk=engine_pb2.DiskSource(folder=str(folder)))
        return await self._follow(client, source)

    async def _follow(
        self, client: EngineClient, source: engine_pb2.WeightSource
    ) -> engine_pb2.UpdateReport:
        self._version += 1
        update = engine_pb2.WeightUpdate(weight_version=f"v{self._version}", source=source)
        async for response in client.update(engine_pb2.UpdateWeightsRequest(update=update)):
            if response.HasField("report"):
                return response.report
        raise RuntimeError("the update ended without a report")


def _row(method: str, number: int, done: engine_pb2.UpdateReport) -> table.Row:
    moved = sum(step.bytes_verified for step in done.path)
    return {
        "method": method, "round": number, "seconds_paused": done.seconds_paused,
        "seconds_copied": max(rank.seconds_copied for rank in done.ranks),
        "seconds_staged": done.seconds_staged,
        "bytes_changed": done.bytes_changed, "mib_changed": done.bytes_changed / (1 << 20),
        "bytes_moved": moved, "mib_moved": moved / (1 << 20),
        "extra_mib": sum(rank.extra_bytes_peak for rank in done.ranks) / (1 << 20),
    }  # fmt: skip


def _memcpy_row(method: str, number: int, nbytes: int) -> table.Row:
    """Copies as many bytes from one mapping to another, whose pages are all there."""
    source, target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    for one in (source, target):
        ctypes.memset(address_of(memoryview(one)), 1, nbytes)
    began = time.monotonic()
    ctypes.memmove(address_of(memoryview(target)), address_of(memoryview(source)), nbytes)
    seconds = time.monotonic() - began
    return {
        "method": method, "round": number, "seconds_paused": seconds, "seconds_copied": seconds,
        "seconds_staged": 0.0, "bytes_changed": nbytes, "mib_changed": nbytes / (1 << 20),
        "bytes_moved": nbytes, "mib_moved": nbytes / (1 << 20), "extra_mib": 0.0,
    }  # fmt: skip


def changed_copy(folder: Path, into: Path, share: float) -> Path:
    """Copies a checkpoint; in every so-manieth MiB of its tensors a number has another value."""
    shutil.copytree(folder, into)
    for path in sorted(into.glob("*.safetensors")):
        with path.open("r+b") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            end = max(entry["data_offsets"][1] for entry in header.values())
            step = int(BLOCK_BYTES / share)
            for offset in range(8 + size, 8 + size + end, step):
                file.seek(offset)
                (low,) = file.read(1)
                file.seek(offset)
                file.write(bytes([low ^ 1]))  # the last bit of a bfloat16's mantissa
    return into


async def ready(engines: Sequence[Service]) -> None:
    """Waits until all engines serve."""
    for engine in engines:
        async with EngineClient(engine.address) as client, asyncio.timeout(READY_SECONDS):
            async for status in client.watch():
                if status.state == weights_pb2.INSTANCE_STATE_READY:
                    break


def _figures(rows: list[table.Row]) -> dict[str, float]:
    ratio = {
        share: table.median_ratio(rows, f"copy {share}", f"memcpy {share}", "seconds_paused")
        for share in SHARES
    }
    whole = {
        share: table.median_ratio(rows, f"whole {share}", f"copy {share}", "seconds_paused")
        for share in SHARES
    }
    delta = next(row for row in rows if row["method"] == "delta 1pct")
    return {
        "pause_over_memcpy": ratio["100pct"],
        **{f"pause_over_memcpy[{share}]": found for share, found in ratio.items()},
        "whole_transfer_over_pause": whole["100pct"],
        **{f"whole_transfer_over_pause[{share}]": found for share, found in whole.items()},
        "delta_1pct_bytes_over_changed": delta["bytes_moved"] / delta["bytes_changed"],
    }


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--weight-format", default="plain")
    options = parser.parse_args()
    rounds, mib = (1, 24) if options.quick else (options.rounds, options.mib)
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        shape = ShapeWish(size_bytes=mib << 20).shape("bfloat16")
        wanted = random_llama.RandomLlama(shape=shape, dtype="bfloat16")
        base = random_llama.make(wanted, folder / "base").path
        folders = {s: changed_copy(base, folder / s, share) for s, share in SHARES.items()}
        relay = stack.enter_context(Service(["relay", "--listen", "127.0.0.1:0"], folder / "log"))
        engines = [
            stack.enter_context(Service(
                ["engine", "--model", str(base), "--listen", "127.0.0.1:0",
                 "--relay", relay.address, "--instance-name", instance,
                 "--weight-format", options.weight_format,
                 "--threads", "1", "--kv-cache-tokens", "2048", "--compiled", "off"],
                folder / f"{instance}.log",
            ))
            for instance in ("one", "other")
        ]  # fmt: skip
        asyncio.run(ready(engines))
        bench = Bench(engines[0], folders, base)
        rows += [asyncio.run(bench.delta(share, engines[1])) for share in SHARES]
        engines[1].stop()
        for number in range(1, rounds + 1):
            for share in SHARES:
                rows += asyncio.run(bench.round(number, share))
    settings = {"mib": mib, "rounds": rounds, "weight_format": options.weight_format, "threads": 1}
    table.write("update_pause", settings, rows, COLUMNS, _figures(rows), GOALS)


if __name__ == "__main__":
    main()
