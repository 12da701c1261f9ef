"""Filling a target from sources that come, go and misbehave."""

import asyncio

import pytest
from fakes import (
    PROBE,
    BytesArena,
    FakeFleet,
    FakeSource,
    FakeTransport,
    eventually,
    instance,
    lay_out_bytes,
    random_bytes,
    replace,
    same_weights,
)

from relay_service.core import search
from relay_service.core.format import Format, Placement
from relay_service.core.instance import State, Weights
from relay_service.core.lane import CORRUPTIONS_PER_SOURCE
from relay_service.core.manifest import BLOCK_BYTES, Manifest, weights_digest
from relay_service.core.match import Target
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions
from relay_service.core.receiver import Receiver
from relay_service.errors import (
    Ambiguous,
    ConfigError,
    CorruptBlock,
    EpochChanged,
    FormatMismatch,
    LeaseEnded,
    ManifestError,
    NoSource,
    PullTimeout,
    RelayError,
    SourceFailed,
)

LAYOUTS = [lay_out_bytes([BLOCK_BYTES + 5, 100, 3 * BLOCK_BYTES], rank) for rank in range(2)]
DATA = [random_bytes(layout, rank) for rank, layout in enumerate(LAYOUTS)]
OTHER_DATA = [random_bytes(layout, 100 + rank) for rank, layout in enumerate(LAYOUTS)]
BLOCKS = sum(layout.block_count for layout in LAYOUTS)
TARGET = Target("target", instance().format, Placement(2))


@pytest.fixture(autouse=True)
def _search_fast(monkeypatch):
    """Asks for sources often: what is under test is not how seldom."""
    monkeypatch.setattr(search, "SEARCH_SECONDS", 0.005)


def source(name: str, data=None, layouts=LAYOUTS) -> FakeSource:
    """Returns a good source."""
    return FakeSource(name, layouts, data or DATA)


class Pull:
    """One pull into two ranks of bytes."""

    def __init__(self, *sources: FakeSource, known=None, transports=None, **options) -> None:
        self.arenas = [BytesArena(layout.data_bytes) for layout in LAYOUTS]
        self.fleet = FakeFleet(*([s.record for s in sources] if known is None else known))
        self.puller = Puller(
            TARGET,
            [Receiver(m, arena) for m, arena in zip(LAYOUTS, self.arenas, strict=True)],
            self.fleet,
            transports or [FakeTransport(*sources)],
            PullOptions(**options),
        )

    async def run(self):
        """Pulls, within a time that no test needs."""
        return await asyncio.wait_for(self.puller.run(), 20)

    @property
    def path(self) -> list[tuple[str, str]]:
        """Sources that were tried and why each was left."""
        return [(step.source_instance, step.reason) for step in self.puller.report.path]

    def assert_filled(self, data=None) -> None:
        """Checks that every rank holds the weights."""
        for layout, arena, expected in zip(LAYOUTS, self.arenas, data or DATA, strict=True):
            assert same_weights(layout, bytes(arena.data), expected)
        assert all(receiver.complete for receiver in self.puller.receivers)


async def test_a_good_source():
    """One good source fills every rank, once through, and gives version, digest and probe."""
    seed = source("seed")
    filling = Pull(seed)
    report = await filling.run()
    filling.assert_filled()
    assert filling.path == [("seed", "complete")]
    assert (report.weight_version, report.probe, report.phase) == ("v1", PROBE, "done")
    assert report.weights_digest == weights_digest(seed.manifests)
    assert len(seed.reads) == BLOCKS
    assert report.path[0].bytes_verified == sum(layout.weight_bytes for layout in LAYOUTS)
    assert seed.leases == 0


async def test_failing_over_keeps_verified_blocks():
    """When a source dies the next one is asked only for what is missing."""
    first, second = source("a"), source("b")
    first.fails_after, first.error = 3, SourceFailed("it died")
    filling = Pull(first, second)
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("a", "it died"), ("b", "complete")]
    assert len(second.reads) == BLOCKS - 3
    assert all(set(arena.passes.values()) == {1} for arena in filling.arenas)
    assert (first.leases, second.leases) == (0, 0)
    steps = filling.puller.report.path
    assert steps[0].bytes_verified + steps[1].bytes_verified == sum(m.weight_bytes for m in LAYOUTS)


