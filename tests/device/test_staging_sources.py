"""Folders that change while they are read, memory that is lent, weights that go in place."""

import fcntl
import os
import time

import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import Sequence, write_checkpoint
from updating import (
    differing,
    disk,
    finished,
    headers,
    land,
    lend,
    loaded,
    opened,
    pieces,
    push,
    served,
    tokens,
)

from engine_service.core.update_messages import (
    DropStaging,
    LendStaging,
    ProveStaged,
    StageDisk,
    StageLent,
    StagePiece,
)
from engine_service.device import stage as stage_module
from engine_service.errors import (
    ArenaError,
    CheckpointError,
    InvalidRequest,
    NonFiniteLogits,
    ProbeMismatch,
    ResourceExhausted,
    WrongState,
)
from relay_service.core.manifest import HEADER_BYTES
from relay_service.memory.host import F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, HostArena

FILE = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A and B, of several blocks."""
    return [
        write_checkpoint(
            tmp_path_factory.mktemp("weights"), seed, num_hidden_layers=2, vocab_size=9000
        )
        for seed in (1, 2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def other(folders):
    """A rank that serves B."""
    return served(folders[1])


@pytest.fixture
def rank(folders):
    """A rank that serves A, and the bytes that it serves at the end where nothing was applied."""
    rank = served(folders[0])
    yield rank
    if rank.arena.whole:
        rank.staging.answer(DropStaging())


# Disk


def _touch(file):
    os.utime(file, ns=(1, time.time_ns()))


def _replace(file):
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(1, file.stat().st_mtime_ns))
    copy.rename(file)


def _grow(file):
    before = file.stat().st_mtime_ns
    with file.open("ab") as opened_file:
        opened_file.write(b" ")
    os.utime(file, ns=(1, before))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_touch, "has changed"), (_replace, "has changed"), (_grow, "has changed"),
        (os.unlink, "is not there any more"), (lambda f: os.truncate(f, 5000), "ends within"),
    ],
)  # fmt: skip
def test_a_file_that_changes_while_it_is_read_is_noticed(rank, folders, tmp_path, change, words):
    """By time, place, size or absence: nothing is staged, and the file is named."""
    folder = tmp_path / "changing"
    folder.mkdir()
    (folder / FILE).write_bytes((folders[1] / FILE).read_bytes())
    before, changed = rank.arena.digested(), []

    def once(_done: int, _total: int) -> None:
        if not changed:
            changed.append(change(folder / FILE))

    opened(rank)
    with pytest.raises(CheckpointError, match=f"{FILE}:? .*{words}|{FILE}: {words}") as caught:
        rank.staging.answer(StageDisk(folder=str(folder)), once)
    assert caught.value.details["file"] == FILE
    assert rank.arena.digested() == before
    with pytest.raises(WrongState, match="nothing is being staged"):
        finished(rank)


def test_a_truncated_file_is_named(rank, folders, tmp_path):
    """Before anything of it is read."""
    (tmp_path / FILE).write_bytes((folders[1] / FILE).read_bytes()[:-100])
    opened(rank)
    with pytest.raises(CheckpointError, match=FILE):
        disk(rank, tmp_path)


def test_a_folder_says_what_was_read(rank, folders):
    """Name, inode, size and time of each file."""
    opened(rank)
    files = rank.staging.answer(StageDisk(folder=str(folders[1]))).files
    status = (folders[1] / FILE).stat()
    found = [(one.name, one.inode, one.nbytes, one.modified_ns) for one in files]
    assert found == [(FILE, status.st_ino, status.st_size, status.st_mtime_ns)]


def test_a_folder_may_hold_a_part(rank, folders, tmp_path):
    """Where a partial update was asked for; else what lacks is named."""
    norm = loaded(folders[1])[NORM]
    save_file({NORM: norm}, tmp_path / FILE)
    opened(rank)
    with pytest.raises(CheckpointError, match="missing tensors: model"):
        disk(rank, tmp_path)
    opened(rank, partial=True)
    disk(rank, tmp_path)
    staged = finished(rank)
    assert (staged.blocks_changed, staged.report.bytes_read) == (1, norm.nbytes)
    rank.staging.apply()
    assert torch.equal(rank.arena.tensors["norm"], norm)
    assert rank.arena.digested() == staged.manifest


def test_no_more_is_read_than_there_is_memory_for(rank, folders, monkeypatch):
    """The host says so before a byte is staged."""
    monkeypatch.setattr(stage_module, "available_bytes", lambda: 1000)
    opened(rank)
    with pytest.raises(ResourceExhausted, match="1000 bytes are available"):
        disk(rank, folders[1])
    opened(rank, partial=True)
    rank.staging.answer(headers({NORM: loaded(folders[1])[NORM]}))  # these few fit


# Lent memory


def test_lent_memory_costs_what_has_landed(rank, other):
    """It is sparse, of the arena's size and header, and freed while it is read."""
    opened(rank)
    reply = rank.staging.answer(LendStaging())
    (fd,) = rank.staging.descriptors
    serves, target = rank.arena.digested(), other.arena.digested()
    assert reply.descriptors == 1
    assert os.fstat(fd).st_size == HEADER_BYTES + serves.data_bytes
    assert _held(fd) == HEADER_BYTES
    assert fcntl.fcntl(fd, F_GET_SEALS) == F_SEAL_SHRINK | F_SEAL_GROW
    blocks = differing(serves, target)
    land(fd, other, blocks)
    seen, watched = [], os.dup(fd)

    def progress(done: int, total: int) -> None:
        seen.append((done, total, _held(watched)))

    rank.staging.answer(StageLent(target), progress)
    total = sum(block.nbytes for block in blocks)
    assert [done for done, _, _ in seen][-1] == total
    assert len(seen) == len(blocks)
    assert all(held <= HEADER_BYTES + total - done + 4096 * 5 for done, _, held in seen)
    assert _held(watched) == HEADER_BYTES
    mapped = HostArena(watched, serves.data_bytes, writable=False)
    mapped.check_header()
    mapped.close()
    os.close(watched)
    staged = finished(rank)
    assert staged.manifest == target
    rank.staging.apply()
    assert tokens(rank) == tokens(other)


