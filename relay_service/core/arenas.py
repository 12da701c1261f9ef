"""Maps the arenas of all ranks of an instance, or none of them. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from relay_service.core.manifest import Manifest
from relay_service.core.ports import Arena, MapArena


def map_arenas(
    map_arena: MapArena,
    descriptors: Sequence[int],
    manifests: Sequence[Manifest],
    *,
    writable: bool,
    sparse: bool = False,
) -> list[Arena]:
    """Maps one arena per manifest; the descriptors of each rank follow one another.

    Raises what mapping one does, and `ManifestError` for memory that is no arena of its size.
    """
    mapped: list[Arena] = []
    each = len(descriptors) // len(manifests)
    try:
        for rank, manifest in enumerate(manifests):
            mine = descriptors[rank * each : (rank + 1) * each]
            size = manifest.data_bytes
            mapped.append(map_arena(mine, size, writable=writable, sparse=sparse))
            mapped[-1].check_header()
    except BaseException:
        close_arenas(mapped)
        raise
    return mapped


def close_arenas(arenas: list[Arena]) -> int:
    """Unmaps and forgets them; returns how many there were."""
    count = len(arenas)
    while arenas:
        arenas.pop().close()
    return count
