"""Has the ranks of an instance meet: gloo on CPU, NCCL on CUDA.

They run on one host: they meet in a memory file that the front made and listen on loopback.
Nothing is pickled, no port is fixed and no file stays behind. Each time that they meet, they
do so under another name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch

from engine_service.core.rank_config import RankConfig
from engine_service.device.parallel import ALONE, NOBODY, Group, Groups, enter, first_line, leave
from engine_service.errors import CollectiveFailed, ConfigError

_distributed: Any = torch.distributed  # its stubs lack much of what it has

Meet = Callable[[Any, RankConfig], Any]
"""Opens a process group: takes a store that all ranks share, and who this one is."""


def join(settings: RankConfig, rendezvous_fd: int, meet: Meet) -> Groups:
    """Meets the other ranks of an instance; returns once all are there.

    `rendezvous_fd` is a memory file that all of them inherited. Raises `CollectiveFailed`
    when a rank stays away beyond `collective_timeout_seconds`.
    """
    if settings.world_size == 1:
        return NOBODY
    if rendezvous_fd < 0:
        raise ConfigError(f"{settings.world_size} ranks have nowhere to meet", field="tp")
    try:
        return _joined(settings, rendezvous_fd, meet)
    except RuntimeError as error:
        # Without its frames, which would keep the store: its end writes to the file once more.
        raise CollectiveFailed(
            f"rank {settings.rank} of {settings.world_size} did not meet the others within "
            f"{settings.collective_timeout_seconds:g} s: {first_line(error)}",
            rank=str(settings.rank),
        ) from error.with_traceback(None)


def _joined(settings: RankConfig, rendezvous_fd: int, meet: Meet) -> Groups:
    store = _distributed.FileStore(f"/proc/self/fd/{rendezvous_fd}", -1)
    store.set_timeout(_timeout(settings))
    return meet_all(store, settings, meet)


def meet_all(store: Any, settings: RankConfig, meet: Meet) -> Groups:
    """Opens the groups of a rank, in the same order on every rank. Raises `RuntimeError`."""
    _await_all(_distributed.PrefixStore(f"{settings.generation} is there", store), settings)
    world = _open(store, settings.generation, settings, meet)
    parts = settings.tensor_parallel_size
    if parts in (1, settings.world_size):
        return Groups(ALONE if parts == 1 else world, world)
    own = msgspec.structs.replace(settings, rank=settings.rank % parts, world_size=parts)
    name = f"{settings.generation}.{settings.rank // parts}"
    try:
        return Groups(_open(store, name, own, meet), world)
    except RuntimeError:
        leave(Groups(world, world))
        raise


def _await_all(store: Any, settings: RankConfig) -> None:
    """Waits once for all: opening a group would wait as long for each rank in turn."""
    store.set(str(settings.rank), "")
    store.wait([str(rank) for rank in range(settings.world_size)], _timeout(settings))


def _open(store: Any, name: str, settings: RankConfig, meet: Meet) -> Group:
    own = f"{name} {settings.rank}"  # ranks may share a process, as tests do
    enter(own, meet(_distributed.PrefixStore(name, store), settings), settings.rank)
    return Group(settings.rank, settings.world_size, own)


def meet_over_gloo(store: Any, settings: RankConfig) -> Any:
    """Opens a process group on the CPU."""
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - so does everybody who sets a timeout or a device
    options._timeout = _timeout(settings)  # noqa: SLF001
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    return gloo(store, settings.rank, settings.world_size, options)


def meet_over_nccl(store: Any, settings: RankConfig) -> Any:
    """Opens a process group on CUDA; its collectives may be captured in a graph.

    The ranks meet in their first collective, when the first graph is captured.
    """
    nccl = _distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _timeout(settings)  # noqa: SLF001 - as above
    return nccl(store, settings.rank, settings.world_size, options)


def _timeout(settings: RankConfig) -> timedelta:
    return timedelta(seconds=settings.collective_timeout_seconds)
