"""Which part of a model each rank holds. Plain arithmetic, no tensors.

An instance has tp x ep ranks; rank `e * tp + t` is part `t` of expert-parallel group `e`.
Whatever every token goes through (attention, dense and shared feed-forwards, vocabulary) is
cut into tp parts, and each group holds all of them: a group that is lost takes nothing with
it but experts. Routed experts are spread over the groups as a map says, and each is cut into
tp parts within its group.

Heads, feed-forward and vocabulary are cut into equal runs, one per part. Key-value heads
are cut too while there are enough of them; beyond that several ranks hold the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec

from engine_service.core.expert_map import ExpertMap, RankExperts
from engine_service.device.config import ModelConfig
from engine_service.errors import UnsupportedModel
from relay_service.core.cut import Part


class Shard(msgspec.Struct, frozen=True):
    """One of so many equal parts."""

    rank: int = 0
    ranks: int = 1
    experts: RankExperts | None = None
    """Which experts are in the slots of this rank; none where it holds all, in their order."""

    def slots(self, layer: int, experts: int) -> Sequence[int]:
        """Returns the expert in each slot of a layer that has so many."""
        return self.experts.slots(layer) if self.experts else range(experts)

    def cut(self, size: int) -> tuple[int, int]:
        """Returns first and count of this part of `size` things."""
        count = size // self.ranks
        return self.rank * count, count


WHOLE = Shard()


class Slice(msgspec.Struct, frozen=True):
    """The rows and columns of a checkpoint tensor that a rank holds."""

    whole: tuple[int, ...]
    """Shape of the tensor in the checkpoint, of one or two dimensions."""
    rows: tuple[int, int]
    """First row and number of rows."""
    columns: tuple[int, int]
    """First column and number of columns; `(0, 1)` for one dimension."""
    kept: tuple[int, int] | None = None
    """Which of the columns stay, where the others only decide how those are rounded."""

    @classmethod
    def by_rows(cls, whole: tuple[int, ...], shard: Shard = WHOLE) -> Self:
        """Cuts the rows and keeps every column."""
        return cls(whole, shard.cut(whole[0]), (0, math.prod(whole[1:])))

    @classmethod
    def by_columns(cls, whole: tuple[int, ...], shard: Shard) -> Self:
        """Cuts the columns and keeps every row."""
        return cls(whole, (0, whole[0]), shard.cut(whole[1]))

    def with_whole_rows(self) -> Self:
        """Returns the same rows with all their columns, of which those of this slice are kept."""
        columns = (0, math.prod(self.whole[1:]))
        if columns == self.columns:
            return self
        return msgspec.structs.replace(self, columns=columns, kept=self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (self.rows[1], self.columns[1])[: len(self.whole)]

    @property
    def elements(self) -> int:
        """Elements of the slice."""
        return self.rows[1] * self.columns[1]

    def part(self, logical: str) -> Part:
        """Returns it as a part of the logical tensor of that name."""
        return Part(logical, (self.whole[0], math.prod(self.whole[1:])), self.rows, self.columns)

    def runs(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Finds elements of the slice in the whole tensor: yields first and length of each run.

        Whole rows are one run, however many they are; a cut row is a run of its own.
        """
        width = math.prod(self.whole[1:])
        first, cut = self.columns
        if cut == width:
            yield self.rows[0] * width + start, count
            return
        end = start + count
        while start < end:
            row, column = divmod(start, cut)
            length = min(cut - column, end - start)
            yield (self.rows[0] + row) * width + first + column, length
            start += length


def check_divides(config: ModelConfig, ranks: int) -> None:
    """Raises `UnsupportedModel` with the numbers when a model has no equal parts."""
    for what, size in _cut(config):
        if size % ranks:
            raise _uneven(what, size, ranks)
    if config.kv_heads % ranks and ranks % config.kv_heads:
        raise _uneven("key-value heads", config.kv_heads, ranks)


def place_experts(config: ModelConfig, groups: int, redundant: int) -> ExpertMap | None:
    """Spreads the experts over groups of ranks, each in as many slots; none for a dense model.

    Raises `UnsupportedModel` with the numbers when that cannot be done.
    """
    moe = config.moe
    if moe is None:
        if groups == 1 and not redundant:
            return None
        field, found = ("ep", groups) if groups > 1 else ("redundant_experts", redundant)
        raise UnsupportedModel("the model has no experts", field=field, found=str(found))
    slots = moe.experts + redundant
    words = f"{moe.experts} experts" + (f" and {redundant} redundant ones" if redundant else "")
    if slots % groups:
        raise UnsupportedModel(
            f"{words} cannot be spread evenly over {groups} groups of ranks",
            field="ep", expected=f"a divisor of {slots}", found=str(groups),
        )  # fmt: skip
    if slots > moe.experts * groups:
        raise UnsupportedModel(
            f"{words} are {slots // groups} for each of {groups} groups of ranks, "
            f"which hold an expert once",
            field="redundant_experts", expected=f"at most {moe.experts * (groups - 1)}",
            found=str(redundant),
        )  # fmt: skip
    sparse = [layer for layer in range(config.layers) if not config.is_dense(layer)]
    return ExpertMap.linear(moe.experts, sparse, groups, redundant)


def kv_shard(config: ModelConfig, shard: Shard) -> Shard:
    """Returns which part of the key-value heads a rank holds: its own, or a copy of one head."""
    copies = max(1, shard.ranks // config.kv_heads)
    return Shard(shard.rank // copies, shard.ranks // copies)


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the sizes with which one rank computes; those that all ranks share stay."""
    moe = config.moe and msgspec.structs.replace(
        config.moe,
        ffn_size=config.moe.ffn_size // shard.ranks,
        shared_ffn_size=config.moe.shared_ffn_size // shard.ranks,
    )
    return msgspec.structs.replace(
        config,
        heads=config.heads // shard.ranks,
        kv_heads=kv_shard(config, shard).cut(config.kv_heads)[1],
        ffn_size=config.ffn_size // shard.ranks,
        moe=moe,
    )


def _cut(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yields what is cut into equal runs, and how many there are."""
    yield "heads", config.heads
    moe = config.moe
    if moe is None or moe.dense_layers:
        yield "feed-forward rows", config.ffn_size
    if moe:
        yield "feed-forward rows of an expert", moe.ffn_size
        yield "feed-forward rows of the shared experts", moe.shared_ffn_size
    yield "tokens of vocabulary", config.vocab_size


def _uneven(what: str, size: int, ranks: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{size} {what} cannot be split over {ranks} ranks",
        field="tp", expected=f"a divisor of {size}", found=str(ranks),
    )  # fmt: skip
