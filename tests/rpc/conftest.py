"""Gives every test of this folder a fleet of relays, and an engine."""

import pytest
from chain_scene import Chain
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


@pytest.fixture
async def chain(fleet):
    """A seed and targets that are not started yet; ends the pulls that a test left."""
    chain = Chain(fleet)
    yield chain
    await chain.end()
