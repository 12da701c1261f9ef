"""Gives every test of this folder a fleet of relays, an engine, and one that has lost experts."""

import pytest
from chain_scene import Chain
from engines import Service
from experts import EXPERTS, LAYERS, ROUTED, SPREAD, FakeRecovery, spread
from parcel_scene import mine
from relays import fleet

from engine_service.core.expert_map import ExpertMap

__all__ = ["fleet", "mine", "service"]


@pytest.fixture
async def service():
    """A ready engine."""
    service = Service()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
def lost(service):
    """A service that has lost a group, and with it expert 3 of both layers."""
    spread(service.instance, ExpertMap(EXPERTS, dict.fromkeys(LAYERS, SPREAD[:1])))
    service.instance.membership = ROUTED
    service.instance.recovery = FakeRecovery(service.instance)
    return service


@pytest.fixture
async def chain(fleet):
    """A seed and targets that are not started yet; ends the pulls that a test left."""
    chain = Chain(fleet)
    yield chain
    await chain.end()
