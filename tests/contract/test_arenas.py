"""What every arena does, in host memory and on a device behind a fake driver."""

import os
import threading

import pytest
from fake_cuda import FakeDriver
from fake_libcuda import FakeLibrary
from fakes import BytesArena, lay_out_bytes, random_bytes, seam_layout

from relay_service.core.copies import Copy
from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import ManifestError, ResourceExhausted
from relay_service.memory import cuda
from relay_service.memory.cuda_driver import CudaDriver
from relay_service.memory.host import HostArena, create_memfd, is_sealed, seal

SIZE = 3 * BLOCK_BYTES + 12288


class OnHost:
    """Arenas in memfds."""

    def create(self, data_bytes):
        """Returns an arena, mapped for writing, and its descriptors."""
        fd = create_memfd("tests", data_bytes)
        arena = HostArena(fd, data_bytes, writable=True)
        arena.write_header("tests")
        return arena, (fd,)

    def map(self, descriptors, data_bytes, *, writable):
        """Maps it once more."""
        return HostArena(descriptors[0], data_bytes, writable=writable)


class OnDevice:
    """Arenas on the second of two devices."""

    def __init__(self):
        self.driver = FakeDriver()

    def create(self, data_bytes):
        """Returns an arena, mapped for writing, and its descriptors."""
        return cuda.create(self.driver, 1, "tests", "tests", data_bytes)

    def map(self, descriptors, data_bytes, *, writable):
        """Maps it once more."""
        return cuda.import_arena(self.driver, descriptors, data_bytes, writable=writable)


class ThroughTheLibrary(OnDevice):
    """The same through the bindings of the driver's library."""

    def __init__(self):
        self.driver = CudaDriver(FakeLibrary(FakeDriver()))


@pytest.fixture(params=[OnHost, OnDevice, ThroughTheLibrary], ids=["host", "cuda", "libcuda"])
def place(request):
    """Where arenas lie."""
    return request.param()


@pytest.fixture
def shared(place):
    """An arena of some blocks, mapped for writing, and its descriptors."""
    arena, descriptors = place.create(SIZE)
    yield arena, descriptors
    arena.close()
    for fd in descriptors:
        os.close(fd)


def test_what_lands_is_seen_through_another_mapping(place, shared):
    """A block that landed is there for everybody, and its digest is returned."""
    arena, descriptors = shared
    other = place.map(descriptors, SIZE, writable=True)
    data = random_bytes(lay_out_bytes([BLOCK_BYTES]))
    assert other.land(BLOCK_BYTES, data) == block_digest(data)
    assert bytes(arena.view(BLOCK_BYTES, BLOCK_BYTES)) == data
    assert arena.land(4096, b"back") == block_digest(b"back")
    assert bytes(other.view(4096, 4)) == b"back"
    other.close()


def test_every_seam_lands(place):
    """Blocks of every size land byte for byte and carry the digest of what landed."""
    layout = seam_layout()
    data = random_bytes(layout)
    arena, descriptors = place.create(layout.data_bytes)
    twin = BytesArena(layout.data_bytes)
    for index in range(layout.block_count):
        block = layout.block(index)
        piece = memoryview(data)[block.offset : block.offset + block.nbytes]
        assert arena.land(block.offset, piece) == twin.land(block.offset, piece)
    for index in range(layout.block_count):
        block = layout.block(index)
        assert arena.view(block.offset, block.nbytes) == twin.view(block.offset, block.nbytes)
    arena.close()
    for fd in descriptors:
        os.close(fd)


def test_more_than_a_block_lands_whole(shared):
    """Data of several blocks at once arrives in order."""
    arena, _ = shared
    data = random_bytes(lay_out_bytes([SIZE]))
    assert arena.land(0, data) == block_digest(data)
    for start in range(0, SIZE, BLOCK_BYTES):
        piece = data[start : start + BLOCK_BYTES]
        assert bytes(arena.view(start, len(piece))) == piece


def test_a_mapping_for_reading_lends_bytes_that_cannot_be_written(place, shared):
    """What a reader sees is read-only."""
    reader = place.map(shared[1], SIZE, writable=False)
    assert reader.view(0, 10).readonly
    reader.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (SIZE - 1, 2), (SIZE, 1), (1 << 40, 1)])
def test_nothing_beyond_the_data(shared, offset, nbytes):
    """A view that leaves the data is refused; nothing lands there either."""
    with pytest.raises(IndexError):
        shared[0].view(offset, nbytes)
    with pytest.raises(IndexError):
        shared[0].land(offset, bytes(nbytes))


def test_another_size_is_refused(place, shared):
    """A manifest of more or fewer bytes than the arena has does not get it."""
    for size in (SIZE - 4096, SIZE + 4096, 1 << 40):
        with pytest.raises(ManifestError):
            place.map(shared[1], size, writable=False).check_header()


