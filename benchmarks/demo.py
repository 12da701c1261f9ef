"""The main job on a real model: instances become ready from a serving seed.

Starts real services on loopback, checks every claim that it prints, writes
`build/demo.json`, and exits non-zero unless all of them hold.

    relay A (host 1)        seed from disk → first, second target
    relay B (host 2) ⇄ A    third target, as from another host
    the seed is killed      a fourth target is filled from the second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.demo_report import VERSION, Facts, holds, judge, show
from clients.engine import EngineClient
from clients.launch import LaunchError, Service
from seedrelay.v1 import engine_pb2, weights_pb2

PROMPT = "Why is the sea salty?"
TOKENS = 32
THROTTLE = 64 << 20
READY_SECONDS = 120.0


class Demo:
    """Runs the story and keeps what it sees."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self.model = model
        self.folder = folder
        self.stack = stack
        self.seen = Facts()
        self.console = Console()
        self.bare = self._folder_without_weights()
        self.empty = folder / "empty"
        self.empty.mkdir()

    async def run(self) -> None:
        """Runs every step, in the order of the module's picture."""
        self._say("starting two relays and the seed")
        relay = self._start("relay-a", "relay")
        other = self._start("relay-b", "relay", "--join", relay.address)
        seed = self._engine("seed", self.model, relay, "--weight-version", VERSION)
        await self._ready("seed", seed)
        first = await self._fill_throttled(seed, relay)
        second = self._engine("second", self.bare, relay, "--load-format", "dummy")
        await self._ready("second", second)
        self._count_disk_reads(second)
        third = self._engine("third", self.empty, other, "--load-format", "dummy")
        await self._ready("third", third)
        for name, engine in (("first", first), ("second", second), ("third", third)):
            await self._look(name, engine)
        await self._look("seed", seed)
        seed.kill()
        self._say("the seed is killed")
        await self._look("second, seed dead", second)
        first.stop()
        fourth = self._engine(
            "fourth", self.empty, relay, "--load-format", "dummy", "--from", "second"
        )
        await self._ready("fourth", fourth)
        await self._look("fourth", fourth)

    def _start(self, name: str, *arguments: str) -> Service:
        service = Service([*arguments, "--listen", "127.0.0.1:0"], self.folder / f"{name}.log")
        return self.stack.enter_context(service)

    def _engine(self, name: str, model: Path, relay: Service | None, *more: str) -> Service:
        attach = ("--relay", relay.address) if relay else ()
        self._began = time.monotonic()
        return self._start(
            name, "engine", "--model", str(model), "--instance-name", name, "--threads", "1",
            "--kv-cache-tokens", "4096", *attach, *more,
        )  # fmt: skip

    async def _ready(self, name: str, engine: Service) -> None:
        await _until(engine, weights_pb2.INSTANCE_STATE_READY)
        self.seen.seconds_to_ready[name] = time.monotonic() - self._began
        self._say(f"{name} is ready after {self.seen.seconds_to_ready[name]:.1f} s")

    async def _fill_throttled(self, seed: Service, relay: Service) -> Service:
        """Fills the first target at 64 MiB/s while the seed streams, and counts its tokens."""
        first = self._engine("first", self.bare, None, "--load-format", "dummy")
        status = await _until(first, weights_pb2.INSTANCE_STATE_DUMMY, phases=("capture",))
        self.dummy_reads = _bytes_read(first)
        self.seen.addresses["first"] = [[r.arena_address for r in status.ranks]]
        options = weights_pb2.PullOptions(rate_limit_bytes_per_second=THROTTLE)
        stamps: list[float] = []
        streaming = asyncio.create_task(_stream(seed, stamps))
        began = ended = 0.0
        async with EngineClient(first.address) as client:
            async for message in client.pull(relay.address, options):
                if message.progress.phase == "transferring":
                    began, ended = began or time.monotonic(), time.monotonic()
        streaming.cancel()
        during = sum(began <= stamp <= ended for stamp in stamps)
        self.seen.figures["seed_tokens_during_relay"] = during
        self._say(
            f"first was filled at 64 MiB/s in {ended - began:.1f} s; "
            f"meanwhile the seed streamed {during} tokens"
        )
        return first

    def _count_disk_reads(self, second: Service) -> None:
        read = _bytes_read(second) - self.dummy_reads
        self.seen.figures["target_weight_bytes_read_from_disk"] = max(0, read)

    async def _look(self, name: str, engine: Service) -> None:
        """Generates, and notes digests, version and addresses."""
        ids: list[int] = []
        text = ""
        async with EngineClient(engine.address) as client:
            async for message in client.generate(_question(TOKENS)):
                ids += message.token_ids
                text += message.text
            status = await client.status()
        self.seen.tokens[name], self.seen.text[name] = ids, text
        self.seen.digests[name] = [rank.digest for rank in status.ranks]
        self.seen.versions[name] = status.weight_version
        self.seen.addresses.setdefault(name.partition(",")[0], []).append(
            [rank.arena_address for rank in status.ranks]
        )
        phases = {p.name: p.end_seconds - p.begin_seconds for p in status.phases}
        if name == "seed":
            self.seen.figures["seconds_disk_load"] = phases["load"]
            self.seen.figures["arena_bytes"] = sum(r.arena_bytes for r in status.ranks)
        if name == "third":
            self.seen.figures["transport_other_relay"] = status.fill.transport
        if name == "second":
            self.seen.figures["seconds_relay"] = status.fill.seconds_transfer
            self.seen.figures["bytes_moved"] = status.fill.bytes_moved
            self.seen.figures["transport"] = status.fill.transport
            self.seen.figures["seconds_by_phase"] = {
                p.name: [p.begin_seconds, p.end_seconds] for p in status.phases
            }

    def _folder_without_weights(self) -> Path:
        bare = self.folder / "bare"
        bare.mkdir()
        for file in self.model.iterdir():
            if not file.name.endswith(".safetensors"):
                shutil.copy(file, bare)
        return bare

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False)


