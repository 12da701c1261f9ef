"""Permissions to read, and their end."""

import pytest
from fakes import FakeClock

from relay_service.core.leases import LEASE_SECONDS, LINGER_SECONDS, LeaseTable
from relay_service.errors import EpochChanged, LeaseEnded


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture
def leases(clock) -> LeaseTable:
    """An empty table."""
    return LeaseTable(clock)


def test_an_unused_lease_ends_by_itself(clock, leases):
    """A lease that nobody uses ends after its time, and counts until then."""
    lease = leases.acquire("seed", "life", 1, "target")
    clock.now += LEASE_SECONDS - 0.01
    assert leases.count() == 1
    clock.now += 0.02
    assert leases.count() == 0
    with pytest.raises(LeaseEnded):
        leases.use(lease.lease)


def test_using_prolongs(clock, leases):
    """A lease that is used in time does not end."""
    lease = leases.acquire("seed", "life", 1, "target")
    for _ in range(5):
        clock.now += LEASE_SECONDS - 1
        assert leases.use(lease.lease) is lease


def test_an_expired_lease_does_not_come_back(clock, leases):
    """Using a lease too late fails, also where nobody has swept the table."""
    lease = leases.acquire("seed", "life", 1, "target")
    clock.now += LEASE_SECONDS
    with pytest.raises(LeaseEnded):
        leases.use(lease.lease)


def test_a_reader_that_broke_off(clock, leases):
    """A lease whose reader broke off ends soon, unless the reader is there again."""
    gone = leases.acquire("seed", "life", 1, "target")
    back = leases.acquire("seed", "life", 1, "other")
    for lease in (gone, back):
        leases.break_off(lease.lease)
    leases.break_off("never was")
    clock.now += LINGER_SECONDS - 1
    leases.use(back.lease)
    clock.now += 2
    assert leases.count() == 1
    leases.break_off(back.lease)
    leases.break_off(back.lease)
    clock.now += LINGER_SECONDS
    assert leases.count() == 0


def test_release_twice_is_harmless(leases):
    """A lease that is given back is over; giving it back again does nothing."""
    lease = leases.acquire("seed", "life", 1, "target")
    leases.release(lease.lease)
    leases.release(lease.lease)
    leases.release("never was")
    with pytest.raises(LeaseEnded):
        leases.use(lease.lease)


def test_a_lease_is_on_one_life(leases):
    """Leases are counted and ended by the life of an instance, not by its name alone."""
    old = leases.acquire("seed", "first life", 1, "a")
    new = leases.acquire("seed", "second life", 1, "b")
    other = leases.acquire("other", "first life", 1, "c")
    assert leases.count("seed", "first life") == 1
    leases.end_all("seed", "first life")
    assert leases.count() == 2
    with pytest.raises(LeaseEnded):
        leases.use(old.lease)
    assert leases.use(new.lease).holder == "b"
    assert leases.use(other.lease).holder == "c"


def test_leases_cannot_be_guessed(leases):
    """Every lease has a long name of its own."""
    names = {leases.acquire("seed", "life", 1, "a").lease for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) >= 24 for name in names)


def test_leases_that_end_with_their_weights(clock, leases):
    """They count no more, and whoever uses one hears why as long as it would have lasted."""
    lease = leases.acquire("seed", "life", 1, "target")
    other = leases.acquire("other", "life", 1, "target")
    leases.end_reading("seed", "life", "seed: its weights are updated to v2")
    assert (leases.count("seed", "life"), leases.holders("seed", "life")) == (0, [])
    assert leases.use(other.lease) is other
    for _ in range(2):
        with pytest.raises(EpochChanged, match="are updated to v2"):
            leases.use(lease.lease)
    again = leases.acquire("seed", "life", 2, "target")
    assert leases.holders("seed", "life") == ["target"]
    clock.now += LEASE_SECONDS - 1
    leases.use(again.lease)
    clock.now += 2
    leases.expire()
    with pytest.raises(LeaseEnded):
        leases.use(lease.lease)
    assert leases.count("seed", "life") == 1
