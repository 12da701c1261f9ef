"""Arenas on a device, behind a driver that does nothing before somebody waits."""

import ctypes
import os
import subprocess
import sys

import pytest
from fake_cuda import GRANULARITY, FakeDriver
from fake_libcuda import FakeLibrary
from fakes import lay_out_bytes, random_bytes, resources

from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import DeviceError, ManifestError, Refused, ResourceExhausted
from relay_service.memory import cuda, cuda_abi, cuda_driver
from relay_service.memory.host import HostArena, create_memfd
from relay_service.memory.mapping import map_arena
from relay_service.memory.staging import Lane

SIZE = 2 * BLOCK_BYTES + 100


@pytest.fixture
def driver():
    """A driver that ends with nothing left."""
    driver = FakeDriver()
    yield driver
    assert not +driver.live


@pytest.fixture
def bound(driver):
    """The same driver, called through the bindings of its library."""
    return cuda_driver.CudaDriver(FakeLibrary(driver))


@pytest.fixture
def shared(driver):
    """An arena on device 0 and its descriptors."""
    arena, descriptors = cuda.create(driver, 0, "tests", "tests", SIZE)
    yield arena, descriptors
    arena.close()
    for fd in descriptors:
        os.close(fd)


def test_what_is_built_arrives_after_a_flush(driver, shared):
    """Blocks are zero where nobody wrote, take turns in two buffers, and need no wait between."""
    arena, _ = shared
    for block, letter in enumerate(b"abab"):
        built = arena.build(1000)
        assert bytes(built) == bytes(1000)
        built[10:] = bytes([letter]) * 990
        arena.put(block * 1000, 1000)
    arena.flush()
    for block, letter in enumerate(b"abab"):
        assert bytes(arena.view(block * 1000, 1000)) == bytes(10) + bytes([letter]) * 990


def test_closing_waits_for_what_was_put(driver, shared):
    """Unmapping right after a copy was started loses nothing."""
    arena, descriptors = shared
    writer = cuda.import_arena(driver, descriptors, SIZE, writable=True)
    writer.build(4)[:] = b"last"
    writer.put(0, 4)
    writer.close()
    assert bytes(arena.view(0, 4)) == b"last"


def test_the_fake_catches_a_missing_wait(driver):
    """A stream that nobody waited for has copied nothing: the tests above can fail."""
    driver.use(0)
    handle = driver.allocate(0, GRANULARITY)
    address = driver.map(handle, 0, GRANULARITY, writable=True)
    lane = Lane(driver, 0)
    ctypes.memmove(lane.next_buffer(), b"new", 3)
    lane.send(address, 3)
    assert ctypes.string_at(address, 3) == b"\xcd" * 3
    lane.close()
    assert ctypes.string_at(address, 3) == b"new"
    driver.unmap(address, GRANULARITY)
    driver.release(handle)


def test_a_copy_that_failed_is_told_by_the_block_that_it_carried(driver, shared):
    """An error that comes up later comes up before `land` says that the block is there."""
    arena, _ = shared
    driver.fault = DeviceError("cuStreamSynchronize failed: CUDA_ERROR_ECC_UNCORRECTABLE")
    with pytest.raises(DeviceError, match="ECC"):
        arena.land(0, random_bytes(lay_out_bytes([BLOCK_BYTES])))


def test_another_device_than_the_header_names_is_refused(driver, shared):
    """A header of one device beside an allocation on another one is no arena."""
    other, descriptors = cuda.create(driver, 1, "tests", "tests", SIZE)
    mixed = (shared[1][0], descriptors[1])
    with pytest.raises(ManifestError, match=r"the allocation lies on device 0202.* names 0101"):
        cuda.import_arena(driver, mixed, SIZE, writable=True)
    other.close()
    for fd in descriptors:
        os.close(fd)


def test_a_device_that_the_relay_does_not_see_is_refused(shared):
    """A relay with fewer devices says which one it lacks, and what to do."""
    blind = FakeDriver(devices=1)
    blind.uuids = [b"\x09" * 16]
    with pytest.raises(Refused, match=r"device 0101.* does not see") as caught:
        cuda.import_arena(blind, shared[1], SIZE, writable=False)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.details["hint"]
    assert not +blind.live


def test_an_allocation_that_is_too_small_is_refused(driver):
    """A header that claims more than the allocation has is found out when it is mapped."""
    small, (header_fd, allocation_fd) = cuda.create(driver, 0, "tests", "tests", GRANULARITY)
    page = HostArena(header_fd, 0, writable=True)
    page.header.write("tests", GRANULARITY + 1, driver.uuids[0])
    with pytest.raises(ManifestError, match="cannot map 65537 bytes: cuMemMap failed: CUDA_ERROR"):
        cuda.import_arena(driver, (header_fd, allocation_fd), GRANULARITY + 1, writable=True)
    page.close()
    small.close()
    os.close(header_fd)
    os.close(allocation_fd)


