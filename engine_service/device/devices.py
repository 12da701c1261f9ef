"""Chooses, by `--device`, what a rank is made of: the only place that tells CPU from CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_service.core.rank_config import RankConfig
from engine_service.device.arena import Arena
from engine_service.device.cuda_arena import CudaArena
from engine_service.device.cuda_graphs import CudaGraphRunner
from engine_service.device.graphs import GraphRunner
from engine_service.device.kv_cache import KVCache
from engine_service.device.meeting import Meet, meet_over_gloo, meet_over_nccl
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.models.llama import Llama
from engine_service.device.plan import Memory
from engine_service.device.runner import Graphs
from engine_service.errors import ConfigError
from relay_service.core.manifest import Manifest
from relay_service.memory import cuda_driver

_MOST_COPY_THREADS = 4
"""Memory has no more to give to further ones."""


@dataclass(frozen=True)
class Device:
    """Where a rank computes, and with what."""

    torch: torch.device
    allocate: Callable[[Manifest, str], Arena]
    """Allocates an arena, for a generation."""
    graphs: Callable[[Llama, KVCache], Graphs]
    meet: Meet
    """Opens the process group of several ranks."""
    trim: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Gives back what its allocator does not use; returns bytes reserved before and after."""
    copy_threads: int = 1
    """Threads that copy weights into the arena, while no rank does anything else."""


def open_device(settings: RankConfig, memory: Memory | None = None) -> Device:
    """Returns the device of a rank; `memory` was allocated on the host for its arena.

    Raises `ConfigError` for a device that isn't there, `relay_service.errors.DeviceError`
    where its driver does not start.
    """
    return _open_cpu(settings, memory) if settings.device == "cpu" else _open_cuda(settings)


def _open_cpu(settings: RankConfig, memory: Memory | None) -> Device:
    allocate = functools.partial(MemfdArena, memory=memory)
    # Of several ranks each has a graph of its own, with the group's name in it.
    compiled = settings.compiled if settings.world_size == 1 else "off"
    graphs = functools.partial(GraphRunner, compiled=compiled)
    cores = len(os.sched_getaffinity(0)) // settings.world_size
    threads = max(1, min(cores, _MOST_COPY_THREADS))
    return Device(torch.device("cpu"), allocate, graphs, meet_over_gloo, copy_threads=threads)


def _open_cuda(settings: RankConfig) -> Device:
    """Every rank has a device of its own, by its number."""
    number, count = settings.rank, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        raise ConfigError(
            f"rank {number} needs CUDA device {number}; torch {torch.__version__} finds {count}",
            field="device", found=str(count), expected=str(settings.world_size),
            hint="install torch with CUDA, show it more devices (CUDA_VISIBLE_DEVICES), "
            "lower --tp, or use --device cpu",
        )  # fmt: skip
    torch.cuda.set_device(number)
    allocate = functools.partial(CudaArena, driver=cuda_driver.load(), device=number)
    trim = functools.partial(_trim_cuda, number)
    return Device(torch.device("cuda", number), allocate, CudaGraphRunner, meet_over_nccl, trim)


def _trim_cuda(number: int) -> tuple[int, int]:
    """What graphs have captured stays: their pools are in use."""
    before = torch.cuda.memory_reserved(number)
    torch.cuda.empty_cache()
    return before, torch.cuda.memory_reserved(number)
