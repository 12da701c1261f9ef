"""Writes the tensors of a checkpoint as one safetensors file, or as shards with an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from engine_service.checkpoint.tensor_file import Tensor, file_header, file_values
from engine_service.checkpoint.writer import FolderWriter

PHASE = "write weights"
"""Name of this phase to `Progress`."""


def write_weights(
    writer: FolderWriter, tensors: Sequence[Tensor], shard_bytes: int | None = None
) -> None:
    """Writes `model.safetensors`, or shards where that would be too large.

    Args:
        writer: The folder.
        tensors: All tensors, in the order in which shards are filled.
        shard_bytes: A shard's values take no more than this, unless one tensor alone
            does; None for a single file.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    shards = _split(tensors, shard_bytes or total)
    names = _file_names(len(shards))
    done = 0
    for name, shard in zip(names, shards, strict=True):
        in_order = sorted(shard, key=lambda tensor: tensor.name)
        values = _counted(writer, file_values(in_order), done, total)
        writer.write(name, chain([file_header(in_order)], values))
        done += sum(tensor.nbytes for tensor in shard)
    if len(shards) > 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        writer.write_json("model.safetensors.index.json", index)


def _split(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Fills shards in order; a tensor that no longer fits opens the next one."""
    shards: list[list[Tensor]] = [[]]
    free = shard_bytes
    for tensor in tensors:
        if tensor.nbytes > free and shards[-1]:
            shards.append([])
            free = shard_bytes
        shards[-1].append(tensor)
        free -= tensor.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    """Returns the names that Hugging Face gives to `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _counted(
    writer: FolderWriter, chunks: Iterable[memoryview], done: int, total: int
) -> Iterator[memoryview]:
    """Passes chunks on and reports, from `done` on, how many bytes went through."""
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        writer.progress(PHASE, done, total)