def test_a_descriptor_of_something_else_is_refused(driver, shared):
    """Neither a memfd in the allocation's place nor an allocation in the header's is taken."""
    (header_fd, allocation_fd), memfd = shared[1], create_memfd("tests", SIZE)
    with pytest.raises(ManifestError, match="no allocation of a device"):
        cuda.import_arena(driver, (header_fd, memfd), SIZE, writable=False)
    with pytest.raises(ManifestError):
        cuda.import_arena(driver, (allocation_fd, header_fd), SIZE, writable=False)
    os.close(memfd)


def test_a_reader_cannot_land(driver, shared):
    """A mapping for reading takes no bytes."""
    reader = cuda.import_arena(driver, shared[1], SIZE, writable=False)
    with pytest.raises(DeviceError):
        reader.land(0, b"no")
    reader.close()


def test_more_than_a_block_is_not_staged(shared):
    """A view is a block at most: the buffers hold no more."""
    with pytest.raises(IndexError, match="at once"):
        shared[0].view(0, BLOCK_BYTES + 1)


def test_no_memory_is_said_in_words_and_leaves_nothing(driver):
    """An arena that the device cannot hold costs neither memory nor descriptors."""
    before = resources()
    with pytest.raises(ResourceExhausted, match="OUT_OF_MEMORY"):
        cuda.create(driver, 0, "tests", "tests", driver.memory_bytes + 1)
    assert before.are_back()


def test_a_digest_is_of_what_was_staged(driver, shared):
    """Pieces of a block make the same digest as the whole."""
    data = random_bytes(lay_out_bytes([BLOCK_BYTES - 1]))
    assert shared[0].land(3, data) == block_digest(data)


def test_structures_are_laid_out_as_in_c():
    """Sizes and offsets are those of cuda.h on 64-bit Linux."""
    properties = cuda_abi.AllocationProperties
    assert ctypes.sizeof(properties) == 32
    assert (properties.location.offset, properties.location.size) == (8, 8)
    assert properties.win32_handle_meta_data.offset == 16
    assert (properties.alloc_flags.offset, properties.alloc_flags.size) == (24, 8)
    assert ctypes.sizeof(cuda_abi.AccessDescription) == 12
    assert cuda_abi.AccessDescription.flags.offset == 8


def test_the_bindings_find_devices(bound, driver):
    """Devices are found by their UUID, whole."""
    assert bound.devices() == driver.uuids


def test_the_bindings_name_call_and_error(bound):
    """An error of the library is told by the names of the call and of the error."""
    with pytest.raises(ResourceExhausted, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        bound.allocate(0, 1 << 30)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        bound.use(7)
    assert caught.value.details["call"] == "cuDevicePrimaryCtxRetain"


def test_the_bindings_leave_nothing_of_a_map_that_failed(bound, driver):
    """An allocation that is too small gives its address range back."""
    bound.use(0)
    handle = bound.allocate(0, GRANULARITY)
    with pytest.raises(DeviceError, match="cuMemMap"):
        bound.map(handle, 0, 2 * GRANULARITY, writable=True)
    assert not bound._library._reserved
    bound.release(handle)


def test_an_arena_through_the_bindings_leaves_nothing(bound, driver):
    """Everything that an arena takes from the library it gives back."""
    arena, descriptors = cuda.create(bound, 1, "tests", "tests", SIZE)
    reader = cuda.import_arena(bound, descriptors, SIZE, writable=False)
    arena.land(0, b"through C and back")
    assert bytes(reader.view(0, 18)) == b"through C and back"
    with pytest.raises(DeviceError):
        reader.land(0, b"no")
    reader.close()
    arena.close()
    for fd in descriptors:
        os.close(fd)
    assert not bound._library._reserved


def test_a_library_without_a_function_is_too_old(driver):
    """A driver that lacks a call is refused when it is loaded, with what to do."""
    library = FakeLibrary(driver)
    library.cuMemMap = None
    with pytest.raises(DeviceError, match="has no cuMemMap") as caught:
        cuda_driver.CudaDriver(library)
    assert caught.value.details["hint"] == "update the driver"


def test_without_a_driver_a_device_is_refused(monkeypatch, shared):
    """A host without CUDA says so when somebody brings an arena on a device."""
    cuda_driver.load.cache_clear()

    def missing(name, *_, **__):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="no CUDA driver") as caught:
        map_arena(shared[1], SIZE, writable=False)
    assert "--device cpu" in caught.value.details["hint"]


def test_a_relay_loads_neither_torch_nor_the_driver():
    """The relay service, all of it, runs without torch and leaves libcuda alone."""
    code = (
        "import sys, pathlib, relay_service.app, relay_service.memory.cuda_driver\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'libcuda' not in pathlib.Path('/proc/self/maps').read_text(), 'libcuda'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
