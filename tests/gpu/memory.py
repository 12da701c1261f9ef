"""Checks of the memory: shared, landed in, refused, and what its end does to others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import torch

from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import RelayError
from relay_service.memory import cuda
from relay_service.memory.host import HostArena
from tests.gpu.lander import PATTERN
from tests.gpu.place import Lander, Place, answer_of, end


def arena_is_zero_and_a_view(place: Place) -> str:
    """The arena starts as zeros; torch looks at it and has copied nothing."""
    assert not any(tensor.any() for tensor in place.arena.tensors.values()), "not zero"
    first = place.arena.tensors["embed"]
    assert first.data_ptr() == place.arena.address, "torch holds a copy"
    reserved = place.used().get("reserved_bytes", 0)
    cache = 2 * place.cache.keys.nbytes
    assert reserved < place.layout.data_bytes + cache, f"torch reserved {reserved} bytes"
    return f"{place.layout.data_bytes >> 20} MiB at {place.arena.address:#x}"


def landing_from_another_process(place: Place) -> str:
    """A process without torch imports the handle and lands every byte; the digests say so."""
    with Lander(place) as lander:
        assert lander.said == {"mapped": True, "torch": False}, lander.said
        lander.land(0)
        lander.leave()
    found, expected = place.arena.digested(), place.manifests[0]
    assert found.digest == expected.digest, f"{found.digest}, not {expected.digest}"
    return f"{expected.block_count} blocks, digest {found.digest[:16]}"


def blocks_built_on_the_host_arrive(place: Place) -> str:
    """Blocks that are built in pinned memory, as a checkpoint's are, are on the device."""
    for index in range(place.layout.block_count):
        block = place.layout.block(index)
        built = place.arena.build(block.offset, block.nbytes)
        built[:] = place.sources[1].view(block.offset, block.nbytes)
        place.arena.put(block.offset, block.nbytes)
    place.arena.flush()
    assert place.arena.digested().digest == place.manifests[1].digest, "other bytes arrived"
    return f"{place.layout.block_count} blocks"


def a_wrong_device_is_refused(place: Place) -> str:
    """A header that names another device than the allocation's, or one unseen, is refused."""
    said = [_refusal(place, b"\xee" * 16)]
    assert "does not see" in said[0], said[0]
    others = [uuid for uuid in place.driver.devices() if uuid != _named_device(place)]
    if others:
        said.append(_refusal(place, others[0]))
        assert "lies on device" in said[1], said[1]
    return f"{len(said)} ways" + ("" if others else " (one device: the second needs two)")


def a_wrong_allocation_is_refused(place: Place) -> str:
    """Neither host memory nor a smaller allocation is mapped as an arena's."""
    (header, _), size = place.arena.descriptors, place.layout.data_bytes
    small, (small_header, small_fd) = cuda.create(place.driver, 0, "small", "small", BLOCK_BYTES)
    memfd = os.memfd_create("no allocation")
    try:
        for fd in (memfd, small_fd):
            try:
                cuda.import_arena(place.driver, (header, fd), size, writable=False)
            except RelayError as error:
                said = str(error)
            else:
                raise AssertionError("it was mapped")
    finally:
        small.close()
        for fd in (memfd, small_header, small_fd):
            os.close(fd)
    return said


def memory_outlives_its_exporter(place: Place) -> str:
    """What a killed process had exported is still read by who imported it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exporter = place.start(
            "export", str(theirs.fileno()), str(BLOCK_BYTES), fds=[theirs.fileno()]
        )
        ours.settimeout(60)
        descriptors = socket.recv_fds(ours, 1, 2)[1]
    arena = cuda.import_arena(place.driver, descriptors, BLOCK_BYTES, writable=False)
    end(exporter)
    found = bytes(arena.view(0, len(PATTERN)))
    arena.close()
    for fd in descriptors:
        os.close(fd)
    assert found == PATTERN, found
    return "read after SIGKILL"


def rates(place: Place) -> str:
    """Landing and reading, in GB/s, beside plain copies of as many pinned bytes."""
    size, figures = place.layout.data_bytes, place.figures
    with Lander(place) as lander:
        lander.land(0)
        for threads in (1, 2, 4):
            seconds = min(lander.land(turn % 2, threads) for turn in range(3))
            figures[f"land_{threads}_threads_gb_per_s"] = size / seconds / 1e9
        lander.leave()
    figures["read_gb_per_s"] = size / _seconds(lambda: _read_all(place)) / 1e9
    if place.device.torch.type == "cuda":
        data, pinned = place.arena._bytes, torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for name, copy in (("in", lambda: data.copy_(pinned)), ("out", lambda: pinned.copy_(data))):
            figures[f"plain_copy_{name}_gb_per_s"] = size / _seconds(copy, place) / 1e9
    return f"{figures['land_2_threads_gb_per_s']:.1f} GB/s on two threads"


def a_sealed_arena_takes_no_writer(place: Place) -> str:
    """After the commit another process gets no writable mapping."""
    for sealed in (False, True):
        if sealed:
            place.arena.seal()
        size = str(place.layout.data_bytes)
        process = place.start("map", place.target, size, fds=place.arena.descriptors)
        said = answer_of(process)["refused"]
        end(process)
        assert bool(said) == sealed, said or "it was mapped"
    return said


def _named_device(place: Place) -> bytes:
    page = HostArena(place.arena.descriptors[0], 0, writable=False)
    device = page.header.device
    page.close()
    return device


def _refusal(place: Place, named: bytes) -> str:
    """Maps the arena beside a header that names another device; returns what is said."""
    arena, (header_fd, fd) = cuda.create(place.driver, 0, "other", "other", BLOCK_BYTES)
    page = HostArena(header_fd, 0, writable=True)
    page.header.write("other", BLOCK_BYTES, named)
    try:
        cuda.import_arena(place.driver, (header_fd, fd), BLOCK_BYTES, writable=True)
    except RelayError as error:
        return str(error)
    finally:
        page.close()
        arena.close()
        os.close(header_fd)
        os.close(fd)
    raise AssertionError("it was mapped")


def _read_all(place: Place) -> None:
    for index in range(place.layout.block_count):
        block = place.layout.block(index)
        place.arena.view(block.offset, block.nbytes)


def _seconds(work: Callable[[], object], place: Place | None = None) -> float:
    """Returns the shortest of three runs, after one that isn't counted."""
    times = []
    for _ in range(4):
        began = time.monotonic()
        work()
        if place:
            place.arena.flush()
        times.append(time.monotonic() - began)
    return min(times[1:])
