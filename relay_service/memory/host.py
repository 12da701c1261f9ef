"""Arenas in host memory: a memfd, mapped by whoever holds its descriptor.

Plain Python and libc; must stay free of torch, since the relay imports it.

A mapping is made with libc's `mmap` rather than the `mmap` module: an arena is
mapped at a fixed address, outlives every view of it, and is unmapped on purpose.
Copies go through `ctypes.memmove`, which releases the GIL; a slice copy does not.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from relay_service.core.buffers import address_of
from relay_service.core.copies import Copy
from relay_service.core.digests import block_digest
from relay_service.core.manifest import HEADER_BYTES
from relay_service.errors import ManifestError, ResourceExhausted
from relay_service.memory.header import Header

# linux/fcntl.h; the fcntl module of Python 3.11 does not name them.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10

_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; the mmap module of Python 3.11 does not name it
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; the latter since Linux 6.1
_HUGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create_memfd(name: str, data_bytes: int) -> int:
    """Creates the memory of an arena and returns its descriptor.

    The pages are allocated at once, so a host without memory says so here and
    not by a SIGBUS while bytes land. What the host has is looked up first: the
    kernel itself would call its out-of-memory killer instead of saying no.

    Raises `ResourceExhausted`.
    """
    available = available_bytes()
    if data_bytes > available:
        raise _no_memory(data_bytes, f"{available} bytes are available")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES + data_bytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise _no_memory(data_bytes, str(error.strerror)) from error
    return fd


def available_bytes() -> int:
    """Memory that can be allocated: the host's (proc(5), MemAvailable) or the cgroup's rest."""
    meminfo = Path("/proc/meminfo").read_text("ascii")
    available = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    group = (
        Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    )
    try:
        limit = (group / "memory.max").read_text("ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text("ascii"))
            available = min(available, int(limit) - used)
    except OSError:  # no cgroup of version 2: the host's number stands
        pass
    return available


def _no_memory(data_bytes: int, reason: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"cannot allocate an arena of {data_bytes} bytes: {reason}",
        field="arena_bytes", found=str(data_bytes), hint="free memory or raise the limit",
    )  # fmt: skip


def _even_address(size: int) -> int | None:
    """Returns a free address at which huge pages can back a mapping; none for a small one."""
    room = size + _HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = _libc.mmap(None, room, 0, flags, -1, 0) if size >= _HUGE_BYTES else None
    if found is None or found == _MAP_FAILED:
        return None
    _libc.munmap(found, room)
    return int(-(-found // _HUGE_BYTES) * _HUGE_BYTES)


def seal(fd: int) -> None:
    """Forbids new writable mappings and writes; mappings that exist stay writable."""
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)


def is_sealed(fd: int) -> bool:
    """Returns whether nobody can map the memory for writing any more."""
    return bool(_seals(fd) & F_SEAL_FUTURE_WRITE)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:  # not a memfd
        return 0


def counted_bytes(base: int, *counters: str) -> int:
    """Sums up what the kernel counts of the mapping that begins there (proc(5), smaps)."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as smaps:
        for line in smaps:
            name, _, rest = line.partition(":")
            if "-" in line.split(" ", 1)[0]:
                if inside:
                    break
                inside = line.startswith(f"{base:x}-")
            elif inside and name in counters:
                total += int(rest.split()[0]) * 1024
    return total


