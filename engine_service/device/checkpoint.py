"""Opens a checkpoint folder: which tensors it holds, where, and that its files are sound.

The safetensors library judges each file; what it lets pass (a name that stands twice
in a header) is judged here. Nothing stays mapped: bytes are read with `preadv`. Where
files and index disagree is told to whoever checks the whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from engine_service.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorHeader(msgspec.Struct, frozen=True):
    """What is known of a checkpoint tensor before its bytes."""

    name: str
    origin: str
    """Where it comes from: the name of a file."""
    dtype: str
    """As safetensors calls it, such as `BF16`."""
    shape: tuple[int, ...]


class StoredTensor(TensorHeader, frozen=True):
    """One tensor of a file."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


H_co = TypeVar("H_co", bound=TensorHeader, covariant=True)


class Checkpoint(NamedTuple, Generic[H_co]):
    """What a checkpoint holds, such as the tensors of a folder."""

    tensors: Mapping[str, H_co]
    misplaced: tuple[str, ...] = ()
    """In words, what the index says otherwise than the files."""

    def without(self, unread: Callable[[str], bool]) -> Checkpoint[H_co]:
        """Returns it without tensors that needn't be read."""
        kept = {name: one for name, one in self.tensors.items() if not unread(name)}
        return Checkpoint(kept, self.misplaced)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_checkpoint(folder: Path) -> Checkpoint[StoredTensor]:
    """Returns all tensors of a checkpoint by name, without reading their data.

    With an index, the index decides: files that it does not name are ignored. Raises
    `CheckpointError` naming a file that is missing or unsound.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return _open_shards(folder, _read_index(index))
    if not (folder / SINGLE_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}", file=str(folder)
        )
    return Checkpoint(read_file(folder / SINGLE_FILE))


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
            name, path.name, entry["dtype"], tuple(entry["shape"]), path,
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


def _open_shards(folder: Path, index: dict[str, str]) -> Checkpoint[StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    places: dict[str, list[str]] = {}
    for shard in sorted(set(index.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{shard}: missing, but {INDEX_FILE} names it", file=shard)
        for name, tensor in read_file(folder / shard).items():
            places.setdefault(name, []).append(shard)
            tensors[name] = tensor
    return Checkpoint(tensors, tuple(_misplaced(places, index)))


def _misplaced(places: dict[str, list[str]], index: dict[str, str]) -> Iterator[str]:
    for name, shards in places.items():
        if len(shards) > 1:
            yield f"{name} lies in {' and in '.join(shards)}"
        elif shards[0] != index.get(name):
            yield f"{name} lies in {shards[0]}, {INDEX_FILE} says {index.get(name, 'nothing')}"
    for name, shard in index.items():
        if name not in places:
            yield f"{name} does not lie in {shard}, where {INDEX_FILE} puts it"
