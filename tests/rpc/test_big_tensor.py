"""A tensor beyond every 32-bit limit is relayed bit for bit."""

import ctypes

import pytest
from fakes import FakeEngine, Memory

from relay_service.config import socket_path
from relay_service.core.attachment import Accepted
from relay_service.core.digests import block_digest
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from seedrelay.v1 import weights_pb2

BYTES = (4 << 30) + 1


class Stamped(Memory):
    """An arena that is zero but for a stamp at both ends of each block."""

    def stamp(self) -> None:
        """Writes the stamps and computes the digests."""
        layout, arena, digests = self.layouts[0], self.arenas[0], []
        for block in map(layout.block, range(layout.block_count)):
            view = arena.view(block.offset, block.nbytes)
            mark = (block.index + 1).to_bytes(8, "little")[: block.nbytes]
            view[: len(mark)] = view[-len(mark) :] = mark
            digests.append(block_digest(view))
        self.manifests = [layout.with_digests(digests)]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_tensor_over_four_gib(fleet, transport):
    """A tensor of 4 GiB and a byte lands whole, over every transport."""
    layout = lay_out(0, [UnitSpec("big", (TensorSpec("big", DType.U8, (BYTES,)),))])
    relay = await fleet.relay()
    memory = Stamped([layout])
    memory.stamp()
    seed = FakeEngine("seed", memory)
    assert isinstance(await seed.attach(socket_path(relay.address)), Accepted)
    target = await fleet.engine(relay, "target", layout=layout)
    options = weights_pb2.PullOptions(transport=transport)
    *_, last = [message async for message in fleet.client(relay).pull("target", options)]
    assert last.report.bytes_moved == BYTES
    assert last.report.weights_digest == memory.digest
    here, there = memory.arenas[0].address, target.memory.arenas[0].address
    assert ctypes.CDLL(None).memcmp(
        ctypes.c_void_p(here), ctypes.c_void_p(there), ctypes.c_size_t(BYTES)
    ) == 0  # fmt: skip
    seed.close()
