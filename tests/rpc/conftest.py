"""Gives every test of this folder a fleet of relays, an engine, and one that has lost experts."""

import pytest
from engines import Service
from parcel_scene import mine
from relays import fleet

__all__ = ["fleet", "mine", "service"]


@pytest.fixture
async def service():
    """A ready engine."""
    service = Service()
    await service.start()
    yield service
    await service.stop()
