"""The header page of an arena: what it is, whose, and whether a commit is being applied.

On the host it is the first page of the arena's memory. On a device it is a memfd of its
own beside the allocation: the sequence word is read before and after every block, and a
copy from the device each time would cost more than the block. There it also names the
device, and sealing it says that nobody may write to the weights any more.
"""

from __future__ import annotations

import ctypes
import struct

from relay_service.errors import ManifestError

UUID_BYTES = 16
ON_HOST = bytes(UUID_BYTES)
"""Stands where a header names its device, of an arena that lies on none."""

_MAGIC = b"SEEDREL1"
_LAYOUT = struct.Struct("<8s24sQQ16s")  # magic, generation, sequence, bytes of data, device
_SEQUENCE_OFFSET = 32


class Header:
    """A header page that is mapped at an address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def write(self, generation: str, data_bytes: int, device: bytes = ON_HOST) -> None:
        """Marks the memory as an arena of this generation, with an even sequence."""
        header = _LAYOUT.pack(_MAGIC, generation.encode()[:24], 0, data_bytes, device)
        ctypes.memmove(self._address, header, len(header))

    def check(self, data_bytes: int) -> None:
        """Raises `ManifestError` when the memory isn't an arena of this size."""
        magic, _, _, size, _ = self._read()
        if magic != _MAGIC or size != data_bytes:
            raise ManifestError(f"not an arena of {data_bytes} bytes")

    @property
    def device(self) -> bytes:
        """UUID of the device on which the data lies; `ON_HOST` for none."""
        return self._read()[4]

    @property
    def sequence(self) -> int:
        """Number that is odd while a commit is applied and changes with each one."""
        return int(ctypes.c_uint64.from_address(self._address + _SEQUENCE_OFFSET).value)

    @sequence.setter
    def sequence(self, value: int) -> None:
        ctypes.c_uint64.from_address(self._address + _SEQUENCE_OFFSET).value = value

    def _read(self) -> tuple[bytes, bytes, int, int, bytes]:
        return _LAYOUT.unpack(ctypes.string_at(self._address, _LAYOUT.size))
