"""A pull that reads from several sources at once, of which some fail."""

import asyncio

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
from hypothesis import given, settings
from hypothesis import strategies as st

from relay_service.core import lanes, pace, pool, search
from relay_service.core.lane import CORRUPTIONS_PER_SOURCE
from relay_service.core.lanes import SOURCES_AT_ONCE, WORTH_BLOCKS
from relay_service.core.match import Target
from relay_service.core.offer import OfferSlot
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions
from relay_service.core.receiver import Receiver
from relay_service.errors import (
    EpochChanged,
    LeaseEnded,
    NotYet,
    PullTimeout,
    SourceBusy,
    SourceFailed,
)

BYTES = 1000
"""Of each block; a unit has one."""
LAYOUT = lay_out_bytes([BYTES] * (4 * WORTH_BLOCKS))
BLOCKS = LAYOUT.block_count
DATA = random_bytes(LAYOUT)
OTHER_DATA = random_bytes(LAYOUT, 2)


def hurry(patch) -> None:
    """Has everybody look around often: what is under test is not how seldom."""
    patch.setattr(search, "SEARCH_SECONDS", 0.002)
    patch.setattr(lanes, "LOOK_SECONDS", 0.002)
    patch.setattr(lanes, "ASK_SECONDS", 0.01)
    patch.setattr(lanes, "ASK_SECONDS_AT_MOST", 0.01)
    patch.setattr(pool, "LOOK_SECONDS", 0.002)
    patch.setattr(pace, "SETTLE_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    hurry(monkeypatch)


class Pull:
    """One pull into one rank."""

    def __init__(self, *sources: FakeSource, **options) -> None:
        self.sources = sources
        self.arena = BytesArena(LAYOUT.data_bytes)
        self.offers = []
        self.fleet = FakeFleet(*(s.record for s in sources))
        self.puller = Puller(
            Target("target", instance().format, instance().placement),
            [Receiver(LAYOUT, self.arena)], self.fleet, [FakeTransport(*sources)],
            PullOptions(**options), offer=self.offers.append,
        )  # fmt: skip

    async def run(self):
        """Pulls to the end, within a time that no test needs, and checks what must always hold."""
        async with asyncio.timeout(20):
            report = await self.puller.run()
        assert same_weights(LAYOUT, bytes(self.arena.data), DATA)
        assert sum(step.bytes_verified for step in report.path) == LAYOUT.weight_bytes
        assert sum(step.bytes_moved for step in report.path) == self.puller.bytes_moved
        assert report.path[-1].reason == "complete"
        assert [source.leases for source in self.sources] == [0] * len(self.sources)
        return report

    @property
    def path(self) -> list[tuple[str, str]]:
        """Sources that were tried and why each was left."""
        return [(step.source_instance, step.reason) for step in self.puller.report.path]

    @property
    def reads(self) -> int:
        """Blocks that were asked of anybody."""
        return sum(len(source.reads) for source in self.sources)


def source(name: str, data=DATA) -> FakeSource:
    """Returns a good source."""
    return FakeSource(name, [LAYOUT], [data])


def two(after: int = 4) -> tuple[FakeSource, FakeSource]:
    """Returns two sources, of which the first gives a few blocks until the second is there.

    Then it gives more, slowly, until the second gives something too.
    """
    first, second = source("a"), source("b")

    async def pause() -> None:
        if len(first.reads) >= after and not second.reads:
            await eventually(lambda: second.leases or second.reads)
            await asyncio.sleep(0.005)

    first.pause = pause
    return first, second


async def test_two_at_once():
    """Both give; no block is read twice; the path tells what each gave, the larger part last."""
    first, second = two()
    pull = Pull(first, second)
    report = await pull.run()
    assert min(len(first.reads), len(second.reads)) > 0
    assert pull.reads == BLOCKS
    assert pull.puller.bytes_reread == 0
    assert sorted(pull.path) == [("a", "complete"), ("b", "complete")]
    assert report.path[-1].bytes_verified >= report.path[0].bytes_verified > 0
    assert first.limits == second.limits
    assert len(first.limits) == 1
    early, offer = pull.offers  # as soon as it is open, and with digests: both of one line
    assert (early.upstream, offer.upstream) == (("a",), ("a",))
    assert (early.manifests, offer.manifests) == ([], first.manifests)


async def test_no_more_than_so_many():
    """There is a limit to how many are read at once."""
    many = [source(f"s{n}") for n in range(SOURCES_AT_ONCE + 2)]
    most = 0

    async def pause() -> None:
        nonlocal most
        most = max(most, sum(one.leases for one in many))
        await asyncio.sleep(0.01)

    for one in many:
        one.pause = pause
    await Pull(*many).run()
    assert most == SOURCES_AT_ONCE


@pytest.mark.parametrize("dying", ["first", "second"])
@pytest.mark.parametrize(
    "error", [SourceFailed("it died"), LeaseEnded("it ended"), EpochChanged("it was updated")]
)
async def test_one_of_them_fails(dying, error):
    """What it had not given comes from the other one, on the weights that both had."""
    first, second = two()
    failing, other = (first, second) if dying == "first" else (second, first)
    failing.fails_after, failing.error = 8, error
    usual = other.pause

    async def pause() -> None:
        await usual()
        if len(other.reads) > 4:  # or it might have given all before the other one fails
            await eventually(lambda: len(failing.reads) == failing.fails_after)

    other.pause = pause
    pull = Pull(first, second)
    report = await pull.run()
    left = {s.source_instance: s.reason for s in report.path}
    assert left[failing.record.instance] == str(error)
    assert report.path[-1].source_instance == other.record.instance
    assert pull.reads == BLOCKS
    assert pull.puller.bytes_reread == 0
    leading = ["a", "b"] if dying == "first" else ["a"]
    assert [offer.source.instance for offer in pull.offers if offer.manifests] == leading


async def test_readers_stay_when_a_complete_source_takes_over():
    """Who reads from the target goes on: nobody is upstream of it that it could wait for."""
    first, second = two()
    first.fails_after, first.error = 8, SourceFailed("it died")
    pull = Pull(first, second)
    await pull.run()
    slot, epochs = OfferSlot("target"), set()
    for offer in pull.offers:
        slot.put(offer, pull.puller.receivers)
        epochs.add(offer.epoch)
    assert [offer.source.instance for offer in pull.offers] == ["a", "a", "b"]
    assert len(epochs) == 1


async def test_a_frozen_source(monkeypatch):
    """A source from which nothing comes is left while another one gives, with the reason."""
    monkeypatch.setattr(lanes, "SILENT_SECONDS", 0.05)
    first, second = source("a"), source("b")
    first.fails_after, first.stalls = 4, True
    pull = Pull(first, second)
    await pull.run()
    assert pull.reads == BLOCKS
    (name, reason), last = pull.path
    assert (name, last) == ("a", ("b", "complete"))
    assert reason.startswith("slow: nothing came for")
    assert reason.endswith("b has it too")


async def test_a_second_one_that_freezes(monkeypatch):
    """It costs the first one nothing but the time until it is left."""
    monkeypatch.setattr(lanes, "SILENT_SECONDS", 0.05)
    first, second = two()
    second.fails_after, second.stalls = 3, True
    pull = Pull(first, second)
    await pull.run()
    assert pull.reads == BLOCKS
    assert pull.path[-1] == ("a", "complete")
    assert "slow" in dict(pull.path)["b"]


async def test_a_wrong_block_comes_from_the_other_one():
    """It is asked of somebody else, and read again once."""
    first, second = two()
    second.corrupt.update(dict.fromkeys(range(BLOCKS), 1000))
    pull = Pull(first, second)
    await pull.run()
    assert "digest" in dict(pull.path)["b"] or "block" in dict(pull.path)["b"]
    assert set(first.reads) == set(range(BLOCKS))
    wrong = CORRUPTIONS_PER_SOURCE + 1
    assert len(second.reads) == wrong
    assert pull.puller.bytes_reread == wrong * BYTES


async def test_a_source_that_lacks_what_is_asked_of_it():
    """What it has not got yet comes from the other one."""
    first, second = two()
    first.fails_after, first.error = 8, NotYet("block 8 has not arrived yet")
    pull = Pull(first, second)
    await pull.run()
    assert len(first.reads) == 8
    assert pull.reads == BLOCKS


async def test_a_busy_one_is_not_waited_for():
    """Nobody who has a source waits for a seat, and who had none does not stand in the path."""
    first, busy = source("a"), source("b")
    asked = asyncio.Event()
    pull = Pull(first, busy)
    transport = pull.puller._transports[0]

    async def open_one(found, holder, *, yields=False):
        if found.instance == "b":
            assert yields
            asked.set()
            raise SourceBusy("busy", next="a")
        return await FakeTransport.open(transport, found, holder)

    transport.open = open_one

    async def pause() -> None:
        await asked.wait()

    first.pause = pause
    await pull.run()
    assert pull.path == [("a", "complete")]


def _with_other_weights():
    return source("b", OTHER_DATA).record


@pytest.mark.parametrize(
    "changes", [{"leases": 1}, {"address": "there", "state": "LOADING"}, {"weights": None}]
)
async def test_who_is_not_read_beside(changes):
    """Nobody is who has readers enough, isn't there yet, or holds other weights."""
    first, second = source("a"), source("b")
    if changes.get("weights", 1) is None:
        changes = {"weights": _with_other_weights().weights}
    if "state" in changes:
        changes = {**changes, "state": type(second.record.state)(changes["state"])}
    second.record = replace(second.record, **changes)
    pull = Pull(first, second)
    looked = 0

    async def pause() -> None:
        nonlocal looked
        looked += 1
        await asyncio.sleep(0.001)

    first.pause = pause
    await pull.run()
    assert looked == BLOCKS
    assert second.reads == []
    assert pull.path == [("a", "complete")]


@pytest.mark.parametrize("options", [{"source_instance": "a"}, {"rate_limit_bytes_per_second": 1}])
async def test_one_is_enough(options):
    """Where one is named, or the pull itself is slow, no other one is asked."""
    first, second = source("a"), source("b")
    first.pause = lambda: asyncio.sleep(0.001)
    pull = Pull(first, second, **options)
    await pull.run()
    assert second.reads == []
    assert pull.path == [("a", "complete")]


@pytest.mark.parametrize("cancel", [False, True])
async def test_the_end_of_a_pull(cancel):
    """At its deadline, or when it's cancelled, all sources are closed and every lease is back."""
    first, second = two()
    for one, after in ((first, 6), (second, 3)):
        one.fails_after, one.stalls = after, True
    pull = Pull(first, second, timeout_seconds=0 if cancel else 0.5)
    running = asyncio.create_task(pull.run())
    if cancel:
        await eventually(lambda: first.stalled.is_set() and second.stalled.is_set())
        assert (first.leases, second.leases) == (1, 1)
        running.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else PullTimeout):
        await running
    assert (first.leases, second.leases) == (0, 0)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["dies", "lies", "lacks", "good"]),
                          st.integers(0, BLOCKS)), min_size=1, max_size=4))  # fmt: skip
def test_whatever_fails(faults):
    """As long as one source is good, all lands, and no more is read again than what was wrong."""
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        asyncio.run(_survive(faults))


async def _survive(faults) -> None:
    sources = [source(f"s{n}") for n in range(len(faults))]
    for one, (fault, after) in zip(sources, faults, strict=True):
        if fault == "lies":
            one.corrupt.update(dict.fromkeys(range(after, BLOCKS), 1000))
        elif fault != "good":
            one.fails_after = after
            one.error = (SourceFailed if fault == "dies" else NotYet)("no more")
    pull = Pull(*sources, source("z"))
    await pull.run()
    liars = sum(fault == "lies" for fault, _ in faults)
    assert pull.puller.bytes_reread <= liars * (CORRUPTIONS_PER_SOURCE + 1) * BYTES
    assert pull.reads - BLOCKS == pull.puller.bytes_reread // BYTES
