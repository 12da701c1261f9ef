"""A CUDA driver in host memory. Its streams do nothing until somebody waits for them.

So whatever forgets to wait reads old bytes, or has its buffer written over before it is
copied. An allocation is a real memfd, which travels between processes as a real one does.
"""

# What a method of a twin does, and what it is given, stands in its port.
# ruff: noqa: D102

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from relay_service.errors import DeviceError, ResourceExhausted
from relay_service.memory.host import _libc

GRANULARITY = 1 << 16
_NAME = "fake-cuda-"


class FakeDriver:
    """`Driver` for devices that do not exist."""

    def __init__(self, devices: int = 2, memory_bytes: int = 1 << 28) -> None:
        self.uuids = [bytes([number + 1]) * 16 for number in range(devices)]
        self.memory_bytes = memory_bytes
        self.live: Counter[str] = Counter()
        """What has been created and not been given back, by kind."""
        self.fault: Exception | None = None
        """Raised in the place of the next copy that a stream comes to."""
        self._numbers = itertools.count(1)
        self._handles: dict[int, int] = {}
        self._maps: dict[int, tuple[int, bool]] = {}
        self._pinned: dict[int, ctypes.Array] = {}
        self._streams: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        self._events: dict[int, tuple[int, int]] = {}
        self._context = threading.local()
        self._lock = threading.RLock()

    def devices(self) -> list[bytes]:
        return list(self.uuids)

    def use(self, device: int) -> None:
        if not 0 <= device < len(self.uuids):
            raise _failed("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        self._context.device = device

    def granularity(self, device: int) -> int:
        return GRANULARITY

    def allocate(self, device: int, nbytes: int) -> int:
        assert nbytes % GRANULARITY == 0, "a size that the driver would refuse"
        if nbytes > self.memory_bytes:
            raise ResourceExhausted("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        fd = os.memfd_create(f"{_NAME}{device}")
        os.write(fd, b"\xcd" * nbytes)  # what somebody else left there
        return self._handle(fd)

    def export(self, handle: int) -> int:
        return os.dup(self._handles[handle])

    def adopt(self, fd: int) -> int:
        self._need_context()
        if _NAME not in _link(fd):
            raise _failed("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        return self._handle(os.dup(fd))

    def device_of(self, handle: int) -> int:
        return int(_link(self._handles[handle]).split(_NAME)[1].split()[0])

    def release(self, handle: int) -> None:
        os.close(self._drop("handle", self._handles, handle))

    def map(self, handle: int, device: int, nbytes: int, *, writable: bool) -> int:
        self._need_context()
        fd = self._handles[handle]
        if nbytes > os.fstat(fd).st_size or nbytes % GRANULARITY:
            raise _failed("cuMemMap", "CUDA_ERROR_INVALID_VALUE")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        with self._lock:
            self._maps[address] = nbytes, writable
            self.live["map"] += 1
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            assert self._maps.pop(address)[0] == nbytes
            self.live["map"] -= 1
        _libc.munmap(address, nbytes)

    def allocate_pinned(self, nbytes: int) -> int:
        self._need_context()
        buffer = ctypes.create_string_buffer(nbytes)
        with self._lock:
            self._pinned[ctypes.addressof(buffer)] = buffer
            self.live["pinned"] += 1
        return ctypes.addressof(buffer)

    def free_pinned(self, address: int) -> None:
        self._drop("pinned", self._pinned, address)

    def create_stream(self) -> int:
        return self._create("stream", self._streams, [])

    def destroy_stream(self, stream: int) -> None:
        assert not self._drop("stream", self._streams, stream), "work was under way"

    def synchronize(self, stream: int) -> None:
        self._need_context()
        self._run(stream, len(self._streams[stream]))

    def create_event(self) -> int:
        return self._create("event", self._events, (0, 0))

    def destroy_event(self, event: int) -> None:
        self._drop("event", self._events, event)

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            work = self._streams[stream]
            self._events[event] = stream, work[-1][0] if work else 0

    def wait(self, event: int) -> None:
        self._need_context()
        stream, last = self._events[event]
        with self._lock:
            work = self._streams.get(stream, [])
            self._run(stream, sum(number <= last for number, _ in work))

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._check(device, host, nbytes, write=True)
        self._later(stream, lambda: ctypes.memmove(device, host, nbytes))

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._check(device, host, nbytes, write=False)
        self._later(stream, lambda: ctypes.memmove(host, device, nbytes))

    def _handle(self, fd: int) -> int:
        return self._create("handle", self._handles, fd)

    def _create(self, kind: str, where: dict, value) -> int:
        with self._lock:
            number = next(self._numbers)
            where[number] = value
            self.live[kind] += 1
            return number

    def _drop(self, kind: str, where: dict, number: int):
        with self._lock:
            self.live[kind] -= 1
            return where.pop(number)

    def _need_context(self) -> None:
        if getattr(self._context, "device", None) is None:
            raise _failed("a call", "CUDA_ERROR_INVALID_CONTEXT")

    def _check(self, device: int, host: int, nbytes: int, *, write: bool) -> None:
        self._need_context()
        with self._lock:  # several threads copy, and others create and free meanwhile
            pinned = [(address, len(buffer)) for address, buffer in self._pinned.items()]
            mapped = [
                (address, size) for address, (size, writable) in self._maps.items()
                if writable or not write
            ]  # fmt: skip
        assert _within(host, nbytes, pinned), "memory that isn't pinned"
        if not _within(device, nbytes, mapped):
            raise _failed("a copy", "CUDA_ERROR_ILLEGAL_ADDRESS")

    def _later(self, stream: int, work: Callable[[], object]) -> None:
        with self._lock:
            self._streams[stream].append((next(self._numbers), work))

    def _run(self, stream: int, count: int) -> None:
        with self._lock:
            for _ in range(count):
                _, work = self._streams[stream].pop(0)
                if self.fault:
                    fault, self.fault = self.fault, None
                    raise fault
                work()


def _within(start: int, nbytes: int, spans: list[tuple[int, int]]) -> bool:
    return any(a <= start and start + nbytes <= a + size for a, size in spans)


def _link(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def _failed(call: str, error: str) -> DeviceError:
    return DeviceError(f"{call} failed: {error}", call=call, found=error)