@pytest.mark.parametrize("error", [SourceFailed("cut off"), LeaseEnded("the lease has ended")])
async def test_a_source_that_breaks_off(error):
    """A source that gave something is asked again for the rest when there is no other one."""
    seed = source("seed")
    seed.fails_after, seed.error = 3, error
    filling = Pull(seed)
    transport = filling.puller._transports[0]

    async def open_again(found, holder, **_):
        session = await FakeTransport.open(transport, found, holder)
        if seed.reads:
            seed.fails_after = None
        return session

    transport.open = open_again
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("seed", str(error)), ("seed", "complete")]
    assert len(seed.reads) == BLOCKS
    assert seed.leases == 0


async def test_another_source_comes_before_one_that_broke_off():
    """One that was not asked yet is preferred; all of them are asked before a pull gives up."""
    first, second = source("a"), source("b")
    for failing, after in ((first, 2), (second, 3)):
        failing.fails_after, failing.error = after, SourceFailed("cut off")
    filling = Pull(first, second)
    with pytest.raises(NoSource):
        await filling.run()
    assert [name for name, _ in filling.path] == ["a", "b", "a", "b"]
    assert len(first.reads) + len(second.reads) == 5


async def test_a_fleet_that_is_not_heard():
    """Whoever did not answer when sources were looked for is part of the story."""
    filling = Pull(known=[], timeout_seconds=0.05)
    filling.fleet.missing = "directory x:1 does not answer"
    with pytest.raises(PullTimeout, match="waiting for a source; directory x:1 does not answer"):
        await filling.run()


async def test_what_was_there_is_not_the_sources_gift():
    """A step of the path counts what its source delivered, not what was verified before."""
    seed = source("seed")
    filling = Pull(seed)
    first, second = filling.puller.receivers
    for index in range(2):
        first.expect(seed.manifests[0])
        block = LAYOUTS[0].block(index)
        first.land(index, memoryview(DATA[0])[block.offset : block.offset + block.nbytes])
    before = first.bytes_moved
    report = await filling.run()
    assert report.blocks_reused == 2
    assert report.path[0].bytes_verified == first.bytes_moved + second.bytes_moved - before


@pytest.mark.parametrize("error", [SourceFailed("gone"), NoSource("gone"), OSError("gone")])
async def test_a_source_that_cannot_be_opened(error):
    """A source that refuses the lease, or is gone, is left for the next one."""
    first = source("a")
    first.open_error = error
    filling = Pull(first, source("b"))
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("a", "gone"), ("b", "complete")]


async def test_a_corrupt_block_is_read_again():
    """A block that arrives corrupt once or twice is read again from the same source."""
    seed = source("seed")
    seed.corrupt[1] = CORRUPTIONS_PER_SOURCE
    filling = Pull(seed)
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("seed", "complete")]
    assert "block 1" in filling.puller.report.note
    assert sum(r.bytes_reread for r in filling.puller.receivers) > 0


async def test_a_source_of_wrong_bytes_is_left():
    """A source that keeps sending wrong bytes is left, by name of the block; another one helps."""
    bad, good = source("a"), source("b")
    bad.corrupt[2] = 1000
    filling = Pull(bad, good)
    await filling.run()
    filling.assert_filled()
    (name, reason), last = filling.path
    assert name == "a"
    assert "tensor w.1, block 2" in reason
    assert last == ("b", "complete")


async def test_only_wrong_bytes():
    """When the last source is left for wrong bytes, that is the error, and nothing is complete."""
    bad = source("bad")
    bad.corrupt[2] = 1000
    filling = Pull(bad)
    with pytest.raises(CorruptBlock, match="block 2"):
        await filling.run()
    assert not any(receiver.complete for receiver in filling.puller.receivers)