def test_the_sequence_is_shared(place, shared):
    """The sequence number that one mapping writes is the one that another reads."""
    reader = place.map(shared[1], SIZE, writable=False)
    reader.check_header()
    assert reader.sequence == 0
    shared[0].sequence = 7
    assert reader.sequence == 7
    reader.close()


def test_a_sealed_arena_is_mapped_for_reading_only(place, shared):
    """After sealing nobody gets a writable mapping; reading goes on."""
    arena, descriptors = shared
    assert not is_sealed(descriptors[0])
    seal(descriptors[0])
    assert is_sealed(descriptors[0])
    with pytest.raises(ResourceExhausted, match="cannot map"):
        place.map(descriptors, SIZE, writable=True)
    reader = place.map(descriptors, SIZE, writable=False)
    arena.land(0, b"the mapping from before still writes")
    assert bytes(reader.view(0, 3)) == b"the"
    reader.close()


def test_closing_twice_is_harmless_and_the_last_close(place, shared):
    """A closed arena lends nothing; the other mappings stay."""
    reader = place.map(shared[1], SIZE, writable=False)
    shared[0].land(0, b"here")
    reader.view(0, 4)
    reader.close()
    reader.close()
    with pytest.raises(IndexError):
        reader.view(0, 1)
    assert bytes(shared[0].view(0, 4)) == b"here"


def test_a_mapping_outlives_the_one_who_made_the_memory(place):
    """When the exporter has gone, its memory is still read."""
    arena, descriptors = place.create(SIZE)
    arena.land(0, b"legacy")
    reader = place.map(descriptors, SIZE, writable=False)
    arena.close()
    for fd in descriptors:
        os.close(fd)
    assert bytes(reader.view(0, 6)) == b"legacy"
    reader.close()


def test_runs_land_where_they_belong(place, shared):
    """Runs of a block, single and at equal distances, land like copies one by one."""
    arena, descriptors = shared
    other = place.map(descriptors, SIZE, writable=True)
    block, twin = random_bytes(lay_out_bytes([BLOCK_BYTES])), BytesArena(SIZE)
    pieces = [
        Copy(0, 0, 7, 5),
        Copy(0, 100, 4096, 300, 20, 1000, 4096),
        Copy(0, 50_000, 200_000, 1, 3000, 17, 1),
        Copy(0, 1 << 19, BLOCK_BYTES, 1 << 19),
        Copy(0, BLOCK_BYTES - 64, SIZE - 64, 64),
    ]
    other.land(0, bytes(SIZE))
    assert other.scatter(block, pieces)
    assert twin.scatter(block, pieces)
    for start in range(0, SIZE, BLOCK_BYTES):
        nbytes = min(BLOCK_BYTES, SIZE - start)
        assert arena.view(start, nbytes) == twin.view(start, nbytes)
    other.close()


@pytest.mark.parametrize(
    "piece", [Copy(0, 0, SIZE - 1, 2), Copy(0, 0, 0, 1, 2, 1, SIZE), Copy(0, 0, -1, 1)]
)
def test_runs_beyond_the_data_are_refused(shared, piece):
    """No run is written that leaves the arena."""
    with pytest.raises((IndexError, ValueError, TypeError)):
        shared[0].scatter(bytes(BLOCK_BYTES), [piece])


def test_a_run_that_is_written_over_is_noticed():
    """On the host, where what landed is compared, runs that overlap are not what was copied."""
    arena, (fd,) = OnHost().create(SIZE)
    assert not arena.scatter(bytes(range(64)), [Copy(0, 0, 0, 8, 2, 8, 4)])
    arena.close()
    with pytest.raises(IndexError):
        arena.scatter(b"gone", [Copy(0, 0, 0, 4)])
    os.close(fd)


def test_threads_land_and_read_at_once(place, shared):
    """Blocks that several threads land and read do not mix."""
    arena, descriptors = shared
    source, target = place.create(SIZE)[0], place.map(descriptors, SIZE, writable=True)
    data = random_bytes(lay_out_bytes([SIZE]))
    source.land(0, data)
    starts = list(range(0, SIZE, 4096 * 5))
    wrong = []

    def copy(mine):
        for start in mine:
            nbytes = min(4096 * 5, SIZE - start)
            digest = target.land(start, source.view(start, nbytes))
            if digest != block_digest(data[start : start + nbytes]):
                wrong.append(start)

    threads = [threading.Thread(target=copy, args=(starts[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for start in starts:
        nbytes = min(4096 * 5, SIZE - start)
        assert bytes(arena.view(start, nbytes)) == data[start : start + nbytes]
    source.close()
    target.close()
