"""Where a pull reads when sources are busy, and when what they have is still to come."""

import asyncio
from functools import partial

import pytest
from fakes import (
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
from relay_service.core.instance import State, Weights
from relay_service.core.lane import HOPS_PER_SECOND, NOT_YETS_PER_SOURCE
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.match import Target
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions
from relay_service.core.reading import MANIFEST_NOT_YETS
from relay_service.core.receiver import Receiver
from relay_service.errors import EpochChanged, NoSource, NotYet, SourceBusy, SourceFailed

LAYOUT = lay_out_bytes([6 * BLOCK_BYTES])
DATA = random_bytes(LAYOUT)
DUMMY = instance("other", state=State.DUMMY, weights=Weights())


@pytest.fixture(autouse=True)
def _search_fast(monkeypatch):
    """Asks for sources often: what is under test is not how seldom."""
    monkeypatch.setattr(search, "SEARCH_SECONDS", 0.005)


class BusyTransport(FakeTransport):
    """Reaches sources some of which are busy; remembers who was asked, and whether it yielded."""

    def __init__(self, *sources: FakeSource, busy: dict[str, str]) -> None:
        super().__init__(*sources)
        self.busy = busy
        self.line: tuple[str, ...] = ()
        """What a busy source says of whom it sends somebody to."""
        self.asked: list[tuple[str, bool]] = []

    async def open(self, source, holder, *, yields=False):
        """Refuses who yields where that is busy."""
        self.asked.append((source.instance, yields))
        if yields and source.instance in self.busy:
            busy = SourceBusy("busy", next=self.busy[source.instance], manifest="seed")
            raise busy.knowing(self.line, b"")
        return await super().open(source, holder)


class Scene:
    """One pull into one rank."""

    def __init__(self, *known, transport, **options) -> None:
        self.arena = BytesArena(LAYOUT.data_bytes)
        self.offers = []
        self.puller = Puller(
            Target("target", DUMMY.format, DUMMY.placement),
            [Receiver(LAYOUT, self.arena)], FakeFleet(*known), [transport],
            PullOptions(**options), offer=self.offers.append,
        )  # fmt: skip

    async def run(self) -> list[str]:
        """Pulls to the end; returns the sources that were read from."""
        report = await asyncio.wait_for(self.puller.run(), 20)
        assert same_weights(LAYOUT, bytes(self.arena.data), DATA)
        return [step.source_instance for step in report.path]


def source(name: str) -> FakeSource:
    """Returns a good source."""
    return FakeSource(name, [LAYOUT], [DATA])


class Stutter:
    """Stands for a number of blocks that is reached, and every other time is not."""

    failures = 0
    _reached = False

    def __le__(self, count: int) -> bool:
        self._reached = not self._reached
        self.failures += self._reached
        return self._reached


class Comes:
    """Stands for a number of blocks that is reached a few times, and never again."""

    def __init__(self, times: int) -> None:
        self._times = times

    def __le__(self, count: int) -> bool:
        self._times -= 1
        return self._times >= 0


async def test_a_busy_source_sends_on():
    """Whom a busy source names is read from, though the fleet knows it as a dummy only."""
    seed, other = source("seed"), source("other")
    transport = BusyTransport(seed, other, busy={"seed": "other"})
    scene = Scene(seed.record, DUMMY, transport=transport)
    assert await scene.run() == ["other"]
    assert transport.asked == [("seed", True), ("other", True)]
    assert seed.reads == []
    assert other.manifest_holders == ["seed"]
    early, offer = scene.offers
    assert (early.manifests, offer.manifests) == ([], seed.manifests)
    assert (offer.upstream, offer.filling.digest) == (("other",), seed.record.weights.digest)


async def test_what_will_come_is_offered_before_there_is_a_lease():
    """Whoever was sent on offers what it's about to read, as coming through whom it was told."""
    seed, other = source("seed"), source("other")
    transport, offered = BusyTransport(seed, other, busy={"seed": "other"}), []
    transport.line = other.upstream = ("one", "seed")
    scene = Scene(seed.record, DUMMY, transport=transport)

    async def open_one(found, holder, *, yields=False):
        offered.append([offer.upstream for offer in scene.offers])
        return await BusyTransport.open(transport, found, holder, yields=yields)

    transport.open = open_one
    assert await scene.run() == ["other"]
    assert offered == [[], [("other", "one", "seed")]]
    early, *later = scene.offers
    assert all(offer.continues(early) for offer in later)


async def test_what_was_told_of_one_is_not_said_of_another(monkeypatch):
    """Where whoever was named has failed, the line that it was part of is forgotten."""
    monkeypatch.setattr(search, "YIELD_SECONDS", 0.0)
    seed, other = source("seed"), source("other")
    other.open_error = SourceFailed("gone")
    transport = BusyTransport(seed, other, busy={"seed": "other"})
    transport.line = ("one", "seed")
    scene = Scene(seed.record, DUMMY, transport=transport)
    assert (await scene.run())[-1] == "seed"
    assert {offer.upstream for offer in scene.offers} == {("other", "one", "seed"), ("seed",)}


@pytest.mark.parametrize(("hops", "patient"), [(HOPS_PER_SECOND, True), (1, False)])
async def test_the_first_block_of_a_long_line_takes_a_while(hops, patient):
    """Whoever reads through many waits for its first block longer than for those after it."""
    late, spare = source("a"), source("spare")
    late.upstream, late.error = tuple(f"t{n}" for n in range(hops)), NotYet("not yet")
    late.fails_after = Comes(NOT_YETS_PER_SOURCE)
    scene = Scene(late.record, spare.record, transport=FakeTransport(late, spare))
    assert await scene.run() == (["a"] if patient else ["a", "spare"])


async def test_a_manifest_that_is_on_its_way():
    """It's asked for again where it has not come through others yet, and then no source is left."""
    seed, vain = source("seed"), []

    async def manifest(self, rank, holder=None):
        vain.append(rank)
        if len(vain) <= MANIFEST_NOT_YETS:
            raise NotYet("its manifest has not arrived yet")
        return seed.manifests[rank]

    transport = FakeTransport(seed)

    async def open_one(found, holder, **_):
        session = await FakeTransport.open(transport, found, holder)
        session.manifest = partial(manifest, session)
        return session

    transport.open = open_one
    assert await Scene(seed.record, transport=transport).run() == ["seed"]
    assert len(vain) == MANIFEST_NOT_YETS + 1


async def test_a_manifest_that_is_another_one():
    """Who was named to have it may hold other weights by now: then the source is asked."""
    seed, other = source("seed"), source("other")
    other.elsewhere = LAYOUT.with_digests([bytes(16)] * LAYOUT.block_count)
    scene = Scene(seed.record, DUMMY, transport=BusyTransport(seed, other, busy={"seed": "other"}))
    assert await scene.run() == ["other"]
    assert other.manifest_holders == ["seed", ""]


async def test_a_gap_is_closed():
    """Who loses its source takes its seat at the next one behind it; its own readers read on."""
    seed, other = source("seed"), source("other")
    other.upstream, other.fails_after, other.error = ("seed",), 2, SourceFailed("gone")
    transport = BusyTransport(seed, other, busy={"seed": "other"})
    scene = Scene(seed.record, DUMMY, transport=transport)
    assert await scene.run() == ["other", "seed"]
    assert transport.asked == [("seed", True), ("other", True), ("seed", False)]
    assert len(seed.reads) == LAYOUT.block_count - 2
    before, after = scene.offers[1], scene.offers[-1]
    assert after.continues(before)
    assert scene.offers[2].manifests == before.manifests


async def test_a_busy_source_is_shared_in_the_end(monkeypatch):
    """When nobody else comes, a busy source is read from all the same."""
    monkeypatch.setattr(search, "YIELD_SECONDS", 0.05)
    monkeypatch.setattr(search, "FULL_SECONDS", 0.01)
    seed = source("seed")
    transport = BusyTransport(seed, busy={"seed": "nobody"})
    assert await Scene(seed.record, transport=transport).run() == ["seed"]
    assert transport.asked[-1] == ("seed", False)
    assert len(transport.asked) > 1


@pytest.mark.parametrize("other", [replace(DUMMY, state=State.LOADING), DUMMY])
async def test_a_reader_that_cannot_pass_on(other, monkeypatch):
    """Nobody waits for a reader that passes nothing on, or for one that was not asked for."""
    monkeypatch.setattr(search, "YIELD_SECONDS", 1000.0)
    seed = source("seed")
    transport = BusyTransport(seed, source("other"), busy={"seed": "other", "other": "seed"})
    named = {} if other is not DUMMY else {"source_instance": "seed"}
    scene = Scene(seed.record, replace(other, leases=9), transport=transport, **named)
    assert await scene.run() == ["seed"]
    assert transport.asked[-1] == ("seed", False)


async def test_not_yet_too_often():
    """A source that has nothing more for a while is left for another one, and nothing is lost."""
    first, second = source("a"), source("b")
    first.fails_after, first.error = 2, NotYet("block 2 has not arrived yet")
    scene = Scene(first.record, second.record, transport=FakeTransport(first, second))
    assert await scene.run() == ["a", "b"]
    assert len(second.reads) == LAYOUT.block_count - 2


async def test_not_yet_now_and_then():
    """A source that is slow, and goes on, is kept."""
    slow = source("a")
    slow.fails_after, slow.error = Stutter(), NotYet("not yet")
    scene = Scene(slow.record, transport=FakeTransport(slow))
    assert await scene.run() == ["a"]
    assert slow.fails_after.failures > NOT_YETS_PER_SOURCE


async def test_nothing_ever_comes():
    """An incomplete source that never has anything is left in the end, with that reason."""
    empty = source("a")
    empty.open_error = NotYet("what a is filled with has not arrived yet")
    scene = Scene(empty.record, transport=FakeTransport(empty))
    with pytest.raises(NoSource, match="has not arrived yet"):
        await scene.run()
    assert len(scene.puller.report.path) == search.STRIKES


@pytest.mark.parametrize("refusals", [2, 100])
async def test_an_update_that_nobody_saw_come_to_nothing(monkeypatch, refusals):
    """A source that was about to change, and is announced as before, is asked a few times more."""
    monkeypatch.setattr(search, "EXPIRY_SECONDS", 0.02)
    seed = source("seed")
    transport, asked = FakeTransport(seed), []

    async def refuse(found, holder, **_):
        asked.append(holder)
        if len(asked) <= refusals:
            raise EpochChanged("seed is about to change to v2")
        return await FakeTransport.open(transport, found, holder)

    transport.open = refuse
    scene = Scene(seed.record, transport=transport)
    if refusals < search.STRIKES:
        assert await scene.run() == ["seed"] * 3
    else:
        with pytest.raises(EpochChanged, match="about to change"):
            await scene.run()
        assert len(asked) == search.STRIKES


async def test_an_update_that_takes_its_time(monkeypatch):
    """Who was left in an update is waited for as long as that goes on, and read from afterwards."""
    monkeypatch.setattr(search, "EXPIRY_SECONDS", 0.0)
    seed = source("seed")
    seed.fails_after, seed.error = 2, EpochChanged("seed: its weights are updated to v2")
    transport = FakeTransport(seed)
    scene = Scene(seed.record, transport=transport)
    fleet = scene.puller._search._fleet

    async def begin(found, holder, **_):
        fleet.known = [replace(seed.record, state=State.UPDATING)]
        return await FakeTransport.open(transport, found, holder)

    transport.open = begin
    pulling = asyncio.create_task(scene.run())
    await eventually(lambda: pulling.done() or fleet.asked > 5)
    assert not pulling.done()
    seed.fails_after = None
    weights = replace(seed.record.weights, epoch=2)
    fleet.known = [replace(seed.record, weights=weights)]
    assert await pulling == ["seed", "seed"]
    assert len(seed.reads) == LAYOUT.block_count