async def test_only_misfits():
    """With complete holders of which none fits, the pull is refused before a byte moves."""
    other = Format((("kernel_format", "1"), ("dtype", "float32"), ("config.hidden_size", "64")))
    misfit = instance("seed", format=other)
    filling = Pull(known=[misfit, instance("dummy", state=State.DUMMY)])
    with pytest.raises(FormatMismatch, match="seed does not fit: dtype") as refused:
        await filling.run()
    assert refused.value.details["field"] == "dtype"
    assert not any(arena.passes for arena in filling.arenas)
    assert filling.path == []


async def test_a_fitting_name_with_another_layout():
    """A source whose tensors lie otherwise is refused by the tensor's name; no byte moves."""
    elsewhere = [lay_out_bytes([BLOCK_BYTES + 5, 101, 3 * BLOCK_BYTES], r) for r in range(2)]
    seed = source("seed", [random_bytes(layout) for layout in elsewhere], elsewhere)
    filling = Pull(seed)
    with pytest.raises(FormatMismatch, match=r"w\.1: shape \(101,\) and \(100,\)"):
        await filling.run()
    assert seed.reads == []
    assert seed.leases == 0


async def test_waiting_for_a_source_that_comes_later():
    """A pull that finds only unready instances waits until one of them serves."""
    seed = source("seed")
    filling = Pull(seed, known=[replace(seed.record, state=State.LOADING, weights=Weights())])
    running = asyncio.create_task(filling.run())
    await eventually(lambda: filling.fleet.asked > 2)
    assert filling.puller.report.note == "waiting for a source: seed is LOADING"
    assert not running.done()
    filling.fleet.known = [seed.record]
    await running
    filling.assert_filled()


async def test_the_named_source_only():
    """A pull from a named source takes no other, however well it fits."""
    wanted, other = source("wanted"), source("a")
    filling = Pull(wanted, other, source_instance="wanted")
    await filling.run()
    filling.assert_filled()
    assert other.reads == []
    assert filling.path == [("wanted", "complete")]


async def test_a_model_and_its_fine_tune():
    """Of several models that fit none is chosen; the error lists them, naming one is enough."""
    base, tuned = source("a"), source("b", OTHER_DATA)
    base.record = replace(base.record, model="base")
    tuned.record = replace(tuned.record, model="tuned")
    filling = Pull(base, tuned)
    with pytest.raises(Ambiguous, match="several models fit: base, tuned"):
        await filling.run()
    assert base.reads == tuned.reads == []
    named = Pull(base, tuned, source_instance="tuned")
    report = await named.run()
    named.assert_filled(OTHER_DATA)
    assert report.model == "tuned"


async def test_the_named_source_fails():
    """When the named source fails, the pull fails, whoever else is there."""
    wanted, other = source("wanted"), source("a")
    wanted.fails_after, wanted.error = 1, SourceFailed("it died")
    filling = Pull(wanted, other, source_instance="wanted")
    with pytest.raises(NoSource, match="it died"):
        await filling.run()
    assert other.reads == []


async def test_no_source_is_left():
    """When every source has failed, the error tells the whole path."""
    first, second = source("a"), source("b")
    for failing, words in ((first, "it died"), (second, "it hung")):
        failing.fails_after, failing.error = 0, SourceFailed(words)
    filling = Pull(first, second)
    with pytest.raises(NoSource, match=r"a \(fake\): it died; b \(fake\): it hung"):
        await filling.run()


async def test_sources_that_leave_the_fleet():
    """A source that fails and then disappears leaves a pull without hope, not a waiting one."""
    seed = source("seed")
    seed.fails_after, seed.error = 2, SourceFailed("it died")
    filling = Pull(seed)
    transport_open = FakeTransport.open

    async def open_and_forget(transport, found, holder, **_):
        filling.fleet.known = []
        return await transport_open(transport, found, holder)

    filling.puller._transports[0].open = open_and_forget.__get__(filling.puller._transports[0])
    with pytest.raises(NoSource, match="it died"):
        await filling.run()


