"""Settings of all tests. Being here also puts `fakes.py` on the import path."""

import gc

import pytest
from hypothesis import HealthCheck, settings
from sampling import is_left_out

LONG_FILES = ("e2e", "chaos", "device")
"""Folders whose files take longest."""

# Shared machines are slow at times; how long an example takes is not what we test.
settings.register_profile(
    "seedrelay", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("seedrelay")


@pytest.hookimpl(tryfirst=True)  # before those who leave tests out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first: where files are shared out, none is left to one worker at the end."""
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: item.path.parent.name not in LONG_FILES)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay: no later collection of garbage need look at them."""
    gc.collect()
    gc.freeze()
