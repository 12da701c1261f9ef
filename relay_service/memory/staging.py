"""Pinned host buffers that blocks pass through on their way to and from a device.

A lane belongs to one thread. Its two buffers take turns: while one is copied to the device,
the next piece is written into the other one and digested. A buffer is written again only
after the event behind its last copy.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack

from relay_service.core.manifest import BLOCK_BYTES
from relay_service.memory.cuda_port import Driver

_BUFFERS = 2


class Lane:
    """Two pinned buffers of one block each, a stream, and an event per buffer."""

    def __init__(self, driver: Driver, device: int) -> None:
        """Allocates. The device's context must be the calling thread's."""
        self._driver = driver
        self._device = device
        with ExitStack() as undo:
            self._pinned = driver.allocate_pinned(_BUFFERS * BLOCK_BYTES)
            undo.callback(driver.free_pinned, self._pinned)
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events: list[int] = []
            for _ in range(_BUFFERS):
                self._events.append(driver.create_event())
                undo.callback(driver.destroy_event, self._events[-1])
            self._undo = undo.pop_all()
        self._turn = 0

    def next_buffer(self) -> int:
        """Returns the address of the buffer whose turn it is, once its last copy is done."""
        self._turn = (self._turn + 1) % _BUFFERS
        self._driver.wait(self._events[self._turn])
        return self._buffer

    def send(self, address: int, nbytes: int) -> None:
        """Starts to copy the buffer in turn to an address on the device."""
        self._driver.copy_in(address, self._buffer, nbytes, self._stream)
        self._driver.record(self._events[self._turn], self._stream)

    def fetch(self, address: int, nbytes: int) -> memoryview:
        """Copies from the device into the next buffer; returns it once the bytes are there.

        They stay until the call after the next one that takes a buffer.
        """
        buffer = self.next_buffer()
        self._driver.copy_out(buffer, address, nbytes, self._stream)
        self._driver.synchronize(self._stream)
        return host_bytes(buffer, nbytes)

    def flush(self) -> None:
        """Waits until everything that was sent is on the device. Raises what went wrong."""
        self._driver.synchronize(self._stream)

    def close(self) -> None:
        """Waits for what is under way and frees everything."""
        self._undo.callback(self.flush)
        self._undo.close()

    @property
    def _buffer(self) -> int:
        return self._pinned + self._turn * BLOCK_BYTES


class Lanes:
    """One lane per thread that copies to or from one device."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._lanes: dict[int, Lane] = {}

    def mine(self) -> Lane:
        """Returns the calling thread's lane; makes the device's context the thread's."""
        self._driver.use(self._device)
        # A thread that has ended leaves its number, and so its lane, to a later one.
        with self._lock:
            lane = self._lanes.get(threading.get_ident())
            if lane is None:
                lane = self._lanes[threading.get_ident()] = Lane(self._driver, self._device)
            return lane

    def flush(self) -> None:
        """Waits until everything that any thread sent is on the device."""
        self._driver.use(self._device)
        for lane in self._all():
            lane.flush()

    def close(self) -> None:
        """Waits for what is under way and frees all lanes."""
        self._driver.use(self._device)
        with ExitStack() as closing:
            for lane in self._all():
                closing.callback(lane.close)
        self._lanes.clear()

    def _all(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())


def host_bytes(address: int, nbytes: int) -> memoryview:
    """Returns host memory at an address as writable bytes; whoever owns it keeps it."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
