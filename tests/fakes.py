"""In-memory twins of the ports, and small things that tests need often. No torch, no gRPC."""

# What a method of a twin does, and what it is given, stands in its port.
# ruff: noqa: D102

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.core.step_messages import Row, Sampled, TokenLogprobs
from relay_service.core.attachment import (
    Accepted,
    Attach,
    Denied,
    Lend,
    Update,
    decode_to_engine,
    encode,
)
from relay_service.core.channel import AsyncChannel
from relay_service.core.copies import Copy
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.format import Format, Placement
from relay_service.core.instance import Instance, RankBlocks, State, Weights
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES, HEADER_BYTES, Manifest, weights_digest
from relay_service.core.pull_report import PathStep
from relay_service.core.rate import TokenBucket
from relay_service.core.transfer_state import TransferState
from relay_service.memory.host import HostArena, create_memfd, seal
from relay_service.memory.sparse import create_sparse_memfd

FORMAT = Format((("kernel_format", "1"), ("dtype", "bfloat16"), ("config.hidden_size", "64")))
PROBE = b"probe"
SEAM_BYTES = (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 1, 1, 512)


async def eventually(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Waits until a condition, or what it returns, holds; fails after a generous deadline."""
    deadline = time.monotonic() + timeout
    while not (await held if inspect.isawaitable(held := condition()) else held):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


class Resources(NamedTuple):
    """What this process has open and mapped."""

    descriptors: int
    mappings: int
    """Of arenas."""

    def are_back(self) -> bool:
        """Returns whether no more is there than when these were counted.

        Less may be: what an earlier test has left behind closes when it likes.
        """
        now = resources()
        return now.descriptors <= self.descriptors and now.mappings <= self.mappings


def resources() -> Resources:
    """Counts what this process has, once what earlier tests have dropped is closed."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return Resources(sum(1 for _ in Path("/proc/self/fd").iterdir()), mappings)


def collapses() -> bool:
    """Whether the kernel has MADV_COLLAPSE (Linux 6.1), and may use it on shared memory."""
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


class FakeClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# Manifests and bytes


def lay_out_bytes(sizes: Sequence[int], rank: int = 0) -> Manifest:
    """Lays out one unit of one `u8` tensor per size."""
    specs = [TensorSpec(f"w.{number}", DType.U8, (size,)) for number, size in enumerate(sizes)]
    return lay_out(rank, [UnitSpec(f"unit.{n}", (spec,)) for n, spec in enumerate(specs)])


def seam_layout(rank: int = 0) -> Manifest:
    """Lays out tensors of every type and awkward size: around a block, tiny, scalar and empty."""
    big = [UnitSpec(f"big.{n}", (TensorSpec(f"w.{n}", DType.U8, (n,)),)) for n in SEAM_BYTES]
    odd = UnitSpec(
        "odd",
        (
            TensorSpec("scalar", DType.F32, ()),
            TensorSpec("empty", DType.BF16, (0,)),
            TensorSpec("hollow", DType.F64, (2, 0)),
            TensorSpec("one", DType.BOOL, (1,)),
            TensorSpec("column", DType.F32, (3, 2), strides=(1, 3)),
        ),
    )
    types = UnitSpec("types", tuple(TensorSpec(f"of.{d}", d, (3,)) for d in DType))
    hollow = UnitSpec("hollow_unit", (TensorSpec("nothing", DType.U8, (0,)),))
    return lay_out(rank, [*big[:3], odd, types, hollow, *big[3:]])


def random_bytes(manifest: Manifest, seed: int = 1) -> bytes:
    """Returns reproducible contents for an arena."""
    return random.Random(seed).randbytes(manifest.data_bytes)  # noqa: S311


def verified(layout: Manifest, data: bytes) -> Manifest:
    """Returns a layout with the digests of `data`."""
    blocks = [layout.block(index) for index in range(layout.block_count)]
    return layout.with_digests([block_digest(data[b.offset : b.offset + b.nbytes]) for b in blocks])


def same_weights(manifest: Manifest, left: bytes, right: bytes) -> bool:
    """Returns whether two arenas agree in every byte of every unit."""
    return all(
        left[unit.offset : unit.offset + unit.nbytes]
        == right[unit.offset : unit.offset + unit.nbytes]
        for unit in manifest.units
    )


class BytesArena:
    """An arena in a bytearray that counts how often each offset is hashed."""

    def __init__(self, data_bytes: int) -> None:
        self.data = bytearray(data_bytes)
        self.sequence = 2
        self.passes: Counter[int] = Counter()
        self.closed = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.data)[offset : offset + nbytes].toreadonly()

    def place(self, offset: int, nbytes: int) -> memoryview:
        assert not self.closed, "lent memory that is unmapped"
        return memoryview(self.data)[offset : offset + nbytes]

    def land(self, offset: int, data: memoryview | bytes) -> bytes:
        assert not self.closed, "landed in memory that is unmapped"
        self.passes[offset] += 1
        self.data[offset : offset + len(data)] = data
        return block_digest(data)

    def scatter(self, block: memoryview, pieces: Sequence[Copy]) -> bool:
        assert not self.closed, "scattered into memory that is unmapped"
        for one in pieces:
            for run in range(one.count):
                at = one.source_offset + run * one.source_stride
                to = one.target_offset + run * one.target_stride
                assert 0 <= at < at + one.nbytes <= len(block)
                assert 0 <= to < to + one.nbytes <= len(self.data)
                self.data[to : to + one.nbytes] = block[at : at + one.nbytes]
        return True

    def check_header(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def instance(name: str = "seed", **changes) -> Instance:
    """Returns the announcement of a ready instance; `changes` are fields of it."""
    fields = {
        "instance": name, "generation": f"life of {name}", "model": "tiny",
        "state": State.READY, "format": FORMAT, "placement": Placement(),
        "weights": Weights("v1", "digest", 1), "ranks": (RankBlocks(0, 4, 4, 4096, "digest"),),
        "address": "127.0.0.1:1",
    } | changes  # fmt: skip
    return Instance(**fields)


def transfer_state(transfer: str = "t1", **changes) -> TransferState:
    """Returns what the fleet is told of a transfer that runs; `changes` are fields of it."""
    fields = {
        "transfer": transfer, "instance": "target", "address": "127.0.0.1:2",
        "phase": "transferring", "source_instance": "seed", "transport": "tcp", "note": "",
        "bytes_verified": 1 << 20, "bytes_total": 4 << 20, "bytes_moved": 2 << 20,
        "bytes_reread": 1 << 20, "blocks_verified": 1, "blocks_total": 4, "blocks_failed": 1,
        "bytes_per_second": 1 << 20, "average_bytes_per_second": 1 << 19, "age_seconds": 2.5,
        "path": (
            PathStep("dead", "127.0.0.1:3", "tcp", 0, "gone"),
            PathStep("seed", "127.0.0.1:1", "tcp", 1 << 20),
        ),
    } | changes  # fmt: skip
    return TransferState(**fields)


# A seed in real shared memory, and an engine that attaches without torch


class Memory:
    """Arenas of one instance in real memfds, filled or all zero."""

    def __init__(self, layouts: Sequence[Manifest], contents: Sequence[bytes] = ()) -> None:
        self.layouts = list(layouts)
        self.manifests = list(layouts)
        self.descriptors = []
        self.arenas: list[HostArena] = []
        for layout in layouts:
            fd = create_memfd("tests", layout.data_bytes)
            arena = HostArena(fd, layout.data_bytes, writable=True)
            arena.write_header("tests")
            self.descriptors.append(fd)
            self.arenas.append(arena)
        if contents:
            self.fill(contents)

    def fill(self, contents: Sequence[bytes]) -> None:
        """Writes weights and computes their digests."""
        for arena, data in zip(self.arenas, contents, strict=True):
            arena.land(0, data)
        self.manifests = [verified(m, d) for m, d in zip(self.layouts, contents, strict=True)]

    def contents(self, rank: int = 0) -> bytes:
        """Returns the bytes of a rank's arena."""
        return bytes(self.arenas[rank].view(0, self.layouts[rank].data_bytes))

    @property
    def digest(self) -> str:
        """Weights digest; empty while there are none."""
        return weights_digest(self.manifests)

    def seal(self) -> None:
        """Lets nobody else map the memory for writing."""
        for fd in self.descriptors:
            seal(fd)

    def close(self) -> None:
        """Lets go of it; whoever mapped it keeps it."""
        for arena in self.arenas:
            arena.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


class LentMemory:
    """Memory of the shapes of arenas, of which nothing is allocated: for staging."""

    def __init__(self, layouts: Sequence[Manifest]) -> None:
        self.layouts = list(layouts)
        self.descriptors = [create_sparse_memfd("lent", one.data_bytes) for one in layouts]
        for fd, layout in zip(self.descriptors, layouts, strict=True):
            arena = HostArena(fd, layout.data_bytes, writable=True, populate=False)
            arena.write_header("tests")
            arena.close()

    @property
    def by_rank(self) -> list[list[int]]:
        """Descriptors of each rank."""
        return [[fd] for fd in self.descriptors]

    @property
    def allocated_blocks(self) -> int:
        """Blocks' worth of memory that is allocated, without the headers."""
        return sum(os.fstat(fd).st_blocks * 512 // BLOCK_BYTES for fd in self.descriptors)

    def bytes_at(self, index: int, rank: int = 0) -> bytes:
        """Returns what lies in the place of a block."""
        block = self.layouts[rank].block(index)
        return os.pread(self.descriptors[rank], block.nbytes, HEADER_BYTES + block.offset)

    def close(self) -> None:
        """Lets go of it; whoever mapped it keeps it."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def attach_message(name: str, memory: Memory, **changes) -> Attach:
    """Returns what the engine of `memory` says first; ready if it holds weights."""
    ready = bool(memory.digest)
    fields = {
        "instance": name, "generation": f"life of {name}", "model": "tiny",
        "state": State.READY if ready else State.DUMMY, "format": FORMAT,
        "placement": Placement(),
        "weights": Weights("v1", memory.digest, 1) if ready else Weights(),
        "manifests": tuple(memory.manifests), "artifacts": {}, "probe": PROBE if ready else b"",
    } | changes  # fmt: skip
    return Attach(**fields)


class FakeEngine:
    """An engine's side of the attachment socket."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name = name
        self.memory = memory
        self.channel: AsyncChannel | None = None

    async def attach(self, path: Path | str, **changes) -> Accepted | Denied:
        """Connects and attaches; `changes` are fields of the message."""
        message = attach_message(self.name, self.memory, **changes)
        return await self.say(path, encode(message), self.memory.descriptors)

    async def say(
        self, path: Path | str, frame: bytes, descriptors: Sequence[int] = ()
    ) -> Accepted | Denied:
        """Connects and sends any first frame."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        self.channel = AsyncChannel(sock)
        await asyncio.get_running_loop().sock_connect(sock, str(path))
        await self.channel.send(frame, tuple(descriptors))
        return decode_to_engine(await self.channel.receive())

    async def update(self, **fields) -> Accepted | Denied:
        """Says how the instance has changed."""
        await self.channel.send(encode(Update(**fields)))
        return decode_to_engine(await self.channel.receive())

    async def lend(self, descriptors: Sequence[int], per_rank: int = 1) -> Accepted | Denied:
        """Lends memory for staging."""
        await self.channel.send(encode(Lend(per_rank)), tuple(descriptors))
        return decode_to_engine(await self.channel.receive())

    async def commit(self, manifests: Sequence[Manifest], version: str, epoch: int = 1) -> None:
        """Becomes ready with weights that have landed."""
        self.memory.manifests = list(manifests)
        self.memory.seal()
        weights = Weights(version, weights_digest(self.memory.manifests), epoch)
        answer = await self.update(
            state=State.READY, weights=weights, manifests=tuple(manifests), probe=PROBE
        )
        assert isinstance(answer, Accepted), answer

    def leave(self) -> None:
        """Detaches as a process does that ends, however it ends."""
        if self.channel:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        """Leaves and lets go of its memory."""
        self.leave()
        self.memory.close()


# Sources that misbehave


class FakeFleet:
    """A list of instances that tests change at will."""

    def __init__(self, *instances: Instance) -> None:
        self.known = list(instances)
        self.asked = 0
        self.missing = ""
        self.address = "here"

    async def instances(self) -> list[Instance]:
        self.asked += 1
        return list(self.known)

    def announce_soon(self) -> None:
        pass


class FakeSource:
    """Weights in memory, and what goes wrong when somebody reads them."""

    def __init__(self, name: str, layouts: Sequence[Manifest], contents: Sequence[bytes]) -> None:
        self.contents = list(contents)
        self.manifests = [verified(m, d) for m, d in zip(layouts, contents, strict=True)]
        self.record = instance(
            name, weights=Weights("v1", weights_digest(self.manifests), 1),
            placement=Placement(len(layouts)),
            ranks=tuple(
                RankBlocks(m.rank, m.block_count, m.block_count, m.data_bytes, m.digest)
                for m in self.manifests
            ),
        )  # fmt: skip
        self.corrupt: Counter[int] = Counter()
        """How often each block is still sent with a flipped byte."""
        self.fails_after: int | None = None
        """Blocks that it delivers before it raises `error`."""
        self.error: Exception | None = None
        self.open_error: Exception | None = None
        self.reads: list[int] = []
        self.limits: set[TokenBucket] = set()
        """What its readers were bound to."""
        self.pause: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """Awaited before each block."""
        self.upstream: tuple[str, ...] = ()
        self.manifest_holders: list[str] = []
        """Who was named to have each manifest from that was asked for."""
        self.elsewhere: Manifest | None = None
        """What those have, where it's another one."""
        self.leases = 0
        self.stalled = asyncio.Event()
        """Set when a reader waits for a block that will not come."""
        self.stalls = False


class FakeTransport:
    """Reaches fake sources by their name."""

    def __init__(self, *sources: FakeSource, name: str = "fake", unusable: str = "") -> None:
        self.name = name
        self.sources = {source.record.instance: source for source in sources}
        self.why_unusable = unusable

    async def unusable(self, source: Instance) -> str:
        return self.why_unusable

    async def open(self, source: Instance, holder: str, *, yields: bool = False) -> FakeSession:
        found = self.sources[source.instance]
        if found.open_error:
            raise found.open_error
        found.leases += 1
        return FakeSession(found)


class FakeSession:
    """A lease on a fake source."""

    def __init__(self, source: FakeSource) -> None:
        self._source = source
        self.upstream = source.upstream

    async def manifest(self, rank: int, holder: Instance | None = None) -> Manifest:
        self._source.manifest_holders.append(holder.instance if holder else "")
        return (holder and self._source.elsewhere) or self._source.manifests[rank]

    async def read(self, rank, blocks, land, limit) -> None:
        source = self._source
        source.limits.add(limit)
        for index in blocks:
            if source.fails_after is not None and len(source.reads) >= source.fails_after:
                if source.stalls:
                    source.stalled.set()
                    await asyncio.Event().wait()
                raise source.error
            block = source.manifests[rank].block(index)
            data = bytearray(source.contents[rank][block.offset : block.offset + block.nbytes])
            if source.corrupt[index]:
                source.corrupt[index] -= 1
                data[-1] ^= 1
            source.reads.append(index)
            await source.pause()
            land(index, memoryview(data))

    async def probe(self) -> bytes:
        return PROBE

    async def close(self) -> None:
        self._source.leases -= 1


# An engine without a model


class FakeRunner:
    """Samples the last token of each row plus one, or the next one that may come.

    Its log-probabilities are -0.5, those of prompts -1; the likeliest tokens are the one that
    is there and the ids after it, each one less.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Row, ...]] = []
        self.error: Exception | None = None
        """Raised by the next step that ends."""
        self.gate = asyncio.Event()
        """A step waits for it; set unless a test clears it."""
        self.gate.set()
        self.stepping = asyncio.Event()
        """Set when a step has begun."""
        self.reserved: tuple[int, int] = (0, 0)
        """Bytes that its devices have reserved, before and after they are trimmed."""

    async def trim_memory(self, _seconds: float = 0.0) -> tuple[int, int]:
        return self.reserved

    async def step(self, rows: tuple[Row, ...]) -> Sampled:
        self.steps.append(rows)
        self.stepping.set()
        await self.gate.wait()
        if self.error:
            error, self.error = self.error, None
            raise error
        tokens = [_next_token(row) if row.samples else -1 for row in rows]
        wanted = [row.sampling.logprobs for row in rows]
        logprobs = {n: _likely(tokens[n], -0.5, k) for n, k in enumerate(wanted) if k is not None}
        prompts = {
            n: tuple(_likely(t, -1.0, row.sampling.prompt_logprobs) for t in row.following)
            for n, row in enumerate(rows)
        }
        return Sampled(tuple(tokens), logprobs, prompts)


def _likely(token: int, logprob: float, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, tuple((token + n, logprob - n) for n in range(count)))


def _next_token(row: Row) -> int:
    token = row.tokens[-1] + 1
    for candidate in (*range(token, token + 9), *range(8 * len(row.allowed))):
        may = not row.allowed or row.allowed[candidate // 8] >> candidate % 8 & 1
        if may and candidate not in row.banned:
            return candidate
    return token


# Text without a model


def _byte_letters() -> dict[int, str]:
    """Returns the letter that a byte-level tokenizer writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + n) for n, byte in enumerate(others)}


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, as in GPT-2, Llama 3 and SmolLM2; token 256 is ` the`, 257 special."""
    letters = _byte_letters()
    vocab = {letter: byte for byte, letter in letters.items()} | {letters[32] + "the": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def replace(record, **changes):
    """Returns a record with some fields changed."""
    return msgspec.structs.replace(record, **changes)