async def test_a_source_that_was_started_anew():
    """An instance that failed in one life is tried again in its next one."""
    seed = source("seed")
    seed.fails_after, seed.error = 2, SourceFailed("it died")
    again = source("seed")
    again.record = replace(again.record, generation="next life")
    filling = Pull(seed, known=[seed.record, again.record])
    transport = filling.puller._transports[0]

    async def open_life(found, holder, **_):
        transport.sources["seed"] = seed if found.generation == seed.record.generation else again
        return await FakeTransport.open(transport, found, holder)

    transport.open = open_life
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("seed", "it died"), ("seed", "complete")]


@pytest.mark.parametrize("transport", ["", "auto"])
async def test_the_first_usable_transport(transport):
    """Transports are probed in order, and the first one that works is taken."""
    seed = source("seed")
    transports = [FakeTransport(name="one", unusable="not here"), FakeTransport(seed, name="two")]
    filling = Pull(seed, transports=transports, transport=transport)
    report = await filling.run()
    assert report.path[0].transport == "two"


async def test_no_usable_transport():
    """Without any way to a source the pull says of each way why it can't be used."""
    transports = [FakeTransport(name=n, unusable=f"no {n} here") for n in ("one", "two")]
    filling = Pull(source("seed"), transports=transports)
    with pytest.raises(NoSource, match="one: no one here; two: no two here"):
        await filling.run()


async def test_an_unknown_transport():
    """A transport that does not exist is refused with the list of those that do."""
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'") as refused:
        Pull(source("seed"), transport="pigeon")
    assert refused.value.details["expected"] == "fake"


async def test_a_timeout_names_the_path():
    """A pull that is not over in time says which sources it tried and which it was at."""
    first, second = source("a"), source("b")
    first.fails_after, first.error = 1, SourceFailed("it died")
    second.fails_after, second.stalls = 2, True
    filling = Pull(first, second, timeout_seconds=0.2)
    with pytest.raises(PullTimeout, match=r"a \(fake\): it died; b \(fake\): not done") as over:
        await filling.run()
    assert "it died" in over.value.details["path"]
    assert second.leases == 0


async def test_a_timeout_without_any_source():
    """A pull that finds nobody in time says so."""
    filling = Pull(timeout_seconds=0.05, source_instance="ghost", known=[])
    with pytest.raises(PullTimeout, match="waiting for ghost"):
        await filling.run()


async def test_cancelling_gives_the_lease_back():
    """A pull that is cancelled holds no lease any more."""
    seed = source("seed")
    seed.fails_after, seed.stalls = 1, True
    filling = Pull(seed)
    running = asyncio.create_task(filling.run())
    await seed.stalled.wait()
    assert seed.leases == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seed.leases == 0


async def test_a_source_that_is_updated():
    """A source that is updated while it is read is read again with its new weights, not mixed."""
    seed, later = source("seed"), source("seed", OTHER_DATA)
    later.record = replace(
        later.record, weights=replace(later.record.weights, version="v2", epoch=2)
    )
    seed.fails_after, seed.error = 4, EpochChanged("seed is at epoch 2")
    filling = Pull(seed)
    transport = filling.puller._transports[0]
    running = asyncio.create_task(filling.run())
    await eventually(lambda: filling.puller.report.path and filling.puller.report.path[-1].reason)
    asked = filling.fleet.asked
    filling.fleet.known = [replace(seed.record, state=State.UPDATING)]
    await eventually(lambda: filling.fleet.asked > asked + 2)
    assert not running.done()
    transport.sources["seed"] = later
    filling.fleet.known = [later.record]
    report = await running
    filling.assert_filled(OTHER_DATA)
    assert report.weight_version == "v2"
    assert report.weights_digest == weights_digest(later.manifests)
    assert filling.path == [("seed", "seed is at epoch 2"), ("seed", "complete")]


