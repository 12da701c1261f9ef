"""Addresses of buffers, and copies of them that release the GIL. Plain Python and ctypes."""

from __future__ import annotations

import ctypes
import threading


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable ABI (docs.python.org/3/c-api/buffer.html)."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def address_of(data: memoryview | bytes) -> int:
    """Returns the address of a contiguous buffer, read-only ones included."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


class Scratch(threading.local):
    """A buffer for each thread, which stays in its cache."""

    def __init__(self, nbytes: int) -> None:
        self._memory = (ctypes.c_char * nbytes)()

    def copy(self, data: memoryview) -> memoryview:
        """Copies at most so many bytes; they are the thread's until it copies again."""
        view = memoryview(self._memory).cast("B")[: len(data)]
        ctypes.memmove(self._memory, address_of(data), len(view))
        return view
