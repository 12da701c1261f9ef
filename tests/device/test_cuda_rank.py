"""A rank on a device, over a driver that does nothing before somebody waits."""

import os

import pytest
import torch
from fake_cuda import GRANULARITY, FakeDriver
from fake_device import arena_on, fake_device
from oracles import make
from tiny_llama import Sequence, run, serving_rank, start_message

from engine_service.core.messages import RankConfig
from engine_service.device import devices
from engine_service.device.loading import load
from engine_service.device.models import llama_format
from engine_service.device.rank import Rank
from engine_service.errors import ArenaError, ConfigError, ProbeMismatch, WrongState
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.receiver import Receiver
from relay_service.errors import ResourceExhausted
from relay_service.memory import cuda

LAYOUT = lay_out(0, [UnitSpec("unit", (TensorSpec("x", DType.F32, (3, 1000)),))])


@pytest.fixture
def driver(monkeypatch):
    """The driver of every rank that asks for CUDA."""
    driver = FakeDriver()
    monkeypatch.setattr(devices, "_open_cuda", lambda _: fake_device(driver))
    return driver


def _serving(folder) -> Rank:
    rank = Rank(start_message(folder, device="cuda"))
    rank.load(folder, lambda _done, _total: None)
    rank.graphs.capture()
    return rank


def _land(driver, source, target):
    """Lands a rank's weights in another one's arena, as the relay does."""
    manifest = source.arena.digested()
    size = manifest.data_bytes
    reader = cuda.import_arena(driver, source.arena.descriptors, size, writable=False)
    writer = cuda.import_arena(driver, target.arena.descriptors, size, writable=True)
    writer.check_header()
    receiver = Receiver(target.arena.manifest, writer)
    receiver.expect(manifest)
    for index in receiver.missing:
        block = manifest.block(index)
        receiver.land(index, reader.view(block.offset, block.nbytes))
    assert receiver.complete
    reader.close()
    writer.close()


def test_experts_move_within_a_device(driver, tmp_path):
    """Tokens stay, and readers of the arena learn that it has changed."""
    rank = _serving(make("mixtral", tmp_path).folder)
    digests = {unit.name: unit.digests for unit in rank.arena.digested().units}

    def tokens():
        sequence = Sequence([3, 1, 4, 1, 5])
        run(rank.step, [sequence], 8)
        return sequence.output

    expected, slots = tokens(), ((3, 1, 0, 2),)
    rank.experts.stage(1, slots, {e: digests[f"layer.1.expert.{e}"] for e in slots[0]})
    rank.experts.move()
    assert tokens() == expected
    assert {unit.name: unit.digests for unit in rank.arena.digested().units} == digests
    units = [unit.name for unit in rank.arena.manifest.units if "layer.1.exp" in unit.name]
    assert units == [f"layer.1.expert.{e}" for e in slots[0]]
    size = rank.arena.manifest.data_bytes
    reader = cuda.import_arena(driver, rank.arena.descriptors, size, writable=False)
    assert reader.sequence == 2
    reader.close()


def test_an_arena_starts_as_zeros(driver):
    """Whatever was in the device's memory is gone before anybody hears of the arena."""
    arena = arena_on(driver, LAYOUT)
    assert not arena.tensors["x"].any()
    assert arena.digested() == arena_on(driver, LAYOUT).digested()


def test_tensors_are_views_of_the_allocation(driver):
    """What a relay lands is what the tensors hold, and the other way round."""
    arena = arena_on(driver, LAYOUT)
    relay = cuda.import_arena(driver, arena.descriptors, LAYOUT.data_bytes, writable=True)
    values = torch.arange(3000.0)
    relay.land(0, values.numpy().tobytes())
    assert torch.equal(arena.tensors["x"].flatten(), values)
    arena.tensors["x"].fill_(2)
    assert bytes(relay.view(4, 4)) == torch.tensor([2.0]).numpy().tobytes()
    assert arena.holds(arena.tensors["x"])
    assert arena.tensors["x"].data_ptr() == arena.address
    relay.close()


def test_a_sealed_arena_takes_no_new_writer(driver):
    """After sealing a relay may map the arena for reading only."""
    arena = arena_on(driver, LAYOUT)
    arena.seal()
    assert arena.sealed
    with pytest.raises(ResourceExhausted):
        cuda.import_arena(driver, arena.descriptors, LAYOUT.data_bytes, writable=True)
    cuda.import_arena(driver, arena.descriptors, LAYOUT.data_bytes, writable=False).close()


