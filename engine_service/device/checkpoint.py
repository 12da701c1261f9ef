"""Opens a checkpoint folder: which tensors it holds, where, and that it is sound.

The safetensors library judges each file; what it lets pass (a name that stands twice
in a header) is judged here. Nothing stays mapped: bytes are read with `preadv`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from engine_service.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    name: str
    path: Path
    dtype: str
    """As safetensors calls it, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a checkpoint by name, without reading their data.

    With an index, the index decides: files that it does not name are ignored. Raises
    `CheckpointError` naming the file and, where there is one, the tensor.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return _open_shards(folder, _read_index(index))
    if not (folder / SINGLE_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}", file=str(folder)
        )
    return read_file(folder / SINGLE_FILE)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file. Raises `CheckpointError` for an unsound one."""
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks the header against the size of the file
        header, start = _read_header(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: {error}", file=path.name) from error
    return {
        name: StoredTensor(
            name, path, entry["dtype"], tuple(entry["shape"]),
            start + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }  # fmt: skip


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size), object_pairs_hook=_unique)
    return header, 8 + size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"{name} stands twice in the header")
        unique[name] = value
    return unique


def _read_index(path: Path) -> dict[str, str]:
    try:
        shards = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, OSError) as error:
        raise CheckpointError(f"{path.name}: {error}", file=path.name) from error
    for name, shard in shards.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{path.name}: {name} lies in {shard!r}, which is not the name of a shard",
                file=path.name, tensor=name,
            )  # fmt: skip
    return shards


def _open_shards(folder: Path, index: dict[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(index.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{shard}: missing, but {INDEX_FILE} names it", file=shard)
        for name, tensor in read_file(folder / shard).items():
            if (place := index.get(name, "no file")) != shard:
                raise CheckpointError(
                    f"{shard}: holds {name}, which {INDEX_FILE} puts in {place}",
                    file=shard, tensor=name,
                )  # fmt: skip
            tensors[name] = tensor
    for name, shard in index.items():
        if name not in tensors:
            raise CheckpointError(
                f"{shard}: lacks {name}, which {INDEX_FILE} puts there", file=shard, tensor=name
            )
    return tensors
