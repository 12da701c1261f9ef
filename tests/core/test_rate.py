"""Rates: how they are written, and how they hold."""

import asyncio

import pytest
from fakes import FakeClock

from relay_service.core import rate
from relay_service.core.rate import Limits, TokenBucket, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0), ("0", 0), ("1000000", 1_000_000), ("64MiB/s", 64 << 20), ("64 MiB/s", 64 << 20),
        ("64mib", 64 << 20), ("1.5GiB/s", 3 << 29), ("250MB/s", 250_000_000), ("3KiB", 3072),
        ("2kB/s", 2000), ("1e6", 1_000_000), (" 7B/s ", 7), ("0.5KiB/s", 512),
    ],
)  # fmt: skip
def test_rates_that_are_read(text, expected):
    """A number with a unit, in any case, is so many bytes per second."""
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "fast", "MiB/s", "64MiB/h", "64 MiB per s", "-1", "-64MiB/s", "nan", "inf", "1e40", "1..5",
        "64Mib/s/s", "0x10", "0.4", "0.0001B/s",
    ],
)  # fmt: skip
def test_rates_that_are_refused(text):
    """Anything else is refused, also what would round to no limit at all."""
    with pytest.raises(ValueError, match=r"\S"):
        parse_rate(text)


class FakeTime:
    """Stands in for the clock and the sleep of a bucket."""

    def __init__(self, monkeypatch) -> None:
        self.clock = FakeClock()
        self.slept: list[float] = []
        monkeypatch.setattr(rate.time, "monotonic", self.clock)
        monkeypatch.setattr(rate.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds


async def test_no_limit_never_waits(monkeypatch):
    """Without a limit any amount passes at once."""
    fake = FakeTime(monkeypatch)
    bucket = TokenBucket()
    for _ in range(10):
        await bucket.take(1 << 40)
    assert fake.slept == []


async def test_a_limit_spreads_the_bytes(monkeypatch):
    """What is taken under a limit takes the time that the limit says, after the first piece."""
    fake = FakeTime(monkeypatch)
    bucket = TokenBucket(1000)
    began = fake.clock.now
    for _ in range(11):
        await bucket.take(100)
    assert fake.clock.now - began == pytest.approx(1.0)
    assert max(fake.slept) == pytest.approx(0.1)


async def test_a_pause_earns_no_credit(monkeypatch):
    """After a pause the flow is as even as before: no burst makes up for it."""
    fake = FakeTime(monkeypatch)
    bucket = TokenBucket(1000)
    await bucket.take(100)
    fake.clock.now += 60
    began = fake.clock.now
    for _ in range(3):
        await bucket.take(100)
    assert fake.clock.now - began == pytest.approx(0.2)


async def test_takers_share_one_limit(monkeypatch):
    """Several takers together get what one would get, in the order in which they came."""
    clock, waits, order = FakeClock(), [], []
    monkeypatch.setattr(rate.time, "monotonic", clock)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(rate.asyncio, "sleep", sleep)
    bucket = TokenBucket(100)

    async def taker(number: int) -> None:
        await bucket.take(100)
        order.append(number)

    await asyncio.gather(*(taker(number) for number in range(3)))
    assert waits == pytest.approx([1.0, 2.0])
    assert order == [0, 1, 2]


def test_a_limited_flow_is_taken_in_small_pieces():
    """A limited reader takes block by block, an unlimited one many blocks at a time."""
    assert TokenBucket(5).batch_blocks == 1
    assert TokenBucket().batch_blocks > 8


async def test_limits_that_hold_at_once(monkeypatch):
    """What passes several limits is counted by each, and waits for the slowest at that time."""
    fake = FakeTime(monkeypatch)
    own, shared = TokenBucket(100), TokenBucket(1000)
    both = Limits(own, TokenBucket(), shared)
    assert (both.bytes_per_second, both.batch_blocks) == (100, 1)
    assert Limits(TokenBucket()).batch_blocks == TokenBucket().batch_blocks
    await both.take(100)
    assert fake.slept == []
    await both.take(100)
    assert fake.slept == [1.0]
    shared.delay(5000)  # somebody else's
    await both.take(100)
    assert fake.slept[1:] == [pytest.approx(5.0)]
    assert Limits().delay(1 << 40) == 0
