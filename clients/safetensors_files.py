"""Reads the tensors of a checkpoint folder without torch: headers are JSON, bytes stay mapped."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from clients.engine_updates import Tensor

MAX_HEADER_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"


def read_folder(folder: Path) -> list[Tensor]:
    """Returns all tensors of a folder; with an index, those of the files that it names.

    Raises `ValueError` for a file that is broken, `OSError` for one that is not there.
    """
    index = folder / INDEX
    if index.is_file():
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if any(Path(shard).name != shard for shard in shards):
            raise ValueError(f"{index}: names files outside its folder")
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{folder} holds no safetensors")
    try:
        return [tensor for shard in shards for tensor in _read(folder / shard)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: a header cannot be read: {error}") from error


def _read(path: Path) -> Iterator[Tensor]:
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    (size,) = struct.unpack("<Q", mapped[:8]) if len(mapped) >= 8 else (MAX_HEADER_BYTES + 1,)
    if size > min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise ValueError(f"{path}: its header cannot be")
    data = mapped[8 + size :]
    for name, entry in json.loads(bytes(mapped[8 : 8 + size])).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"{path}: {name} lies outside the file")
        yield Tensor(name, entry["dtype"], entry["shape"], data[begin:end])
