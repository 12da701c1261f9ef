"""Soft state: what is not renewed goes away by itself."""

from fakes import FakeClock, instance

from relay_service.core.registry import EXPIRY_SECONDS, RENEW_SECONDS, Registry


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
