"""What the ranks of an instance compute together: over gloo on CPU, over NCCL on CUDA.

The collectives are custom operators that look their group up by name when they are
called, so a traced graph holds only the call. Every rank gets the same bits from either:
each piece is reduced in one place, or in one order, and handed round, so all ranks sample
the same token from the same logits.

When a rank dies or hangs, gloo raises `CollectiveFailed` here, and those that live may meet
anew; NCCL ends the process that waited beyond the timeout, since its kernels cannot be called
back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_service.errors import CollectiveFailed

_distributed: Any = torch.distributed  # its stubs lack much of what it has
_library = torch.library.Library("seedrelay", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor partial, str group) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("all_largest(Tensor partial, str group) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("gather(Tensor part, str group, int ranks) -> Tensor")  # type: ignore[no-untyped-call]

_joined: dict[str, tuple[Any, int]] = {}
"""Process group and this process's rank in it, by the name that an operator carries."""
_numbers = itertools.count()


class Group:
    """The ranks that compute one model together; alone, it computes nothing.

    Layers share it, so it becomes another one in place when others meet.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, name: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name

    def follow(self, other: Group) -> None:
        """Becomes another group under its own name, so that what is captured follows as well."""
        self.rank, self.ranks = other.rank, other.ranks
        if other.name in _joined:
            _joined[self.name] = _joined[other.name]

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
        group, rank = _found(self.name)
        try:
            group.send([data], to, 0).wait()
        except RuntimeError as error:
            raise _failed(f"transfer to rank {to}", rank, error) from error

    def receive(self, into: Tensor, source: int) -> None:
        """Takes bytes from one rank, in place. Raises `CollectiveFailed`."""
        group, rank = _found(self.name)
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

    @classmethod
    def lonely(cls) -> Groups:
        """Returns groups of nobody else, which may become others; their names stay."""
        return cls(*(Group(name=f"own {next(_numbers)}") for _ in cls._fields))

    @property
    def met(self) -> bool:
        """Whether all are there whom a collective needs."""
        return all(group.ranks == 1 or group.name in _joined for group in self)

    def follow(self, others: Groups) -> None:
        """Leaves these groups, and becomes others in place."""
        leave(self)
        for own, other in zip(self, others, strict=True):
            own.follow(other)
        leave(others)


NOBODY = Groups()


def enter(name: str, process_group: Any, rank: int) -> None:
    """Makes a process group known to the operators, by the name that they carry."""
    _joined[name] = process_group, rank


def leave(groups: Groups) -> None:
    """Lets go of groups, and of the connections to their ranks.

    What would compute together with them raises `CollectiveFailed` from then on.
    """
    for group in groups:
        _joined.pop(group.name, None)


class _Alike:
    """Stands in for other ranks, as if each held what this one does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def allreduce(self, tensors: list[Tensor], op: Any) -> _Alike:
        if op == _distributed.ReduceOp.SUM:
            tensors[0].mul_(self._ranks)
        return self

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Alike:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self

    def wait(self) -> None:
        """Nobody is waited for."""


@contextmanager
def rehearsing(groups: Groups) -> Iterator[None]:
    """Has collectives come out as if the other ranks held what this one does; none takes part."""
    present = {group.name: _joined.get(group.name) for group in groups}
    _joined.update({g.name: (_Alike(g.ranks), g.rank) for g in groups})
    try:
        yield
    finally:
        leave(groups)
        _joined.update({name: joined for name, joined in present.items() if joined})


def _all_reduce(partial: Tensor, group: str, op: Any = _distributed.ReduceOp.SUM) -> Tensor:
    process_group, rank = _found(group)
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
    process_group, rank = _found(group)
    parts = part.new_empty(ranks, *part.shape)
    try:
        process_group.allgather([list(parts.unbind(0))], [part.contiguous()]).wait()
    except RuntimeError as error:
        raise _failed("gather", rank, error) from error
    return parts.transpose(0, 1).flatten(1)


def _found(group: str) -> tuple[Any, int]:
    if group not in _joined:
        raise CollectiveFailed("this rank has left the others, and has not met them anew")
    return _joined[group]


def _failed(what: str, rank: int, error: RuntimeError) -> CollectiveFailed:
    return CollectiveFailed(
        f"rank {rank}: another rank has gone or did not come to the {what} in time: "
        f"{first_line(error)}",
        rank=str(rank),
    )


def first_line(error: RuntimeError) -> str:
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
