"""Protocol buffers ↔ manifests. What came from a peer is checked by the core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest, TensorEntry, Unit
from relay_service.errors import ManifestError
from seedrelay.v1 import relay_pb2, weights_pb2

_PAGE_BYTES = (1 << 20) - 16


def manifest_pages(manifest: Manifest) -> Iterator[relay_pb2.GetManifestResponse]:
    """Cuts a manifest into pages well below the message limit."""
    page, size = relay_pb2.GetManifestResponse(data_bytes=manifest.data_bytes), 0
    for unit in map(_unit_to_proto, manifest.units):
        # Tag and length of the unit, and the page's own field, take a few bytes more.
        needed = unit.ByteSize() + 16
        if page.units and size + needed > _PAGE_BYTES:
            yield page
            page, size = relay_pb2.GetManifestResponse(data_bytes=manifest.data_bytes), 0
        page.units.append(unit)
        size += needed
    yield page


def manifest_from_pages(rank: int, pages: Iterable[relay_pb2.GetManifestResponse]) -> Manifest:
    """Joins the pages of a manifest. The caller checks it before use."""
    data_bytes, units = 0, []
    for page in pages:
        data_bytes = page.data_bytes
        units += [_unit_from_proto(unit) for unit in page.units]
    return Manifest(rank, data_bytes, tuple(units))


def _unit_to_proto(unit: Unit) -> weights_pb2.WeightUnit:
    return weights_pb2.WeightUnit(
        name=unit.name, offset=unit.offset, byte_count=unit.nbytes,
        tensors=map(_tensor_to_proto, unit.tensors), block_digests=unit.digests,
    )  # fmt: skip


def _unit_from_proto(message: weights_pb2.WeightUnit) -> Unit:
    tensors = tuple(_tensor_from_proto(tensor) for tensor in message.tensors)
    digests = tuple(message.block_digests)
    return Unit(message.name, message.offset, message.byte_count, tensors, digests)


def _tensor_to_proto(tensor: TensorEntry) -> weights_pb2.TensorEntry:
    return weights_pb2.TensorEntry(
        name=tensor.name, kind=tensor.kind, dtype=tensor.dtype, shape=tensor.shape,
        strides=tensor.strides, offset=tensor.offset, byte_count=tensor.nbytes,
        logical=tensor.logical, alias=tensor.alias, sealed=tensor.cut.sealed,
        parts=[
            weights_pb2.TensorPart(
                logical=part.logical, whole_rows=part.whole[0], whole_columns=part.whole[1],
                first_row=part.rows[0], row_count=part.rows[1],
                first_column=part.columns[0], column_count=part.columns[1],
            )
            for part in tensor.cut.parts
        ],
    )  # fmt: skip


def _tensor_from_proto(message: weights_pb2.TensorEntry) -> TensorEntry:
    try:
        dtype = DType(message.dtype)
    except ValueError as error:
        raise ManifestError(
            f"tensor {message.name}: unknown dtype {message.dtype[:32]!r}"
        ) from error
    return TensorEntry(
        message.name, message.kind, dtype, tuple(message.shape), tuple(message.strides),
        message.offset, message.byte_count, message.logical, message.alias,
        Cut(tuple(map(_part_from_proto, message.parts)), message.sealed),
    )  # fmt: skip


def _part_from_proto(message: weights_pb2.TensorPart) -> Part:
    return Part(
        message.logical, (message.whole_rows, message.whole_columns),
        (message.first_row, message.row_count), (message.first_column, message.column_count),
    )  # fmt: skip