def _held(fd: int) -> int:
    """Counts the bytes of a sparse file that are no hole."""
    held, at, end = 0, 0, os.fstat(fd).st_size
    while at < end:
        try:
            first = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return held
        at = os.lseek(fd, first, os.SEEK_HOLE)
        held += at - first
    return held


def test_a_block_that_landed_wrong_is_named(rank, other):
    """And so are other weights than those that were asked for, or unverified ones."""
    before = rank.arena.digested()
    opened(rank)
    target = other.arena.digested()
    with pytest.raises(WrongState, match="no memory is lent"):
        rank.staging.answer(StageLent(target))
    rank.staging.answer(LendStaging())
    with pytest.raises(ArenaError, match="no digests"):
        rank.staging.answer(StageLent(target.without_digests()))
    (fd,) = rank.staging.descriptors
    _, *others = differing(before, target)
    land(fd, other, others)  # the first one is still a hole
    with pytest.raises(ArenaError, match=r"block 0 \(embed\) has landed with other bytes"):
        rank.staging.answer(StageLent(target))
    with pytest.raises(WrongState):
        rank.staging.apply()
    assert rank.arena.digested() == before


# Apply


def test_bytes_that_arrive_wrong_leave_nothing_that_is_served(rank, folders):
    """What the copy brings is compared with what was staged."""
    opened(rank)
    disk(rank, folders[1])
    finished(rank)
    rank.staging._stage.weights.tensors["norm"][3] += 1
    with pytest.raises(ArenaError, match=r"\(norm\) arrived with other bytes"):
        rank.staging.apply()
    assert rank.staging.changed
    with pytest.raises(WrongState, match="not committed"):
        rank.step((Sequence([1, 2, 3]).row(),))


# Proof


