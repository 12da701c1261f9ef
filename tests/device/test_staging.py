"""A rank that is updated in place equals a fresh one on those weights, whoever brought them."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from format_cases import serves
from tiny_llama import write_checkpoint
from updating import (
    addresses,
    anonymous_bytes,
    disk,
    finished,
    lend,
    opened,
    push,
    served,
    tokens,
)

from engine_service.core.update_messages import DropStaging, OpenStaging, ProveStaged, StageDisk
from engine_service.device.formats.layouts import LAYOUTS
from engine_service.device.memfd_arena import MemfdArena
from engine_service.errors import WrongState
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest


def _dtype(name: str) -> str:
    return "float32" if DType.F32 in LAYOUTS[name].types else "bfloat16"


FORMATS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not serves(name, getattr(torch, _dtype(name))), reason="not on this processor"
        ),
    )
    for name in LAYOUTS
]
SOURCES = ("disk", "push", "relay")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns checkpoints A and B of a type, made once."""
    made = {}

    def of(dtype: str) -> tuple[Path, Path]:
        if dtype not in made:
            made[dtype] = tuple(
                write_checkpoint(
                    tmp_path_factory.mktemp(f"weights-{seed}"), seed, getattr(torch, dtype),
                    num_hidden_layers=2,
                )
                for seed in (1, 2)
            )  # fmt: skip
        return made[dtype]

    return of


@pytest.fixture(scope="module")
def fresh(folders):
    """Returns ranks that were started on weights B, by format."""
    made = {}

    def of(name: str):
        if name not in made:
            made[name] = served(folders(_dtype(name))[1], _dtype(name), weight_format=name)
        return made[name]

    return of


def _bring(source: str, rank, folder: Path, other) -> None:
    if source == "disk":
        disk(rank, folder)
    elif source == "push":
        push(rank, folder)
    else:
        lend(rank, other)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", FORMATS)
def test_an_updated_rank_equals_a_fresh_one(folders, fresh, name, source):
    """Bytes, tokens by eager passes and captured graphs, probe; addresses stay."""
    before, after = folders(_dtype(name))
    rank, expected = served(before, _dtype(name), weight_format=name), fresh(name)
    places, serving = addresses(rank), rank.arena.digested()
    opened(rank)
    _bring(source, rank, after, expected)
    staged = finished(rank)
    proven = rank.staging.answer(ProveStaged())
    assert rank.arena.digested() == serving
    applied = rank.staging.apply()
    assert staged.manifest == rank.arena.digested() == expected.arena.digested()
    assert tokens(rank) == tokens(expected)
    assert proven.probe == expected.record_probe().probe
    rank.check_probe(proven.probe)
    assert addresses(rank) == places
    changed = serving.block_count - 1  # the rotary tables stay what they are
    assert (staged.blocks_changed, applied.bytes_copied) == (changed, staged.bytes_changed)
    assert staged.bytes_changed <= staged.extra_bytes


def test_what_serves_stays_until_it_is_applied(folders, fresh):
    """Tokens that come while weights are staged are those of the old weights."""
    before, after = folders("float32")
    rank = served(before)
    expected, staging = tokens(rank), threading.Event()
    found = []

    def progress(_done: int, _total: int) -> None:
        if not staging.is_set():
            found.append(tokens(rank))
            staging.set()

    opened(rank)
    rank.staging.answer(StageDisk(folder=str(after)), progress)
    assert found == [expected]
    finished(rank)
    assert tokens(rank) == expected
    rank.staging.answer(DropStaging())
    assert tokens(rank) == expected
    with pytest.raises(WrongState, match="nothing is being staged"):
        rank.staging.apply()


def test_readers_see_that_the_weights_have_changed(folders):
    """The sequence word is even before and after, and another one."""
    before, after = folders("float32")
    rank = served(before)
    opened(rank)
    disk(rank, after)
    finished(rank)
    first = rank.arena.sequence
    rank.staging.apply()
    assert rank.arena.sequence == first + 2


def test_nothing_is_staged_twice_or_out_of_order(folders):
    """One source, then the end, then the copy."""
    before, after = folders("float32")
    rank = served(before)
    for command in (ProveStaged(), StageDisk(folder=str(after))):
        with pytest.raises(WrongState):
            rank.staging.answer(command)
    opened(rank)
    with pytest.raises(WrongState, match="nothing has been staged"):
        finished(rank)
    disk(rank, after)
    with pytest.raises(WrongState, match="one source"):
        disk(rank, after)
    with pytest.raises(WrongState, match="not finished"):
        rank.staging.apply()
    finished(rank)
    with pytest.raises(WrongState, match="finished"):
        finished(rank)
    with pytest.raises(WrongState, match="one source"):
        disk(rank, after)
    rank.staging.apply()
    with pytest.raises(WrongState, match="nothing is being staged"):
        rank.staging.apply()


def test_staging_is_for_the_weights_that_serve(folders, fresh):
    """Whoever names others, or has unverified ones, is refused."""
    rank = served(folders("float32")[0])
    manifest = rank.arena.digested()
    fewer = Manifest(0, manifest.data_bytes, manifest.units[:-1])
    for wrong in (fewer, manifest.without_digests()):
        with pytest.raises(WrongState, match="other weights serve"):
            rank.staging.answer(OpenStaging(serves=wrong))


def test_what_is_equal_costs_no_memory(folders):
    """The same weights again change nothing and hold no page."""
    before, _ = folders("float32")
    rank = served(before)
    opened(rank)
    disk(rank, before)
    staged = finished(rank)
    assert (staged.blocks_changed, staged.bytes_changed, staged.extra_bytes) == (0, 0, 0)
    assert rank.staging.apply().bytes_copied == 0


def test_updates_leave_nothing_behind(folders, fresh):
    """Memory, mappings, files and threads are as many after 200 updates as after the first."""
    both = folders("float32")
    rank = served(both[0])
    seen = []
    for number in range(205):
        opened(rank)
        if number % 3 == 2:
            rank.staging.answer(DropStaging())
            continue
        disk(rank, both[(number + 1) % 2])
        finished(rank)
        if number % 3:
            rank.staging.answer(DropStaging())
        else:
            rank.staging.apply()
        if number in (3, 204):
            rank.staging.answer(DropStaging())  # waits for what an update gives back
            gc.collect()
            maps = Path("/proc/self/maps").read_text().count("memfd:seedrelay-rank")
            seen.append((maps, len(_open()), threading.active_count()))
            seen.append(anonymous_bytes())
    assert seen[0] == seen[2]
    assert seen[3] - seen[1] < 4 << 20


def test_an_arena_that_nobody_holds_closes_its_descriptor(folders, fresh):
    """And only once: the number may be another file's by then."""
    arena = MemfdArena(fresh("plain").arena.manifest, "tests")
    (fd,) = arena.descriptors
    inode = os.fstat(fd).st_ino
    arena.close()
    other = os.memfd_create("another")
    assert other == fd
    del arena
    gc.collect()
    assert os.fstat(other).st_ino != inode
    os.close(other)
    arena = MemfdArena(fresh("plain").arena.manifest, "tests")
    inode = os.fstat(arena.descriptors[0]).st_ino
    del arena
    gc.collect()
    assert inode not in [file.stat().st_ino for file in _open()]


def _open() -> list[Path]:
    return [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