async def _until(
    engine: Service, state: weights_pb2.InstanceState, phases: tuple[str, ...] = ()
) -> engine_pb2.EngineStatus:
    """Waits for a state and for phases to have ended; a failure is told with its reason."""
    async with EngineClient(engine.address) as client, asyncio.timeout(READY_SECONDS):
        while True:
            status = await client.status()
            done = {phase.name for phase in status.phases}
            if status.state == state and done.issuperset(phases):
                return status
            if status.state == weights_pb2.INSTANCE_STATE_FAILED:
                raise LaunchError(f"{status.instance} failed: {status.reason}")
            await asyncio.sleep(0.1)


async def _stream(engine: Service, stamps: list[float]) -> None:
    """Streams from an engine until cancelled and notes when each token came."""
    async with EngineClient(engine.address) as client:
        while True:
            async for message in client.generate(_question(512, ignore_eos=True)):
                stamps += [time.monotonic()] * len(message.token_ids)


def _question(max_tokens: int, *, ignore_eos: bool = False) -> engine_pb2.GenerateRequest:
    request = engine_pb2.GenerateRequest()
    request.chat.messages.add(role="user", content=PROMPT)
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = ignore_eos
    return request


def _bytes_read(engine: Service) -> int:
    """Bytes that all processes of a service have read, from cache or disk (proc(5), io)."""
    total = 0
    for pid in engine.processes():
        lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
        counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        total += max(counts["rchar"], counts["read_bytes"])
    return total


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder, float32")
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seedrelay-demo-") as folder, ExitStack() as stack:
        demo = Demo(arguments.model, Path(folder), stack)
        try:
            asyncio.run(demo.run())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report = judge(demo.seen)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    show(report, demo.console)
    good = holds(report)
    demo.console.print(f"{'all of it holds' if good else 'NOT all of it holds'}: {arguments.out}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