def test_a_probe_decides_before_anything_is_applied(rank, other, folders):
    """The source's own is met; one of other weights is not; the same holds for prompts."""
    probe = other.record_probe().probe
    wrong = rank.record_probe().probe
    prompt, answer = tuple(range(1, 9)), Sequence(range(1, 9))
    for _ in range(4):
        answer.take(other.step((answer.row(),)).tokens[0])
    opened(rank)
    disk(rank, folders[1])
    finished(rank)
    good = (prompt, tuple(answer.output))
    assert rank.staging.answer(ProveStaged(probe=probe, prompts=(good,))).probe == probe
    with pytest.raises(ProbeMismatch, match="logits differ"):
        rank.staging.answer(ProveStaged(probe=wrong))
    bad = (prompt, (*answer.output[:3], answer.output[3] + 1))
    with pytest.raises(ProbeMismatch, match="prompt 1: token 3 of the answer"):
        rank.staging.answer(ProveStaged(prompts=(good, bad)))
    with pytest.raises(InvalidRequest):
        rank.staging.answer(ProveStaged(prompts=(((99999,), ()),)))
    rank.staging.apply()
    rank.check_probe(probe)


def test_weights_that_compute_no_numbers_are_found(rank, folders, tmp_path):
    """A NaN anywhere, before it serves."""
    tensors = loaded(folders[1])
    tensors[NORM][5] = float("nan")
    save_file(tensors, tmp_path / FILE)
    opened(rank)
    disk(rank, tmp_path)
    finished(rank)
    with pytest.raises(NonFiniteLogits):
        rank.staging.answer(ProveStaged(prompts=(((1, 2), ()),)))


# In place


@pytest.mark.parametrize("source", ["disk", "push", "relay"])
def test_weights_go_in_place(rank, other, folders, source):
    """No second copy; readers are told from the first byte to the last."""
    opened(rank, in_place=True)
    assert rank.arena.whole
    first = rank.arena.sequence
    if source == "relay":
        lend(rank, other)
    else:
        {"disk": disk, "push": push}[source](rank, folders[1])
    assert rank.arena.sequence == first + 1
    with pytest.raises(WrongState, match="not committed"):
        rank.step((Sequence([1, 2, 3]).row(),))
    staged = finished(rank)
    assert rank.staging.answer(ProveStaged()).probe == other.record_probe().probe
    assert staged.extra_bytes < staged.bytes_changed
    applied = rank.staging.apply()
    assert (applied.bytes_copied, rank.arena.sequence) == (0, first + 2)
    assert staged.manifest == rank.arena.digested() == other.arena.digested()
    assert tokens(rank) == tokens(other)


def test_what_is_known_from_headers_is_checked_before_the_first_byte(rank, folders, tmp_path):
    """And a folder that is wrong costs nothing."""
    before, tensors = rank.arena.digested(), loaded(folders[1])
    tensors[NORM] = torch.ones(65)
    save_file(tensors, tmp_path / FILE)
    opened(rank, in_place=True)
    with pytest.raises(CheckpointError, match="has shape"):
        disk(rank, tmp_path)
    assert rank.arena.whole
    opened(rank, in_place=True)
    rank.staging.answer(headers(loaded(folders[1])))
    with pytest.raises(CheckpointError):
        rank.staging.answer(StagePiece(0, 2, bytes(4)))
    assert not rank.staging.changed
    rank.staging.answer(DropStaging())
    assert rank.arena.digested() == before


def test_what_fails_after_the_first_byte_cannot_be_undone(rank, other, folders):
    """It is said at every later step; only all weights, in place, make it whole again."""
    opened(rank, in_place=True, partial=False)
    tensors = loaded(folders[1])
    rank.staging.answer(headers(tensors))
    rank.staging.answer(pieces(tensors, 1 << 16)[0])
    assert rank.staging.changed
    with pytest.raises(ArenaError, match="those that served are lost"):
        rank.staging.answer(DropStaging())
    for options in ({}, {"in_place": True, "partial": True}):
        with pytest.raises(WrongState, match="half-changed"):
            opened(rank, **options)
    opened(rank, in_place=True)
    disk(rank, folders[1])
    finished(rank)
    rank.staging.apply()
    assert not rank.staging.changed
    assert tokens(rank) == tokens(other)
