"""What the checks run on: a device, a small model on it, and processes beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from engine_service.core.messages import RankConfig
from engine_service.device.arena import Arena
from engine_service.device.batch import make_batch
from engine_service.device.config import ModelConfig
from engine_service.device.devices import Device, open_device
from engine_service.device.dtypes import served_dtype
from engine_service.device.kv_cache import KVCache
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.runner import Graphs, Runner
from relay_service.core.layout import lay_out
from relay_service.memory import cuda_driver
from relay_service.memory.cuda_port import Driver

MODEL = ModelConfig(
    hidden_size=1024, layers=8, heads=16, kv_heads=8, head_dim=64, ffn_size=4096,
    vocab_size=32000, tied=True, norm_eps=1e-5, max_positions=2048,
)  # fmt: skip
BLOCKS, BLOCK_TOKENS = 512, 16
LANDER = [sys.executable, "-m", "tests.gpu.lander"]


@dataclass
class Place:
    """A device, and what is built on it in the course of the checks."""

    device: Device
    driver: Driver
    model: ModelConfig = MODEL
    dtype: str = "bfloat16"
    lander: Sequence[str] = tuple(LANDER)
    used: Callable[[], dict[str, int]] = dict
    """Bytes that torch has reserved, and that are free on the device."""
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = served_dtype(self.dtype)
        self.layout = lay_out(0, llama_format.unit_specs(self.model, dtype))
        self.arena = self.device.allocate(self.layout, "target")
        self.llama = Llama(self.model, self.arena.tensors)
        self.cache = KVCache(self.model, dtype, BLOCKS, BLOCK_TOKENS, self.device.torch)
        self.graphs: Graphs = self.device.graphs(self.llama, self.cache)
        self.runner = Runner(self.llama, self.cache, self.graphs)
        self.sources = [self._source(seed) for seed in (1, 2)]
        self.manifests = [source.digested() for source in self.sources]

    def _source(self, seed: int) -> Arena:
        """Returns random weights in host memory, as a seed on a CPU holds them."""
        source = MemfdArena(self.layout, f"source {seed}")
        generator = torch.Generator().manual_seed(seed)
        computed = llama_format.computed_tensors(self.model)
        for name, tensor in source.tensors.items():
            if name in computed:
                tensor.copy_(computed[name])
            elif tensor.dim() == 1:
                tensor.fill_(1)
            elif name != "head" or not self.model.tied:
                tensor.normal_(0, 0.05, generator=generator)
        return source

    @torch.inference_mode()
    def logits(self, rows, *, replay: bool) -> torch.Tensor:
        """Returns the logits of a decode batch, eager or replayed, on the host."""
        batch = make_batch(rows, self.cache, self.model.vocab_size)
        found = self.graphs.replay(batch) if replay else self.llama.forward(batch, self.cache)
        return found.cpu()

    def start(self, *arguments: str, fds: Sequence[int]) -> subprocess.Popen[str]:
        """Starts a process beside this one."""
        return subprocess.Popen(
            [*self.lander, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, pass_fds=tuple(fds),
        )  # fmt: skip

    @property
    def target(self) -> str:
        """The arena's descriptors, as a process takes them."""
        return ",".join(map(str, self.arena.descriptors))


class Lander:
    """A process that maps the arena and lands sources in it; ends with its `with` block."""

    def __init__(self, place: Place) -> None:
        fds = [source.descriptors[0] for source in place.sources]
        self.process = place.start(
            "land", place.target, str(place.layout.data_bytes), *map(str, fds),
            fds=[*place.arena.descriptors, *fds],
        )  # fmt: skip
        self.said = answer_of(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def land(self, source: int, threads: int = 1) -> float:
        """Lands a source; returns the seconds that it took."""
        self.process.stdin.write(f"{source} {threads}\n")
        self.process.stdin.flush()
        return answer_of(self.process)["seconds"]

    def leave(self) -> None:
        """Has the process unmap and end."""
        rest, _ = self.process.communicate(timeout=60)
        assert (rest, self.process.returncode) == ('{"closed": true}\n', 0), rest


def answer_of(process: subprocess.Popen[str]) -> dict:
    """Reads a process's next answer. Raises `RuntimeError` when it has ended instead."""
    line = process.stdout.readline()
    if not line:
        status = process.wait()
        end(process)
        raise RuntimeError(f"the other process ended with status {status}")
    return json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process as a crash does, if it has not ended, and closes its pipes."""
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def on_cuda() -> Place:
    """Returns the first CUDA device as a place."""
    settings = RankConfig(
        rank=0, world_size=1, generation="gpu", dtype="bfloat16", device="cuda", threads=1,
        kv_block_tokens=BLOCK_TOKENS, kv_blocks=BLOCKS,
    )  # fmt: skip

    def used() -> dict[str, int]:
        torch.cuda.synchronize()
        return {
            "reserved_bytes": torch.cuda.memory_reserved(),
            "free_bytes": torch.cuda.mem_get_info()[0],
        }

    return Place(open_device(settings), cuda_driver.load(), used=used)
