"""Gives every test of this folder a fleet of relays, and an engine."""

import pytest
from engines import Service
from relays import fleet

__all__ = ["fleet", "service"]


@pytest.fixture
async def service():
    """A ready engine."""
    service = Service()
    await service.start()
    yield service
    await service.stop()
