"""What of a file lies in the page cache, what processes read from devices, what memory they hold.

A start from disk is cold only when the pages are gone, so that is proven before
(mincore(2)) and the bytes that came from the device are counted after (proc(5), io).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_READ_BYTES = 8 << 20


def chill(files: Sequence[Path]) -> None:
    """Drops the files' pages. Raises `SystemExit` when more than a hundredth stays."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left, size = cached_bytes(files), total_bytes(files)
    if left > size / 100:
        raise SystemExit(f"{left} of {size} bytes stay in the page cache: somebody maps them")


def warm(files: Sequence[Path]) -> None:
    """Reads the files. Raises `SystemExit` when the page cache loses more than a hundredth."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    found, size = cached_bytes(files), total_bytes(files)
    if found < size * 0.99:
        raise SystemExit(f"only {found} of {size} bytes stay in the page cache: free memory")


def total_bytes(files: Sequence[Path]) -> int:
    """Sums up the sizes of files."""
    return sum(path.stat().st_size for path in files)


def cached_bytes(files: Sequence[Path]) -> int:
    """Counts the bytes of files that lie in the page cache."""
    return sum(_cached_bytes(path) for path in files)


def _cached_bytes(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    try:
        pages = -(-size // mmap.PAGESIZE)
        resident = ctypes.create_string_buffer(pages)
        if _libc.mincore(address, size, resident):
            raise OSError(ctypes.get_errno(), f"cannot look at the pages of {path}")
    finally:
        _libc.munmap(address, size)
    count = sum(byte & 1 for byte in resident.raw)
    return min(size, count * mmap.PAGESIZE)


def device_bytes(pids: Sequence[int]) -> int:
    """Counts the bytes that processes have had read from storage devices (proc(5), io)."""
    return sum(_field(pid, "io", "read_bytes") for pid in pids)


def own_bytes(pid: int) -> int:
    """Counts the resident bytes of a process that are no shared memory (proc(5), status).

    A relay's arenas are shared memory, all of it; what is left is its heap and stacks
    (RssAnon) and its program (RssFile).
    """
    return 1024 * (_field(pid, "status", "RssAnon") + _field(pid, "status", "RssFile"))


def _field(pid: int, file: str, name: str) -> int:
    text = Path(f"/proc/{pid}/{file}").read_text("utf-8")
    return int(text.partition(f"{name}:")[2].split()[0])
