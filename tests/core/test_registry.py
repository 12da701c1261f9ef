"""Soft state: what is not renewed goes away by itself."""

import pytest
from fakes import FakeClock, instance, transfer_state

from relay_service.core.registry import (
    EXPIRY_SECONDS,
    MAX_TRANSFERS_PER_RELAY,
    RENEW_SECONDS,
    Registry,
)
from relay_service.errors import Conflict


def names(registry: Registry) -> list[str]:
    """Returns the names of all known instances."""
    return [known.instance for known in registry.instances()]


def test_a_crashed_relay_disappears_within_the_stated_time():
    """What is not renewed is listed up to the expiry and not after it."""
    clock = FakeClock()
    registry = Registry(clock)
    registry.announce("a:1", "life", [instance("one")])
    clock.now += EXPIRY_SECONDS - 0.01
    assert names(registry) == ["one"]
    clock.now += 0.02
    assert names(registry) == []


def test_renewing_keeps():
    """A relay that renews stays listed for ever."""
    clock = FakeClock()
    registry = Registry(clock)
    for _ in range(20):
        registry.announce("a:1", "life", [instance("one")])
        clock.now += RENEW_SECONDS
    assert names(registry) == ["one"]


def test_an_announcement_replaces_the_one_before():
    """An instance that a relay leaves out has left; other relays' instances stay."""
    registry = Registry(FakeClock())
    registry.announce("a:1", "life", [instance("one"), instance("two")])
    registry.announce("b:1", "life", [instance("three")])
    registry.announce("a:1", "life", [instance("two", leases=4)])
    assert names(registry) == ["two", "three"]
    assert registry.instances()[0].leases == 4


def test_goodbye():
    """An empty announcement takes a relay off the list at once; twice is harmless."""
    registry = Registry(FakeClock())
    registry.announce("a:1", "life", [instance("one")])
    registry.announce("a:1", "life", [])
    registry.announce("a:1", "life", [])
    assert names(registry) == []


def test_a_restarted_registry_is_whole_after_one_interval():
    """A registry without memory knows everyone again after one round of announcements."""
    fleet = {"a:1": [instance("one")], "b:1": [instance("two")]}
    registries = [Registry(FakeClock()), Registry(FakeClock())]
    for registry in registries:
        for address, instances in fleet.items():
            registry.announce(address, "life", instances)
    assert names(registries[0]) == names(registries[1]) == ["one", "two"]


def test_an_announcement_that_overtook_the_one_before():
    """Within one life of a relay only a later announcement counts, whichever comes last."""
    registry = Registry(FakeClock())
    registry.announce("a:1", "life", [instance("two")], order=(5, 2))
    registry.announce("a:1", "life", [instance("one")], order=(5, 1))
    assert names(registry) == ["two"]
    registry.announce("a:1", "life", [instance("three")], order=(5, 3))
    assert names(registry) == ["three"]


def test_the_former_life_of_a_relay_comes_late():
    """What a relay announced before it was started anew is refused, and so is its goodbye."""
    registry = Registry(FakeClock())
    registry.announce("a:1", "former", [instance("one", generation="former")], order=(5, 9))
    registry.announce("a:1", "present", [instance("one", generation="present")], order=(6, 1))
    for instances in ([instance("one", generation="former")], []):
        with pytest.raises(Conflict, match="started later announces a:1"):
            registry.announce("a:1", "former", instances, order=(5, 10))
    assert [known.generation for known in registry.instances()] == ["present"]


def test_nothing_comes_back_after_a_goodbye():
    """What was under way when a relay said goodbye does not list it again; a new life does."""
    registry = Registry(FakeClock())
    registry.announce("a:1", "life", [instance("one")], order=(5, 1))
    registry.announce("a:1", "life", [], order=(5, 3))
    registry.announce("a:1", "life", [instance("one")], order=(5, 2))
    assert names(registry) == []
    registry.announce("a:1", "next", [instance("two")], order=(6, 1))
    assert names(registry) == ["two"]


def test_a_clock_that_was_set_back():
    """A life that seems to be older is heard once the former one has expired."""
    clock = FakeClock()
    registry = Registry(clock)
    registry.announce("a:1", "former", [instance("one")], order=(5, 1))
    with pytest.raises(Conflict):
        registry.announce("a:1", "present", [instance("two")], order=(4, 1))
    clock.now += EXPIRY_SECONDS + 0.01
    registry.announce("a:1", "present", [instance("two")], order=(4, 2))
    assert names(registry) == ["two"]


def test_transfers_leave_with_their_relay():
    """Transfers are listed as long as the relay that announced them renews, and so many at most."""
    clock = FakeClock()
    registry = Registry(clock)
    many = [transfer_state(f"t{number}") for number in range(MAX_TRANSFERS_PER_RELAY + 1)]
    registry.announce("a:1", "life", [instance("one")], many)
    registry.announce("b:1", "life", [instance("two")], [transfer_state("other")])
    assert [t.transfer for t in registry.transfers()] == [t.transfer for t in many[:-1]] + ["other"]
    registry.announce("a:1", "life", [instance("one")], [])
    assert [t.transfer for t in registry.transfers()] == ["other"]
    clock.now += EXPIRY_SECONDS + 0.01
    assert registry.transfers() == []
