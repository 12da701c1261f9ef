"""Frames and descriptors over real sockets."""

import asyncio
import os
import socket
import struct
import threading

import pytest
from fakes import resources
from hypothesis import given, settings
from hypothesis import strategies as st

from relay_service.core.channel import (
    MAX_FRAME_BYTES,
    AsyncChannel,
    BlockingChannel,
    ChannelClosed,
)


@pytest.fixture
async def pair():
    """Two joined asynchronous ends."""
    left, right = (AsyncChannel(sock) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def inode(descriptor: int) -> int:
    """Returns what a descriptor is of."""
    return os.fstat(descriptor).st_ino


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4095, 65536, (1 << 18) - 4, 1 << 18, 5_000_001])
async def test_frames_of_every_size(pair, size):
    """A frame arrives as it was sent, whatever the buffers between are."""
    left, right = pair
    frame = os.urandom(size)
    sending = asyncio.create_task(left.send(frame))
    assert await right.receive() == frame
    await sending


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(1, 50))
def test_frames_survive_any_cut(frames, cut):
    """Frames are found again however the stream is cut into pieces."""

    async def exchange() -> list[bytes]:
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(theirs)
        stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
        with ours:
            received = []
            reading = asyncio.create_task(_receive_until_closed(channel, received))
            for start in range(0, len(stream), cut):
                ours.sendall(stream[start : start + cut])
                await asyncio.sleep(0)
        await reading
        channel.close()
        return received

    assert asyncio.run(exchange()) == frames


async def _receive_until_closed(channel: AsyncChannel, received: list[bytes]) -> None:
    try:
        while True:
            received.append(await channel.receive())
    except ChannelClosed:
        return


async def test_concurrent_senders_do_not_mix(pair):
    """Large frames of several senders arrive whole."""
    left, right = pair
    frames = {bytes([n]) * 1_000_000 for n in range(5)}
    sending = [asyncio.create_task(left.send(frame)) for frame in frames]
    assert {await right.receive() for _ in frames} == frames
    await asyncio.gather(*sending)


async def test_descriptors_arrive_with_their_frame(pair):
    """A frame's descriptors are there when it is, in order, and belong to who takes them."""
    left, right = pair
    given_away = [os.memfd_create(f"fd{n}") for n in range(3)]
    kinds = [inode(fd) for fd in given_away]

    async def send_all() -> None:
        await left.send(b"none")
        await left.send(b"two" * 100_000, tuple(given_away[:2]))
        await left.send(b"one", tuple(given_away[2:]))
        for fd in given_away:
            os.close(fd)

    sending = asyncio.create_task(send_all())
    assert await right.receive() == b"none"
    assert await right.receive() == b"two" * 100_000
    taken = right.take_descriptors(2)
    assert await right.receive() == b"one"
    taken += right.take_descriptors(1)
    await sending
    assert [inode(fd) for fd in taken] == kinds
    for fd in taken:
        os.close(fd)


async def test_too_few_descriptors(pair):
    """Taking more descriptors than came along fails."""
    left, right = pair
    fd = os.memfd_create("one")
    await left.send(b"frame", (fd,))
    os.close(fd)
    await right.receive()
    with pytest.raises(ChannelClosed, match="2 descriptors expected"):
        right.take_descriptors(2)


async def test_descriptors_that_nobody_takes_are_closed():
    """Closing a channel closes what came along and was not taken."""
    before = resources()
    left, right = (AsyncChannel(sock) for sock in socket.socketpair())
    fd = os.memfd_create("unwanted")
    await left.send(b"frame", (fd, fd, fd))
    os.close(fd)
    await right.receive()
    assert resources()[0] == before[0] + 5
    left.close()
    right.close()
    assert before.are_back()


async def test_an_oversized_frame_is_refused():
    """A frame that claims more than the limit is refused before anything is allocated."""
    ours, theirs = socket.socketpair()
    channel = AsyncChannel(theirs)
    with ours:
        ours.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        with pytest.raises(ChannelClosed, match=f"at most {MAX_FRAME_BYTES} are allowed"):
            await channel.receive()
    channel.close()


@pytest.mark.parametrize("sent", [b"", b"\x05\x00", b"\x05\x00\x00\x00hal"])
async def test_the_end_of_the_stream(sent):
    """A stream that ends, within a frame or between two, is closed."""
    ours, theirs = socket.socketpair()
    channel = AsyncChannel(theirs)
    with ours:
        ours.sendall(sent)
    with pytest.raises(ChannelClosed):
        await channel.receive()
    channel.close()


async def test_nobody_reads_any_more(pair):
    """Sending to an end that is closed fails."""
    left, right = pair
    right.close()
    with pytest.raises(ChannelClosed):
        await left.send(b"x" * 1_000_000)


async def test_closing_wakes_who_waits(pair):
    """Whoever waits on an end that is closed is told so, a reader and a writer alike."""
    left, _ = pair
    reading = asyncio.create_task(left.receive())
    writing = asyncio.create_task(left.send(bytes(10_000_000)))
    await asyncio.sleep(0.01)
    assert not reading.done()
    assert not writing.done()
    left.close()
    for task in (reading, writing):
        with pytest.raises(ChannelClosed):
            await asyncio.wait_for(task, 10)


async def test_the_peer_is_known(pair):
    """The other side's process and user are those of the kernel, not of its word."""
    assert pair[0].peer_credentials() == (os.getpid(), os.getuid())


async def test_a_blocking_end_meets_an_asynchronous_one():
    """A process that does one thing at a time speaks the same frames, descriptors included."""
    ours, theirs = socket.socketpair()
    channel, blocking = AsyncChannel(ours), BlockingChannel(theirs)

    def echo() -> None:
        while True:
            try:
                frame = blocking.receive()
            except ChannelClosed:
                return
            fd = os.memfd_create("echo")
            blocking.send(frame, (fd,))
            os.close(fd)

    thread = threading.Thread(target=echo)
    thread.start()
    for size in (0, 1, 3_000_000):
        frame = os.urandom(size)
        await channel.send(frame)
        assert await channel.receive() == frame
        os.close(channel.take_descriptors(1)[0])
    channel.close()
    thread.join()
    blocking.close()
