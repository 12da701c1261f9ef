"""Arenas in real shared memory."""

import os
import resource
from pathlib import Path

import pytest
from fakes import BytesArena, Memory, collapses, lay_out_bytes, random_bytes, seam_layout
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.buffers import address_of
from relay_service.core.digests import block_digest
from relay_service.core.manifest import HEADER_BYTES
from relay_service.errors import ManifestError, ResourceExhausted
from relay_service.memory.host import HostArena, create_memfd, is_sealed, seal


@pytest.fixture
def memory():
    """One arena with random weights."""
    layout = lay_out_bytes([5000, 100])
    memory = Memory([layout], [random_bytes(layout)])
    yield memory
    memory.close()


def mappings() -> int:
    """Returns how many memfds of tests this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:tests")


def test_two_mappings_share_their_bytes(memory):
    """What lands through one mapping is seen through another, and its digest is returned."""
    fd, size = memory.descriptors[0], memory.layouts[0].data_bytes
    reader = HostArena(fd, size, writable=False)
    digest = memory.arenas[0].land(4096, b"landed")
    assert bytes(reader.view(4096, 6)) == b"landed"
    assert digest == block_digest(b"landed")
    reader.close()


def test_a_view_is_as_writable_as_its_mapping(memory):
    """A mapping for reading lends views that cannot be written."""
    fd, size = memory.descriptors[0], memory.layouts[0].data_bytes
    reader = HostArena(fd, size, writable=False)
    assert reader.view(0, 10).readonly
    assert not memory.arenas[0].view(0, 10).readonly
    reader.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 1 << 30), (12288, 1), (12287, 2)])
def test_no_view_beyond_the_data(memory, offset, nbytes):
    """A view that leaves the data is refused; nothing lands there either."""
    with pytest.raises(IndexError):
        memory.arenas[0].view(offset, nbytes)
    with pytest.raises(IndexError):
        memory.arenas[0].land(offset, bytes(nbytes))


def test_a_sealed_arena_cannot_be_mapped_for_writing(memory):
    """After sealing nobody maps it for writing, not even by way of /proc; reading goes on."""
    fd, size = memory.descriptors[0], memory.layouts[0].data_bytes
    assert not is_sealed(fd)
    seal(fd)
    assert is_sealed(fd)
    with pytest.raises(ResourceExhausted, match="cannot map"):
        HostArena(fd, size, writable=True)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(ResourceExhausted):
        HostArena(again, size, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    HostArena(fd, size, writable=False).close()
    memory.arenas[0].land(0, b"the mapping from before still writes")


def test_memory_that_is_too_small_is_refused(memory):
    """A manifest that claims more bytes than the memory has is refused."""
    with pytest.raises(ManifestError, match="manifest needs"):
        HostArena(memory.descriptors[0], 1 << 30, writable=False)


def test_memory_that_can_shrink_is_refused():
    """Memory that its owner could cut off under a reader is not mapped."""
    fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEADER_BYTES + 4096)
    with pytest.raises(ManifestError, match="sealed against shrinking"):
        HostArena(fd, 4096, writable=False)
    os.close(fd)


def test_a_file_is_no_arena(tmp_path):
    """A descriptor of something else than a memfd is refused."""
    path = tmp_path / "file"
    path.write_bytes(bytes(HEADER_BYTES + 4096))
    with path.open("r+b") as file, pytest.raises(ManifestError):
        HostArena(file.fileno(), 4096, writable=False)
    reading, writing = os.pipe()
    with pytest.raises(ManifestError):
        HostArena(reading, 4096, writable=False)
    os.close(reading)
    os.close(writing)


def test_the_header_tells_an_arena(memory):
    """Memory without the mark, or of another size, is not taken for an arena."""
    memory.arenas[0].check_header()
    fd = create_memfd("tests", 8192)
    blank = HostArena(fd, 8192, writable=True)
    with pytest.raises(ManifestError, match="not an arena of 8192 bytes"):
        blank.check_header()
    blank.write_header("tests")
    blank.check_header()
    smaller = HostArena(fd, 4096, writable=False)
    with pytest.raises(ManifestError):
        smaller.check_header()
    smaller.close()
    blank.close()
    os.close(fd)


def test_the_sequence_is_shared(memory):
    """The sequence number that one mapping writes is the one that another reads."""
    reader = HostArena(memory.descriptors[0], memory.layouts[0].data_bytes, writable=False)
    assert reader.sequence == 0
    memory.arenas[0].sequence = 7
    assert reader.sequence == 7
    reader.close()


def test_closing_unmaps_and_twice_is_harmless(memory):
    """A closed arena is mapped no more and lends no views."""
    before = mappings()
    arena = HostArena(memory.descriptors[0], memory.layouts[0].data_bytes, writable=False)
    assert mappings() == before + 1
    arena.close()
    arena.close()
    assert mappings() == before
    with pytest.raises(IndexError):
        arena.view(0, 1)


@pytest.fixture
def no_large_files():
    """Keeps a test from taking all memory of the machine, should the code let it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("data_bytes", "reason"), [(1 << 50, ".* are available"), (1 << 20, "File too large")]
)
@pytest.mark.usefixtures("no_large_files")
def test_no_memory_is_said_at_once(data_bytes, reason):
    """Memory that the host cannot give is missed when it is asked for, and said in words."""
    with pytest.raises(ResourceExhausted, match=f"an arena of {data_bytes} bytes: {reason}"):
        create_memfd("tests", data_bytes)


def test_every_seam_lands():
    """Blocks of every size land byte for byte and carry the digest of what landed."""
    layout = seam_layout()
    data = random_bytes(layout)
    memory = Memory([layout])
    twin = BytesArena(layout.data_bytes)
    for index in range(layout.block_count):
        block = layout.block(index)
        piece = memoryview(data)[block.offset : block.offset + block.nbytes]
        assert memory.arenas[0].land(block.offset, piece) == twin.land(block.offset, piece)
    assert memory.contents() == bytes(twin.data)
    memory.close()


@given(st.binary(min_size=1, max_size=64), st.integers(0, 63))
def test_the_address_of_any_buffer(data, start):
    """Read-only buffers and slices of them have the address of their first byte."""
    start = min(start, len(data) - 1)
    whole, part = address_of(data), address_of(memoryview(data)[start:])
    assert part - whole == start


@pytest.mark.skipif(not collapses(), reason="this kernel moves no memory into huge pages")
def test_huge_pages_hold_what_was_there():
    """Contents, address and other mappings stay, of memory that nobody may map anew as well."""
    data = os.urandom(8 << 20)
    fd = create_memfd("tests", len(data))
    arena, reader = (HostArena(fd, len(data), writable=writable) for writable in (True, False))
    arena.land(0, data)
    seal(fd)
    base, before = arena.base, arena.page_kind()
    arena.gather_pages()
    assert (before, arena.page_kind()) == ("4 KiB", f"huge ({8 << 20} bytes)")
    assert bytes(reader.view(0, len(data))) == data
    arena.land(5, b"landed later")
    assert bytes(reader.view(5, 12)) == b"landed later"
    assert arena.base == base
    for mapping in (arena, reader):
        mapping.close()
    os.close(fd)