class HostArena:
    """One mapping of an arena: a header page, then the data."""

    def __init__(
        self, fd: int, data_bytes: int, *, writable: bool, address: int = 0, populate: bool = True
    ) -> None:
        """Maps `fd`. Raises `ManifestError` for memory that is, or may become, too small.

        With `address` the mapping replaces whatever is mapped there. Memory of which not all is
        allocated must not be populated: that would allocate it.
        """
        size = HEADER_BYTES + data_bytes
        if os.fstat(fd).st_size < size:
            raise ManifestError(f"arena holds {os.fstat(fd).st_size} bytes, manifest needs {size}")
        if not _seals(fd) & F_SEAL_SHRINK:
            # Reading what its owner has cut off would be a SIGBUS.
            raise ManifestError("the memory of an arena must be sealed against shrinking")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (0x10 if address else 0)  # MAP_FIXED
        flags |= mmap.MAP_POPULATE if populate else 0
        mapped = _libc.mmap(address or _even_address(size), size, protection, flags, fd, 0)
        if mapped == _MAP_FAILED or mapped is None:
            error = ctypes.get_errno()
            raise ResourceExhausted(f"cannot map {size} bytes: {os.strerror(error)}")
        self.base: int = mapped
        self.size = size
        self.data_bytes = data_bytes
        self.writable = writable
        raw = (ctypes.c_char * max(data_bytes, 1)).from_address(self.address)
        data = memoryview(raw).cast("B")
        self._data = data if writable else data.toreadonly()
        # Asked for, not required: `page_kind` reports what the host gave.
        _libc.madvise(mapped, size, _MADV_HUGEPAGE)

    @property
    def address(self) -> int:
        """Address of the first byte of the data."""
        return self.base + HEADER_BYTES

    @property
    def closed(self) -> bool:
        """Whether the mapping is gone."""
        return self.base == 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a view of the data. It must not be used after `close`."""
        if self.closed or offset < 0 or offset + nbytes > self.data_bytes:
            raise IndexError(f"{nbytes} bytes at {offset} of {self.data_bytes}")
        return self._data[offset : offset + nbytes]

    def place(self, offset: int, nbytes: int) -> memoryview | None:
        """Returns a view of the data to receive into; None of a mapping that is read-only."""
        return self.view(offset, nbytes) if self.writable else None

    def land(self, offset: int, data: memoryview | bytes) -> bytes:
        """Copies a block into the arena and digests what landed, while it is in cache."""
        landed = self.view(offset, len(data))
        ctypes.memmove(self.address + offset, address_of(data), len(data))
        return block_digest(landed)

    def scatter(self, block: memoryview | bytes, pieces: Sequence[Copy]) -> bool:
        """Copies runs of a block into the arena and compares them, while both are in cache."""
        # Here: numpy takes a tenth of a second to import, and a rank never scatters.
        from relay_service.memory import strided

        if self.closed:
            raise IndexError("the arena is unmapped")
        return strided.scatter(block, self._data, pieces)

    @property
    def header(self) -> Header:
        """The header page."""
        return Header(self.base)

    def write_header(self, generation: str) -> None:
        """Marks the memory as an arena of this generation, with an even sequence."""
        self.header.write(generation, self.data_bytes)

    def check_header(self) -> None:
        """Raises `ManifestError` when the memory isn't an arena of this size."""
        self.header.check(self.data_bytes)

    @property
    def sequence(self) -> int:
        """Number that is odd while a commit is applied and changes with each one."""
        return self.header.sequence

    @sequence.setter
    def sequence(self, value: int) -> None:
        self.header.sequence = value

    def gather_pages(self) -> None:
        """Has the kernel move the memory into huge pages, as far as it has some.

        Takes about a second per GiB. Contents, addresses and other mappings stay as they are,
        and whoever reads or writes meanwhile waits for a few pages at most. A kernel that
        cannot do it leaves everything as it was; `page_kind` tells.
        """
        _libc.madvise(self.base, self.size, _MADV_COLLAPSE)

    def page_kind(self) -> str:
        """Says which pages back the mapping: `4 KiB` or `huge (N bytes)`."""
        huge = counted_bytes(self.base, "ShmemPmdMapped", "Shared_Hugetlb")
        return f"huge ({huge} bytes)" if huge else "4 KiB"

    def close(self) -> None:
        """Unmaps the arena. Doing so twice is harmless."""
        if not self.closed:
            _libc.munmap(self.base, self.size)
            self.base = 0
