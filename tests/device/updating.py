"""Updates of ranks in this process: what each source brings, and what became of the rank."""

import ctypes
import os
import random
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from tiny_llama import Sequence, start_message

from engine_service.core.update_messages import (
    FinishStaging,
    LendStaging,
    OpenStaging,
    PushedHeader,
    StageDisk,
    StageHeaders,
    StageLent,
    StagePiece,
    UpdateStaged,
)
from engine_service.device.checkpoint import read_file
from engine_service.device.rank import Rank
from engine_service.device.torch_dtypes import bytes_of
from relay_service.core.manifest import HEADER_BYTES, Manifest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def served(folder: Path, dtype: str = "float32", **settings) -> Rank:
    """Returns a rank that serves a folder's weights, captured."""
    rank = Rank(start_message(folder, dtype, **settings))
    rank.load(folder, lambda _done, _total: None)
    rank.capture()
    return rank


def tokens(rank: Rank, count: int = 12) -> list[int]:
    """Returns greedy tokens: the first one eagerly, the others by the captured graph."""
    sequence = Sequence(PROMPT)
    for _ in range(count):
        sequence.take(rank.step((sequence.row(),)).tokens[0])
    return sequence.output


def addresses(rank: Rank) -> dict[str, int]:
    """Returns where each tensor lies."""
    return {name: tensor.data_ptr() for name, tensor in rank.arena.tensors.items()}


def opened(rank: Rank, **options) -> None:
    """Opens staging beside what the rank serves."""
    rank.staging.answer(OpenStaging(serves=rank.arena.digested(), **options))


def finished(rank: Rank) -> UpdateStaged:
    """Finishes staging."""
    return rank.staging.answer(FinishStaging())


def headers(tensors: dict[str, torch.Tensor], *, digests: bool = False) -> StageHeaders:
    """Announces tensors."""
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
             "int8": "I8", "float64": "F64"}  # fmt: skip
    return StageHeaders(
        tuple(
            PushedHeader(
                name, names[str(one.dtype).removeprefix("torch.")], tuple(one.shape),
                xxhash.xxh3_128_digest(bytes_of(one.contiguous())) if digests else b"",
            )
            for name, one in tensors.items()
        )
    )  # fmt: skip


def pieces(tensors: dict[str, torch.Tensor], nbytes: int) -> list[StagePiece]:
    """Cuts tensors, one after another, into pieces of so many bytes at most."""
    found = []
    for index, one in enumerate(tensors.values()):
        data, step = bytes(bytes_of(one.contiguous())), max(1, nbytes // one.itemsize)
        step *= one.itemsize
        found += [StagePiece(index, at, data[at : at + step]) for at in range(0, len(data), step)]
    return found


def disk(rank: Rank, folder: Path) -> None:
    """Stages a folder."""
    rank.staging.answer(StageDisk(folder=str(folder)))


def push(rank: Rank, folder: Path) -> None:
    """Stages a folder's tensors in pieces of an odd size, out of order."""
    tensors = loaded(folder)
    rank.staging.answer(headers(tensors))
    cut = pieces(tensors, 5000)
    random.Random(1).shuffle(cut)  # noqa: S311 - no secret
    for piece in cut:
        rank.staging.answer(piece)


def lend(rank: Rank, source: Rank) -> None:
    """Has what another rank serves landed in lent memory, as a relay does, and stages it."""
    rank.staging.answer(LendStaging())
    (fd,) = rank.staging.descriptors
    target = source.arena.digested()
    land(fd, source, differing(rank.arena.digested(), target))
    rank.staging.answer(StageLent(target))


def differing(serves: Manifest, target: Manifest) -> list:
    """Returns the blocks whose digests differ."""
    return [
        target.block(index) for index in range(target.block_count)
        if target.block_digest(index) != serves.block_digest(index)
    ]  # fmt: skip


def land(fd: int, source: Rank, blocks) -> None:
    """Writes a rank's blocks into memory that was lent."""
    for block in blocks:
        view = source.arena.view(block.offset, block.nbytes)
        os.pwrite(fd, view, HEADER_BYTES + block.offset)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Returns a folder's tensors, in the order of its file."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in read_file(file)}


def anonymous_bytes() -> int:
    """Counts memory of this process that is no file and not shared."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
