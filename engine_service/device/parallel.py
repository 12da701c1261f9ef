"""Joins the ranks of an instance, and what they compute together: gloo on CPU, NCCL on CUDA.

The collectives are custom operators that look their group up by name when they are
called, so a traced graph holds only the call. Every rank gets the same bits from either:
each piece is reduced in one place, or in one order, and handed round, so all ranks sample
the same token from the same logits.

A rank that dies or hangs ends the instance either way: gloo raises `CollectiveFailed` here,
NCCL ends the process that waited beyond the timeout, since its kernels cannot be called back.

The ranks of an instance run on one host: they meet in a memory file that the front made
and listen on loopback. Nothing is pickled, no port is fixed and no file stays behind.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from engine_service.core.rank_config import RankConfig
from engine_service.errors import CollectiveFailed, ConfigError

_distributed: Any = torch.distributed  # its stubs lack much of what it has
_library = torch.library.Library("seedrelay", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor partial, str group) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("all_largest(Tensor partial, str group) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("gather(Tensor part, str group, int ranks) -> Tensor")  # type: ignore[no-untyped-call]

_joined: dict[str, tuple[Any, int]] = {}
"""Process group and this process's rank in it, by the name that an operator carries."""


class Group:
    """The ranks that compute one model together; alone, it computes nothing."""

    def __init__(self, rank: int = 0, ranks: int = 1, name: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sums `partial` over all ranks. Raises `CollectiveFailed`."""
        if self.ranks == 1:
            return partial
        result: Tensor = torch.ops.seedrelay.all_reduce.default(partial, self.name)
        return result

    def gather(self, part: Tensor) -> Tensor:
        """Joins the columns of all ranks in their order: `[rows, columns * ranks]`.

        Raises `CollectiveFailed`.
        """
        if self.ranks == 1:
            return part
        result: Tensor = torch.ops.seedrelay.gather.default(part, self.name, self.ranks)
        return result

    def send(self, data: Tensor, to: int) -> None:
        """Gives one rank bytes, which it must `receive`. Raises `CollectiveFailed`."""
        group, rank = _joined[self.name]
        try:
            group.send([data], to, 0).wait()
        except RuntimeError as error:
            raise _failed(f"transfer to rank {to}", rank, error) from error

    def receive(self, into: Tensor, source: int) -> None:
        """Takes bytes from one rank, in place. Raises `CollectiveFailed`."""
        group, rank = _joined[self.name]
        try:
            group.recv([into], source, 0).wait()
        except RuntimeError as error:
            raise _failed(f"transfer from rank {source}", rank, error) from error


def all_largest(partial: Tensor, group: str) -> Tensor:
    """Takes the larger of each number over all ranks of a group. Raises `CollectiveFailed`."""
    result: Tensor = torch.ops.seedrelay.all_largest.default(partial, group)
    return result


ALONE = Group()


class Groups(NamedTuple):
    """Whom a rank computes together with."""

    tensor: Group = ALONE
    """Those that hold the other parts of what every token goes through."""
    world: Group = ALONE
    """All of the instance: those that hold the other experts, and parts of them."""


NOBODY = Groups()


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
        store = _distributed.FileStore(f"/proc/self/fd/{rendezvous_fd}", -1)
        store.set_timeout(_timeout(settings))
        return meet_all(store, settings, meet)
    except RuntimeError as error:
        raise CollectiveFailed(
            f"rank {settings.rank} of {settings.world_size} did not meet the others within "
            f"{settings.collective_timeout_seconds:g} s: {_first_line(error)}",
            rank=str(settings.rank),
        ) from error


def leave(groups: Groups) -> None:
    """Lets go of groups, and of the connections to their ranks."""
    for group in groups:
        _joined.pop(group.name, None)


def meet_all(store: Any, settings: RankConfig, meet: Meet) -> Groups:
    """Opens the groups of a rank, in the same order on every rank. Raises `RuntimeError`."""
    world = _open(store, settings.generation, settings, meet)
    parts = settings.tensor_parallel_size
    if parts in (1, settings.world_size):
        return Groups(ALONE if parts == 1 else world, world)
    own = msgspec.structs.replace(settings, rank=settings.rank % parts, world_size=parts)
    name = f"{settings.generation}.{settings.rank // parts}"
    return Groups(_open(store, name, own, meet), world)


def _open(store: Any, name: str, settings: RankConfig, meet: Meet) -> Group:
    own = f"{name} {settings.rank}"  # ranks may share a process, as tests do
    _joined[own] = meet(_distributed.PrefixStore(name, store), settings), settings.rank
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


def _all_reduce(partial: Tensor, group: str, op: Any = _distributed.ReduceOp.SUM) -> Tensor:
    process_group, rank = _joined[group]
    total = partial.clone(memory_format=torch.contiguous_format)
    try:
        process_group.allreduce([total], op).wait()
    except RuntimeError as error:
        raise _failed("all-reduce", rank, error) from error
    return total


def _all_largest(partial: Tensor, group: str) -> Tensor:
    # What is no number on this rank stays so, whatever others have.
    return partial.maximum(_all_reduce(partial, group, _distributed.ReduceOp.MAX))


def _gather(part: Tensor, group: str, ranks: int) -> Tensor:
    process_group, rank = _joined[group]
    parts = part.new_empty(ranks, *part.shape)
    try:
        process_group.allgather([list(parts.unbind(0))], [part.contiguous()]).wait()
    except RuntimeError as error:
        raise _failed("gather", rank, error) from error
    return parts.transpose(0, 1).flatten(1)


def _failed(what: str, rank: int, error: RuntimeError) -> CollectiveFailed:
    return CollectiveFailed(
        f"rank {rank}: another rank has gone or did not come to the {what} in time: "
        f"{_first_line(error)}",
        rank=str(rank),
    )


def _first_line(error: RuntimeError) -> str:
    """Cuts what gloo puts around a reason: a place in its source, and advice."""
    text = str(error).partition("] ")[2] or str(error)
    return text.splitlines()[0].partition(". This is")[0] if text else type(error).__name__


def _same_shape(partial: Tensor, _group: str) -> Tensor:
    return partial.new_empty(partial.shape)


def _joined_shape(part: Tensor, _group: str, ranks: int) -> Tensor:
    return part.new_empty(part.shape[0], part.shape[1] * ranks)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _key)  # type: ignore[no-untyped-call]
    _library.impl("all_largest", _all_largest, _key)  # type: ignore[no-untyped-call]
    _library.impl("gather", _gather, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("seedrelay::all_reduce", _same_shape, lib=_library)
torch.library.register_fake("seedrelay::all_largest", _same_shape, lib=_library)
torch.library.register_fake("seedrelay::gather", _joined_shape, lib=_library)