def test_weights_cannot_be_moved_away_from_a_relay(driver):
    """A mapping that a relay keeps cannot be cut off: there is no way but to fail."""
    with pytest.raises(ArenaError, match="did not return its mapping"):
        arena_on(driver, LAYOUT).replace_backing()


def test_a_checkpoint_lands_on_a_device_as_on_the_host(driver, tied, untied):
    """Bytes, digests and what was read are the same, whatever the arena is made of."""
    for folder in (tied, untied):
        for dtype in ("float32", "bfloat16"):
            here, there = [
                Rank(start_message(folder, dtype, device=device)) for device in ("cpu", "cuda")
            ]
            loaded = [rank.load(folder, lambda _done, _total: None) for rank in (here, there)]
            assert loaded[0] == loaded[1]
            assert there.arena.digested() == loaded[0].manifest


def test_loading_waits_for_the_last_copy(driver, tied):
    """When loading returns, every tensor holds its values."""
    rank, expected = Rank(start_message(tied, device="cuda")), serving_rank(tied)
    slices = llama_format.checkpoint_slices(rank.config)
    load(rank.arena, tied, slices, llama_format.computed_tensors(rank.config))
    for name, tensor in expected.arena.tensors.items():
        assert torch.equal(rank.arena.tensors[name], tensor), name


def test_a_seed_on_a_device_fills_a_target_on_one(driver, tied):
    """Landing, commit and probe make a target whose tokens are a CPU rank's; nothing moves."""
    seed, target = _serving(tied), Rank(start_message(tied, device="cuda"))
    target.graphs.capture()
    addresses = {name: tensor.data_ptr() for name, tensor in target.arena.tensors.items()}
    with pytest.raises(WrongState):
        target.step((Sequence([1]).row(),))
    _land(driver, seed, target)
    target.arena.seal()
    target.check_probe(seed.record_probe().probe)
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.arena.tensors.items()}
    expected = [Sequence([3]), Sequence(range(20), first_block=8)]
    found = [Sequence([3]), Sequence(range(20), first_block=8)]
    run(serving_rank(tied, capture=True).runner.step, expected, 12)
    run(target.step, found, 12)
    assert [s.output for s in found] == [s.output for s in expected]


def test_a_seed_whose_graphs_compute_otherwise_does_not_serve(driver, tied, monkeypatch):
    """Graphs that capture could not prove are proven when the probe is recorded."""
    rank = _serving(tied)
    replay = rank.graphs.replay
    monkeypatch.setattr(rank.graphs, "replay", lambda batch: replay(batch) * 1.5)
    with pytest.raises(ProbeMismatch, match="replayed"):
        rank.record_probe()


def test_a_rank_says_where_its_arena_lies(driver, tied):
    """What the front is told names the device and the number of descriptors."""
    told = Rank(start_message(tied, device="cuda")).allocated()
    assert (told.page_kind, told.descriptors) == ("cuda:0", 2)


def test_a_device_without_memory_says_so(driver):
    """An arena that the device cannot hold is refused in words."""
    driver.memory_bytes = GRANULARITY - 1
    with pytest.raises(ResourceExhausted, match="OUT_OF_MEMORY"):
        arena_on(driver, LAYOUT)


@pytest.mark.parametrize("device", ["tpu", "cuda:0", ""])
def test_an_unknown_device_is_refused(tied, device):
    """A device that isn't one of the known ones is named, with those that are."""
    with pytest.raises(ConfigError, match="is not supported"):
        Rank(start_message(tied, device=device))


def test_a_rank_without_its_device_is_refused(monkeypatch, tied):
    """A rank that finds no device says what it needs and what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"rank 0 needs CUDA device 0; torch .* finds 0"
    ) as caught:
        Rank(start_message(tied, device="cuda"))
    assert "--device cpu" in caught.value.details["hint"]


def test_every_rank_has_a_device_of_its_own(monkeypatch):
    """With fewer devices than ranks the rank that has none is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = RankConfig(
        rank=1, world_size=2, generation="tests", dtype="float32", device="cuda", threads=1,
        kv_block_tokens=8, kv_blocks=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="rank 1 needs CUDA device 1"):
        devices.open_device(settings)


def test_descriptors_are_real(driver):
    """Both descriptors of an arena can be handed to another process."""
    for fd in arena_on(driver, LAYOUT).descriptors:
        os.close(os.dup(fd))
