"""Maps an arena wherever it lies: one descriptor is host memory, two are a device's.

Nothing of CUDA is loaded before somebody brings an arena that lies on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay_service.core.ports import Arena
from relay_service.memory.host import HostArena
from relay_service.memory.sparse import SparseArena


def map_arena(
    descriptors: Sequence[int], data_bytes: int, *, writable: bool, sparse: bool = False
) -> Arena:
    """Maps an arena; its descriptors stay open and the caller's.

    One in sparse host memory is writable, and allocated as it is written. A device has none.

    Raises `ManifestError`, `Refused`, `ResourceExhausted`, and `DeviceError` where there is
    no CUDA driver.
    """
    if len(descriptors) == 1 and sparse:
        return SparseArena(descriptors[0], data_bytes)
    if len(descriptors) == 1:
        return HostArena(descriptors[0], data_bytes, writable=writable)
    from relay_service.memory import cuda, cuda_driver

    return cuda.import_arena(cuda_driver.load(), descriptors, data_bytes, writable=writable)
