"""Our bytes of a block message against the generated class."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay_service.errors import SourceFailed
from relay_service.transports.block_codec import decode_block, encode_block
from seedrelay.v1.relay_pb2 import ReadBlocksResponse

numbers = st.integers(0, (1 << 63) - 1)


@given(numbers, numbers, st.binary(max_size=300))
@example(0, 0, b"")
@example(127, 128, bytes(127))
@example(16383, 16384, bytes(128))
def test_the_generated_class_reads_ours(block, epoch, data):
    """A client in any language reads what we write."""
    message = ReadBlocksResponse.FromString(encode_block(block, epoch, memoryview(data)))
    assert message == ReadBlocksResponse(block=block, epoch=epoch, data=data)


@given(numbers, numbers, st.binary(max_size=300))
@example(0, 0, b"")
def test_we_read_the_generated_class(block, epoch, data):
    """We read what a server in any language writes, fields left out for being zero included."""
    message = ReadBlocksResponse(block=block, epoch=epoch, data=data).SerializeToString()
    found_block, found_epoch, found = decode_block(message)
    assert (found_block, found_epoch, bytes(found)) == (block, epoch, data)


def test_a_whole_block():
    """A block of full size passes both ways."""
    data = bytes(range(256)) * 4096
    message = encode_block(3, 4, memoryview(data))
    assert ReadBlocksResponse.FromString(message).data == data
    assert bytes(decode_block(message)[2]) == data


@given(st.binary(max_size=40))
@example(b"\x08")
@example(b"\x1a\xff\xff\xff\xff\x0f")
@example(b"\x1a\x05abc")
@example(b"\x08" + b"\xff" * 20)
@example(b"\x20\x01")
def test_anything_else_is_a_failed_source(message):
    """Any bytes are read as the generated class reads them, or are a failure of the source."""
    with contextlib.suppress(SourceFailed):
        block, epoch, data = decode_block(message)
        parsed = ReadBlocksResponse.FromString(message)
        assert bytes(data) == parsed.data
        assert (block - parsed.block) % (1 << 64) == 0
        assert (epoch - parsed.epoch) % (1 << 64) == 0


@pytest.mark.parametrize("cut", range(1, 15))
def test_a_message_that_is_cut_off(cut):
    """A message that ends early is a failure of the source, never a shorter block."""
    message = encode_block(300, 1, memoryview(b"0123456789"))
    with contextlib.suppress(SourceFailed):
        *_, data = decode_block(message[: len(message) - cut])
        assert bytes(data) in (b"", b"0123456789")
        assert len(message) - cut <= 5, "a cut within the data went unnoticed"
