"""Arenas on a CUDA device: one allocation, shared by descriptor, copied through the host.

Plain Python, and free of torch like all of the relay. Two descriptors make an arena: a memfd
of one page, the header, and the allocation (`cuMemCreate`, exported as a POSIX descriptor).

Who frees what:

* The device's memory lives while anybody has a handle, a mapping or a descriptor of it.
  Whoever opens a descriptor closes it; whoever maps unmaps in `close`, which waits for the
  copies under way first.
* When the exporter dies, however it dies, its mapping goes and the importer's stays valid:
  leases that exist may finish, as from a memfd.
* When an importer dies, its mapping and its copies go with its context. The exporter does not
  notice, and its memory holds what had landed.
* There is no sealing on a device: nobody can take a writable mapping away from another
  process, nor keep one that holds the descriptor from making one. So the seal lies on the
  header, `CudaArena` makes no writable mapping of an arena whose header is sealed, and a relay
  that does not return its mapping means FAILED: the engine can't move the weights away from
  it as on the host.

Digests are those of the staged bytes: of the very buffer that the device copies from, or
has been copied to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack

from relay_service.core.buffers import address_of
from relay_service.core.copies import Copy
from relay_service.core.digests import block_hasher
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import DeviceError, ManifestError, Refused
from relay_service.memory.cuda_port import Driver
from relay_service.memory.host import HostArena, create_memfd
from relay_service.memory.staging import Lanes, host_bytes

PIECE_BYTES = BLOCK_BYTES // 4
"""What is copied while the piece before it is digested."""


class CudaArena:
    """One mapping of an arena on a device."""

    def __init__(
        self, driver: Driver, page: HostArena, handle: int, data_bytes: int, *, writable: bool
    ) -> None:
        """Maps the allocation of a handle beside its header page; takes both over.

        Raises `ManifestError` for an allocation that is too small, or not on the device that
        the header names.
        """
        with ExitStack() as undo:
            undo.callback(page.close)
            undo.callback(driver.release, handle)
            device = driver.device_of(handle)
            named = page.header.device
            if driver.devices()[device] != named:
                raise ManifestError(
                    f"the allocation lies on device {driver.devices()[device].hex()}, "
                    f"its header names {named.hex()}"
                )
            size = _rounded(driver, device, data_bytes)
            try:
                self.address = driver.map(handle, device, size, writable=writable)
            except DeviceError as error:
                raise ManifestError(f"cannot map {data_bytes} bytes: {error}") from error
            undo.callback(driver.unmap, self.address, size)
            self._lanes = Lanes(driver, device)
            undo.callback(self._lanes.close)
            self._undo = undo.pop_all()
        self._driver = driver
        self._page = page
        self.device = device
        self.data_bytes = data_bytes
        self.writable = writable
        self._closed = False

    @property
    def sequence(self) -> int:
        """Number that is odd while a commit is applied and changes with each one."""
        return self._page.sequence

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._page.sequence = value

    def check_header(self) -> None:
        """Raises `ManifestError` when the memory isn't an arena of this size."""
        self._page.header.check(self.data_bytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Copies at most a block to the host, and returns it.

        It holds until the same thread uses the arena again, or until `close`.
        """
        self._check(offset, nbytes)
        if nbytes > BLOCK_BYTES:
            raise IndexError(f"{nbytes} bytes at once, at most {BLOCK_BYTES} of a device")
        return self._lanes.mine().fetch(self.address + offset, nbytes).toreadonly()

    def place(self, offset: int, nbytes: int) -> None:
        """Returns none: a block goes through a pinned buffer."""

    def land(self, offset: int, data: memoryview | bytes) -> bytes:
        """Copies a block in and digests it piece by piece; returns when it is on the device."""
        self._check(offset, len(data))
        lane, hasher, source = self._lanes.mine(), block_hasher(), address_of(data)
        for start in range(0, len(data), PIECE_BYTES):
            nbytes = min(PIECE_BYTES, len(data) - start)
            buffer = lane.next_buffer()
            ctypes.memmove(buffer, source + start, nbytes)
            lane.send(self.address + offset + start, nbytes)
            hasher.update(host_bytes(buffer, nbytes))
        lane.flush()
        return hasher.digest()

    def scatter(self, block: memoryview | bytes, pieces: Sequence[Copy]) -> bool:
        """Copies runs in, one by one; returns when they are on the device.

        What is staged is what was verified, and what lies there in the end gets a digest: as
        with `land`, nobody compares it here.
        """
        lane, source = self._lanes.mine(), address_of(block)
        for piece in pieces:
            for run in range(piece.count):
                to = piece.target_offset + run * piece.target_stride
                self._check(to, piece.nbytes)
                buffer = lane.next_buffer()
                ctypes.memmove(
                    buffer, source + piece.source_offset + run * piece.source_stride, piece.nbytes
                )
                lane.send(self.address + to, piece.nbytes)
        lane.flush()
        return True

    def build(self, nbytes: int) -> memoryview:
        """Returns zeroed host bytes in which to build a block; `put` copies them.

        They are the calling thread's until it has called `put` and `build` once more.
        """
        buffer = self._lanes.mine().next_buffer()
        ctypes.memset(buffer, 0, nbytes)
        return host_bytes(buffer, nbytes)

    def put(self, offset: int, nbytes: int) -> None:
        """Starts to copy what was built; it is there after `flush`."""
        self._check(offset, nbytes)
        self._lanes.mine().send(self.address + offset, nbytes)

    def flush(self) -> None:
        """Waits until all that was copied in is on the device. Raises what went wrong."""
        self._lanes.flush()

    def close(self) -> None:
        """Waits for what is under way and unmaps. Doing so twice is harmless."""
        if not self._closed:
            self._closed = True
            self._driver.use(self.device)
            self._undo.close()

    def _check(self, offset: int, nbytes: int) -> None:
        if self._closed or offset < 0 or offset + nbytes > self.data_bytes:
            raise IndexError(f"{nbytes} bytes at {offset} of {self.data_bytes}")


def create(
    driver: Driver, device: int, name: str, generation: str, data_bytes: int
) -> tuple[CudaArena, tuple[int, int]]:
    """Allocates an arena on a device, of unknown contents, and maps it for writing.

    Returns it and its descriptors, header first. Raises `ResourceExhausted` or `DeviceError`.
    """
    driver.use(device)
    with ExitStack() as undo:
        header_fd = create_memfd(name, 0)
        undo.callback(os.close, header_fd)
        page = HostArena(header_fd, 0, writable=True)
        undo.callback(page.close)
        page.header.write(generation, data_bytes, driver.devices()[device])
        handle = driver.allocate(device, _rounded(driver, device, data_bytes))
        arena = CudaArena(driver, page, handle, data_bytes, writable=True)
        undo.callback(arena.close)
        allocation_fd = driver.export(handle)
        undo.pop_all()
    return arena, (header_fd, allocation_fd)


def import_arena(
    driver: Driver, descriptors: Sequence[int], data_bytes: int, *, writable: bool
) -> CudaArena:
    """Maps the arena behind a header's and an allocation's descriptor, which stay the caller's.

    Raises `ManifestError` for what is no such arena or of another size, `Refused` for a device
    that this process does not see, and `ResourceExhausted`, also for one that is sealed.
    """
    header_fd, allocation_fd = descriptors
    # A page that is sealed cannot be mapped for writing, and then neither is what it heads.
    page = HostArena(header_fd, 0, writable=writable)
    with ExitStack() as undo:
        undo.callback(page.close)
        page.header.check(data_bytes)
        named = page.header.device
        devices = driver.devices()
        if named not in devices:
            raise Refused(
                f"the arena lies on device {named.hex()}, which this process does not see",
                field="device", found=named.hex(), expected=", ".join(d.hex() for d in devices),
                hint="start relay and engine with the same CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
        driver.use(devices.index(named))
        try:
            handle = driver.adopt(allocation_fd)
        except DeviceError as error:
            raise ManifestError(f"the descriptor is no allocation of a device: {error}") from error
        undo.pop_all()
    return CudaArena(driver, page, handle, data_bytes, writable=writable)


def _rounded(driver: Driver, device: int, nbytes: int) -> int:
    """Returns the size of an allocation for so many bytes; there is none of no bytes."""
    granularity = driver.granularity(device)
    return -(-max(nbytes, 1) // granularity) * granularity