async def test_an_update_of_the_source_that_comes_to_nothing():
    """A source that is back with the weights that it had is asked for the rest of them."""
    seed = source("seed")
    filling = Pull(seed)
    seed.open_error = EpochChanged("seed is being updated")
    running = asyncio.create_task(filling.run())
    await eventually(lambda: filling.puller.report.path and filling.puller.report.path[-1].reason)
    asked = filling.fleet.asked
    filling.fleet.known = [replace(seed.record, state=State.UPDATING)]
    await eventually(lambda: filling.fleet.asked > asked + 2)
    seed.open_error = None
    filling.fleet.known = [seed.record]
    await running
    filling.assert_filled()
    assert filling.path == [("seed", "seed is being updated"), ("seed", "complete")]


async def test_a_source_that_only_claims_to_be_updated(monkeypatch):
    """A source of which no news comes is left in the end, with that reason."""
    monkeypatch.setattr(search, "EXPIRY_SECONDS", 0.05)
    seed = source("seed")
    seed.fails_after, seed.error = 4, EpochChanged("seed is at epoch 2")
    filling = Pull(seed)
    with pytest.raises(EpochChanged, match="seed is at epoch 2"):
        await filling.run()


def _overlapping(manifest: Manifest) -> Manifest:
    units = [replace(unit, offset=0) for unit in manifest.units]
    return Manifest(manifest.rank, manifest.data_bytes, tuple(units))


def _huge(manifest: Manifest) -> Manifest:
    return Manifest(manifest.rank, 1 << 60, manifest.units)


def _short_digests(manifest: Manifest) -> Manifest:
    units = [replace(unit, digests=unit.digests[1:]) for unit in manifest.units]
    return Manifest(manifest.rank, manifest.data_bytes, tuple(units))


@pytest.mark.parametrize("twist", [_overlapping, _huge, _short_digests])
async def test_a_hostile_manifest(twist):
    """A source whose manifest contradicts itself is left before it is read."""
    bad, good = source("a"), source("b")
    bad.manifests = [twist(manifest) for manifest in bad.manifests]
    filling = Pull(bad, good)
    await filling.run()
    filling.assert_filled()
    assert bad.reads == []
    alone = Pull(bad)
    with pytest.raises((ManifestError, NoSource)):
        await alone.run()


@pytest.mark.parametrize(
    "twist",
    [
        lambda manifest: manifest.without_digests(),
        lambda manifest: manifest.with_digests([bytes(16)] * manifest.block_count),
    ],
)
async def test_a_manifest_of_other_weights(twist):
    """A manifest that does not carry the announced digest is refused before a byte moves."""
    liar = source("liar")
    liar.manifests = [twist(manifest) for manifest in liar.manifests]
    filling = Pull(liar)
    with pytest.raises(RelayError, match="its manifest is not of"):
        await filling.run()
    assert liar.reads == []


async def test_resuming_counts_what_was_there():
    """A second pull keeps the first one's blocks, says how many, and reads only the rest."""
    first = source("a")
    first.fails_after, first.error = 5, SourceFailed("it died")
    filling = Pull(first)
    with pytest.raises(NoSource):
        await filling.run()
    second = source("b")
    again = Pull(second)
    again.puller.receivers[:] = [
        Receiver(layout, arena, receiver.verified)
        for layout, arena, receiver in zip(
            LAYOUTS, filling.arenas, filling.puller.receivers, strict=True
        )
    ]
    again.arenas = filling.arenas
    report = await again.run()
    again.assert_filled()
    assert report.blocks_reused == 5
    assert len(second.reads) == BLOCKS - 5


@pytest.mark.parametrize("unknown", [True, False])
async def test_an_arena_that_another_relay_has_begun_to_fill(unknown):
    """What lies there and matches is not read; an arena that is known is not looked at."""
    seed = source("seed")
    filling = Pull(seed)
    for arena, data in zip(filling.arenas, DATA, strict=True):
        arena.data[:] = data
    filling.arenas[1].data[LAYOUTS[1].block(2).offset] ^= 1
    for receiver in filling.puller.receivers:
        receiver.unknown = unknown
    report = await filling.run()
    filling.assert_filled()
    assert report.blocks_reused == (BLOCKS - 1 if unknown else 0)
    assert seed.reads == [2] if unknown else len(seed.reads) == BLOCKS
