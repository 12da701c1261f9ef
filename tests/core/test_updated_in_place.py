"""What a relay makes of an instance whose weights change while it is attached and read."""

import os

import pytest
from fakes import (
    attach_message,
    lay_out_bytes,
    random_bytes,
    replace,
    resources,
    same_weights,
    verified,
)
from test_holding import DATA, LAYOUT, Host, _exchanged, read

from relay_service.core.attachment import Update
from relay_service.core.holding import Holding
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest
from relay_service.core.record import record
from relay_service.errors import EpochChanged, InvalidRequest, NotFound, Refused
from relay_service.memory.mapping import map_arena

NEW_DATA = random_bytes(LAYOUT, 2)
NEW = verified(LAYOUT, NEW_DATA)
NEW_WEIGHTS = Weights("v2", weights_digest([NEW]), 2)
COMMITTED = Update(state=State.READY, weights=NEW_WEIGHTS, manifests=(NEW,), probe=b"new probe")


class Updated(Host):
    """A host on which one instance serves, and how it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.arenas = self.memory(DATA)
        self.seed = self.hold("seed", self.arenas)

    def say(self, **fields) -> None:
        """Has the relay hear of a change, of state or label only unless more is given."""
        self.seed.apply(Update(**{"weights": self.seed.weights} | fields))

    def write(self) -> None:
        """Copies the new weights into the arena, as ranks do between two steps."""
        (arena,) = self.arenas.arenas
        arena.sequence += 1
        self.arenas.fill([NEW_DATA])
        arena.sequence += 1


@pytest.fixture
def host():
    """A host with a serving instance; what it opens and maps is gone at the end."""
    before = resources()
    host = Updated()
    yield host
    host.close()
    assert before.are_back()


@pytest.mark.parametrize("state", [State.READY, State.PAUSED])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_commit(host, state, is_told):
    """Other weights of the same layout serve at the next epoch, and nobody reads them before."""
    if is_told:
        host.say(state=State.UPDATING)
    assert same_weights(LAYOUT, read(host.seed), DATA)
    host.write()
    for epoch in (1, 2):
        with pytest.raises(EpochChanged):
            read(host.seed, epoch)
    seen = record(host.seed, "", 0)
    assert (seen.ranks[0].have_blocks, seen.ranks[0].digest) == (0, "")
    host.seed.apply(replace(COMMITTED, state=state))
    with pytest.raises(EpochChanged, match="is at epoch 2, not 1"):
        read(host.seed)
    assert same_weights(LAYOUT, read(host.seed, 2), NEW_DATA)
    seen = record(host.seed, "", 0)
    assert (seen.state, seen.weights, seen.ranks[0].digest) == (
        state, NEW_WEIGHTS, NEW.digest,
    )  # fmt: skip
    assert seen.ranks[0].have_blocks == LAYOUT.block_count
    assert (host.seed.probe, host.seed.manifest(0)) == (b"new probe", NEW)
    host.holdings.acquire("seed", "", 2, NEW_WEIGHTS.digest, "target")


def test_an_update_that_comes_to_nothing(host):
    """Who reads goes on while an update prepares, no new reader begins, and all is as before."""
    lease = host.holdings.acquire("seed", "", 1, host.seed.weights.digest, "early")
    host.say(state=State.UPDATING)
    seen = record(host.seed, "", 0)
    assert seen.ranks[0].have_blocks == LAYOUT.block_count
    assert not seen.state.holds_weights
    with pytest.raises(EpochChanged, match="seed is being updated"):
        host.holdings.acquire("seed", "", 1, host.seed.weights.digest, "late")
    assert same_weights(LAYOUT, read(host.seed), DATA)
    host.say(state=State.PAUSED)
    assert same_weights(LAYOUT, read(host.seed), DATA)
    assert host.holdings.leased(lease.lease)[1] is host.seed
    host.holdings.acquire("seed", "", 1, host.seed.weights.digest, "late")


def test_another_label(host):
    """What the weights are called changes at the same epoch, and under who reads them."""
    with host.seed.reading(0, 1) as arena:
        host.say(state=State.READY, weights=replace(host.seed.weights, version="v1-final"))
        assert same_weights(LAYOUT, bytes(arena.view(0, LAYOUT.data_bytes)), DATA)
    assert same_weights(LAYOUT, read(host.seed), DATA)
    assert record(host.seed, "", 0).weights.version == "v1-final"
    host.holdings.acquire("seed", "", 1, host.seed.weights.digest, "target")


@pytest.mark.parametrize("state", [State.READY, State.UPDATING])
def test_other_weights_of_the_same_epoch(host, state):
    """They are refused: who reads would not be told of them."""
    host.say(state=state)
    with pytest.raises(Refused, match="other weights are called epoch 1 as well"):
        host.seed.apply(replace(COMMITTED, weights=replace(NEW_WEIGHTS, epoch=1)))
    assert host.seed.manifest(0) != NEW


def test_a_commit_that_moves_units(host):
    """After `UPDATING` as after `READY` units of equal extents may have changed places."""
    layout = lay_out_bytes([100, 100, 200])
    experts = host.hold("experts", host.memory(random_bytes(layout), layouts=(layout,)))
    moved = _exchanged(experts.manifest(0), 0, 1)
    weights = Weights("v2", weights_digest([moved]), 2)
    experts.apply(Update(state=State.UPDATING, weights=experts.weights))
    experts.apply(replace(COMMITTED, weights=weights, manifests=(moved,)))
    assert experts.manifest(0) == moved


def test_manifests_of_one_epoch(host):
    """Who holds a lease on weights that are gone never gets the manifest of those that came."""
    assert host.seed.manifest(0, epoch=1) == host.arenas.manifests[0]
    host.write()
    host.seed.apply(COMMITTED)
    with pytest.raises(EpochChanged, match="is at epoch 2, not 1"):
        host.seed.manifest(0, epoch=1)
    assert host.seed.manifest(0, epoch=2) == host.seed.manifest(0) == NEW


def test_a_relay_that_comes_in_the_middle(host):
    """Attached while a commit is applied it lends nothing, and then what the engine says."""
    (arena,) = host.arenas.arenas
    arena.sequence += 1
    descriptors = [os.dup(fd) for fd in host.arenas.descriptors]
    message = attach_message("again", host.arenas, state=State.UPDATING)
    again = Holding(message, descriptors, map_arena)
    host.holdings.add(again)
    with pytest.raises(NotFound):
        read(again)
    assert record(again, "", 0).ranks[0].have_blocks == 0
    host.arenas.fill([NEW_DATA])
    arena.sequence += 1
    again.apply(COMMITTED)
    assert same_weights(LAYOUT, read(again, 2), NEW_DATA)


@pytest.mark.parametrize("artifacts", [{"../passwd": b""}, {"model.safetensors": b""}])
def test_files_that_do_not_travel(host, artifacts):
    """An update with a file that does not travel is refused whole."""
    with pytest.raises(InvalidRequest, match="is not one that travels"):
        host.seed.apply(replace(COMMITTED, artifacts=artifacts))
    assert host.seed.manifest(0) != NEW
    assert host.seed.artifacts == {}
