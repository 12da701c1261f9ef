"""Filling dummies whose arenas, or those of their sources, lie on a device that is a fake."""

import pytest
from fake_cuda import FakeDriver
from fakes import LentMemory, Memory, same_weights, verified
from test_relay_pull import pull

from clients.errors import CallFailed
from relay_service.core.attachment import Accepted
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.errors import DeviceError
from relay_service.memory import cuda, cuda_driver


class DeviceMemory(Memory):
    """Arenas of one instance on a device."""

    def __init__(self, driver, layouts, contents=()) -> None:
        super().__init__([])
        self.layouts = self.manifests = list(layouts)
        for layout in layouts:
            arena, descriptors = cuda.create(driver, 0, "tests", "tests", layout.data_bytes)
            self.arenas.append(arena)
            self.descriptors += descriptors
        if contents:
            self.fill(contents)
            self.manifests = [verified(m, d) for m, d in zip(layouts, contents, strict=True)]

    def contents(self, rank: int = 0) -> bytes:
        """Returns the bytes of a rank's arena."""
        arena, size = self.arenas[rank], self.layouts[rank].data_bytes
        starts = range(0, size, BLOCK_BYTES)
        return b"".join(bytes(arena.view(s, min(BLOCK_BYTES, size - s))) for s in starts)

    def seal(self) -> None:
        """Lets no relay map the memory for writing."""
        self.descriptors, rest = self.descriptors[::2], self.descriptors
        super().seal()
        self.descriptors = rest


@pytest.fixture
def driver(monkeypatch):
    """The driver that every relay of this process finds."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    return driver


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("places", ["device to device", "device to host", "host to device"])
async def test_weights_arrive_wherever_they_lie(fleet, driver, hosts, places):
    """From host or device to host or device, on one host or between two, every byte lands."""
    source, target = places.split(" to ")
    here = await fleet.relay()
    there = await fleet.relay(join=here.address) if hosts == 2 else here
    seed_memory, target_memory = None, None
    if source == "device":
        seed_memory = DeviceMemory(driver, [fleet.layout], [fleet.data])
    if target == "device":
        target_memory = DeviceMemory(driver, [fleet.layout])
    per_rank = {"host": 1, "device": 2}
    seed = await fleet.engine(
        here, "seed", fleet.data, memory=seed_memory, descriptors_per_rank=per_rank[source]
    )
    engine = await fleet.engine(
        there, "target", memory=target_memory, descriptors_per_rank=per_rank[target]
    )
    client = fleet.client(there)
    *_, last = await pull(client)
    assert last.report.weights_digest == seed.memory.digest
    assert last.report.transport == ("tcp" if hosts == 2 else "shm")
    assert await client.return_mapping("target", "", 10) == 1
    await engine.commit([await client.manifest("target", "", 0)], "v1")
    assert same_weights(fleet.layout, engine.memory.contents(), fleet.data)


async def test_nothing_is_left_on_the_device(fleet, driver):
    """When engines and relays have gone, so have their handles, mappings and buffers."""
    relay = await fleet.relay()
    memory = DeviceMemory(driver, [fleet.layout])
    await fleet.seed(relay)
    engine = await fleet.engine(relay, "target", memory=memory, descriptors_per_rank=2)
    await pull(fleet.client(relay))
    engine.close()
    await fleet.stop(relay)
    assert not +driver.live


@pytest.mark.parametrize("place", ["device", "host"])
async def test_staging_beside_an_arena_on_a_device(fleet, driver, place):
    """What differs lands in memory that was lent, wherever it lies, and all is given back."""
    relay = await fleet.relay()
    data = bytearray(fleet.data)
    data[BLOCK_BYTES // 2] ^= 1
    new = await fleet.engine(relay, "new", bytes(data))
    memory = DeviceMemory(driver, [fleet.layout], [fleet.data])
    memory.seal()
    target = await fleet.engine(relay, "target", memory=memory, descriptors_per_rank=2)
    lent = DeviceMemory(driver, [fleet.layout]) if place == "device" else LentMemory(memory.layouts)
    before = +driver.live
    assert await target.lend(lent.descriptors, len(lent.descriptors)) == Accepted()
    client = fleet.client(relay)
    *_, last = await pull(client, source_instance="new")
    assert last.report.bytes_moved == fleet.layout.block(0).nbytes
    assert await client.manifest("target", "", 0, staged=True) == new.memory.manifests[0]
    assert await client.return_mapping("target", "", 10) == 1
    assert +driver.live == before
    block = fleet.layout.block(0)
    staged = lent.contents()[: block.nbytes] if place == "device" else lent.bytes_at(0)
    assert staged == data[: block.nbytes]
    assert same_weights(fleet.layout, memory.contents(), fleet.data)
    lent.close()


async def test_a_copy_that_fails_fails_the_pull(fleet, driver):
    """A block whose copy to the device fails is never counted as landed."""
    relay = await fleet.relay()
    await fleet.seed(relay)
    memory = DeviceMemory(driver, [fleet.layout])
    await fleet.engine(relay, "target", memory=memory, descriptors_per_rank=2)
    driver.fault = DeviceError("cuStreamSynchronize failed: CUDA_ERROR_ECC_UNCORRECTABLE")
    with pytest.raises(CallFailed, match="ECC"):
        await pull(fleet.client(relay))


@pytest.mark.parametrize("count", [0, -1, 3, 1 << 40])
async def test_a_false_number_of_descriptors_is_denied(fleet, driver, count):
    """Nobody claims descriptors that did not come along."""
    relay = await fleet.relay()
    with pytest.raises(AssertionError, match="Denied"):
        await fleet.engine(relay, "target", descriptors_per_rank=count)
