"""What the fleet is told of a transfer: its rate, and how long it still takes."""

import pytest
from fakes import FakeClock, transfer_state

from relay_service.core.pull_report import PathStep
from relay_service.core.transfer_state import MAX_STEPS, WINDOW_SECONDS, RateMeter, last_steps


def test_a_rate_is_of_the_last_seconds():
    """What came before the window, fast or slow, does not count any more."""
    clock, count = FakeClock(), 0
    meter = RateMeter(clock)
    for speed in (100, 10):
        for _ in range(int(2 * WINDOW_SECONDS)):
            clock.now += 0.5
            count += speed // 2
            rate = meter.rate(count)
        assert rate == pytest.approx(speed)
    clock.now += 2 * WINDOW_SECONDS
    meter.rate(count)
    clock.now += WINDOW_SECONDS
    assert meter.rate(count) == 0


def test_a_rate_before_a_second_look():
    """Asked at once nothing is known; asked seldom, it is the rate since."""
    clock = FakeClock()
    meter = RateMeter(clock)
    assert meter.rate(0) == 0
    clock.now += 40
    assert meter.rate(400) == pytest.approx(10)


def test_asked_often():
    """However often it is asked, it keeps a bounded number of samples."""
    clock = FakeClock()
    meter = RateMeter(clock)
    for number in range(10_000):
        clock.now += 0.01
        meter.rate(number)
    assert len(meter._samples) < 100


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 3.0),
        ({"bytes_per_second": 0}, None),
        ({"outcome": "complete"}, None),
        ({"bytes_verified": 4 << 20}, 0.0),
        ({"bytes_verified": 5 << 20}, 0.0),
    ],
)
def test_what_is_left(changes, seconds):
    """The rest at this rate; nothing is said where nothing comes."""
    assert transfer_state(**changes).remaining_seconds == seconds


def test_a_long_path():
    """The last sources are told, as they were when they were asked for."""
    path = [PathStep(f"s{number}", "a:1", "tcp", number, "x" * 1000) for number in range(20)]
    told = last_steps(path)
    path[-1].reason = "later"
    assert [step.source_instance for step in told] == [f"s{n}" for n in range(20 - MAX_STEPS, 20)]
    assert set(told[-1].reason) == {"x"}
    assert len(told[-1].reason) < 1000
