"""`ReadBlocksResponse` on the wire, without the copies that a generated class makes.

Byte-compatible with the generated message (protobuf.dev/programming-guides/encoding):
field 1 and 2 varints, field 3 length-delimited. A reader in any language uses the
generated class; a test holds the two together.
"""

from __future__ import annotations

from relay_service.errors import SourceFailed

_BLOCK, _EPOCH, _DATA = 0x08, 0x10, 0x1A


def encode_block(block: int, epoch: int, data: memoryview) -> bytes:
    """Encodes one block: one copy of its bytes."""
    header = bytearray((_BLOCK,))
    _put_varint(header, block)
    header.append(_EPOCH)
    _put_varint(header, epoch)
    header.append(_DATA)
    _put_varint(header, len(data))
    return b"".join((header, data))


def decode_block(message: bytes) -> tuple[int, int, memoryview]:
    """Decodes block, epoch and a view of the bytes: no copy of them.

    Raises `SourceFailed` for anything that isn't such a message.
    """
    view, at = memoryview(message), 0
    block = epoch = 0
    data = view[:0]
    while at < len(view):
        tag = view[at]
        value, at = _take_varint(view, at + 1)
        if tag == _BLOCK:
            block = value
        elif tag == _EPOCH:
            epoch = value
        elif tag == _DATA and at + value <= len(view):
            data, at = view[at : at + value], at + value
        else:
            raise SourceFailed("a block message is malformed")
    return block, epoch, data


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _take_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(view):
            break
        byte, at = view[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise SourceFailed("a block message is malformed")
