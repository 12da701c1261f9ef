"""What a relay holds of an attached instance."""

import os

import pytest
from fakes import (
    PROBE,
    FakeClock,
    Memory,
    attach_message,
    lay_out_bytes,
    random_bytes,
    replace,
    resources,
    same_weights,
    seam_layout,
)

from relay_service.core.attachment import MAX_ARTIFACT_BYTES, Update
from relay_service.core.format import Placement
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.instance import State, Weights
from relay_service.core.leases import LEASE_SECONDS, LeaseTable
from relay_service.core.manifest import Manifest, weights_digest
from relay_service.core.record import record
from relay_service.errors import (
    Conflict,
    EpochChanged,
    InvalidRequest,
    LeaseEnded,
    ManifestError,
    NotFound,
    Refused,
    RelayError,
    ResourceExhausted,
    WrongState,
)
from relay_service.memory.mapping import map_arena

LAYOUT = seam_layout()
DATA = random_bytes(LAYOUT)


class Host:
    """Instances in real memory, and the holdings of their relay."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.holdings = Holdings()
        self.holdings.leases = LeaseTable(self.clock)
        self._memories: list[Memory] = []

    def memory(self, *contents: bytes, layouts=(LAYOUT,)) -> Memory:
        """Allocates the arenas of one instance."""
        self._memories.append(Memory(layouts, contents))
        return self._memories[-1]

    def hold(self, name: str, memory: Memory, **changes) -> Holding:
        """Attaches an instance."""
        descriptors = [os.dup(fd) for fd in memory.descriptors]
        holding = Holding(attach_message(name, memory, **changes), descriptors, map_arena)
        self.holdings.add(holding)
        return holding

    def seed(self, name: str = "seed", **changes) -> Holding:
        """Attaches an instance that serves."""
        return self.hold(name, self.memory(DATA), **changes)

    def close(self) -> None:
        """Lets go of everything."""
        self.holdings.close()
        for memory in self._memories:
            memory.close()


@pytest.fixture
def host():
    """A host without instances; what it opens and maps is gone at the end."""
    before = resources()
    host = Host()
    yield host
    host.close()
    assert before.are_back()


def read(holding: Holding, epoch: int = 1) -> bytes:
    """Reads a rank's arena as a transport does."""
    with holding.reading(0, epoch) as arena:
        return bytes(arena.view(0, LAYOUT.data_bytes))


# Attaching


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"manifests": ()}, InvalidRequest, "0 ranks, 1 descriptors"),
        ({"manifests": (LAYOUT, LAYOUT)}, InvalidRequest, "2 ranks, 1 descriptors"),
        (
            {"manifests": (seam_layout(rank=1),)},
            InvalidRequest,
            "manifest of rank 1 stands at 0",
        ),
        ({"manifests": (Manifest(0, -5, ()),)}, ManifestError, "data_bytes -5"),
        ({"artifacts": {"../passwd": b""}}, InvalidRequest, "artifact '../passwd'"),
        ({"artifacts": {"model.safetensors": b""}}, InvalidRequest, "not one that travels"),
        (
            {"artifacts": {"config.json": bytes(MAX_ARTIFACT_BYTES + 1)}},
            InvalidRequest,
            "not one that travels",
        ),
        ({"manifests": (LAYOUT,)}, Refused, "do not carry the weights"),
        ({"weights": Weights("v1", "0" * 32, 1)}, Refused, "do not carry the weights"),
        ({"weights": Weights()}, Refused, "do not carry the weights"),
    ],
)
def test_an_attachment_that_contradicts_itself(host, changes, error, words):
    """A false attachment is refused with the reason, and its descriptors are closed."""
    memory = host.memory(DATA)
    descriptors = [os.dup(fd) for fd in memory.descriptors]
    with pytest.raises(error, match=words):
        Holding(attach_message("seed", memory, **changes), descriptors, map_arena)
    assert descriptors == []


def test_memory_smaller_than_its_manifest(host):
    """A serving instance whose memory is too small is refused and nothing stays mapped."""
    small = host.memory(layouts=(lay_out_bytes([10]),))
    claimed = host.memory(DATA)
    message = attach_message("seed", claimed)
    with pytest.raises(ManifestError, match="manifest needs"):
        Holding(message, [os.dup(fd) for fd in small.descriptors], map_arena)


def test_a_name_is_held_once(host):
    """A second instance of the same name is refused while the first is attached."""
    first = host.seed("seed")
    memory = host.memory(DATA)
    second = Holding(
        attach_message("seed", memory, generation="other"),
        [os.dup(fd) for fd in memory.descriptors],
        map_arena,
    )
    with pytest.raises(Conflict, match="named seed is attached already"):
        host.holdings.add(second)
    second.detached = True
    assert second.close()
    host.holdings.detach(first)
    host.hold("seed", memory, generation="other")


def test_the_record(host):
    """A holding is announced with its blocks, digests, artifacts and leases."""
    seed = host.seed(artifacts={"config.json": b"{}"})
    host.holdings.acquire("seed", "", 1, seed.weights.digest, "target")
    (record,) = host.holdings.records("127.0.0.1:7")
    assert (record.address, record.leases, record.weights.version) == ("127.0.0.1:7", 1, "v1")
    assert record.ranks[0].have_blocks == record.ranks[0].blocks == LAYOUT.block_count
    assert record.ranks[0].digest == seed.manifests[0].digest
    assert [(a.name, a.nbytes) for a in record.artifacts] == [("config.json", 2)]
    assert host.holdings.artifact(record.artifacts[0].sha256) == b"{}"
    with pytest.raises(NotFound):
        host.holdings.artifact("0" * 64)


# Following


def test_a_dummy_becomes_ready_only_with_proof(host):
    """An instance is ready once its mapping is returned and its digests are those it claims."""
    memory = host.memory()
    target = host.hold("target", memory)
    (receiver,) = target.open_receivers()
    memory.fill([DATA])
    weights = Weights("v1", memory.digest, 1)
    good = Update(state=State.READY, weights=weights, manifests=tuple(memory.manifests))
    receiver.expect(memory.manifests[0])
    with pytest.raises(WrongState, match="writable mapping has not been returned"):
        target.apply(good)
    assert target.return_mapping() == 1
    with pytest.raises(Refused, match="do not carry"):
        target.apply(replace(good, manifests=()))
    with pytest.raises(Refused, match="do not carry"):
        target.apply(replace(good, weights=replace(weights, digest="0" * 32)))
    assert target.state is State.DUMMY
    target.apply(replace(good, probe=PROBE))
    assert (target.state, target.weights, target.probe) == (State.READY, weights, PROBE)
    assert same_weights(LAYOUT, read(target), DATA)


def test_an_update_with_another_layout(host):
    """An arena cannot change its layout or the number of its ranks while it lives."""
    seed = host.seed()
    other = lay_out_bytes([1])
    with pytest.raises(Refused, match="the arena has changed: unit: seed"):
        seed.apply(Update(state=State.READY, weights=seed.weights, manifests=(other,)))
    two = (*seed.manifests, *seed.manifests)
    with pytest.raises(InvalidRequest, match="2 manifests for 1 ranks"):
        seed.apply(Update(state=State.READY, weights=seed.weights, manifests=two))
    with pytest.raises(ManifestError):
        seed.apply(
            Update(state=State.READY, weights=seed.weights, manifests=(Manifest(0, -1, ()),))
        )
    assert seed.state is State.READY


# Landing


@pytest.mark.parametrize("state", [State.READY, State.PAUSED, State.DRAINING])
def test_only_a_dummy_is_filled(host, state):
    """An instance that holds weights is never mapped for writing."""
    seed = host.seed(state=state)
    with pytest.raises(WrongState, match=f"seed is {state}: only a dummy can be filled"):
        seed.open_receivers()


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.FAILED])
def test_nothing_else_is_filled(host, state):
    """An instance that is no dummy (yet, or any more) is not filled."""
    target = host.hold("target", host.memory(), state=state)
    with pytest.raises(WrongState, match="only a dummy can be filled"):
        target.open_receivers()


def test_one_filler_at_a_time(host):
    """A dummy that is being filled cannot be filled by another pull until it is over."""
    target = host.hold("target", host.memory())
    target.open_receivers()
    with pytest.raises(WrongState, match="is being filled already"):
        target.open_receivers()
    target.return_mapping()
    target.open_receivers()


def test_what_landed_is_kept_for_the_next_pull(host):
    """Verified blocks of a pull that failed are counted and reused by the next one."""
    target = host.hold("target", host.memory())
    (receiver,) = target.open_receivers()
    manifest = host.memory(DATA).manifests[0]
    receiver.expect(manifest)
    block = LAYOUT.block(3)
    receiver.land(3, memoryview(DATA)[block.offset : block.offset + block.nbytes])
    assert record(target, "", 0).ranks[0].have_blocks == 1
    target.return_mapping()
    (again,) = target.open_receivers()
    assert again.expect(manifest) == 1
    assert 3 not in again.missing


def test_a_sealed_arena_is_not_mapped_for_writing(host):
    """When the engine has sealed its memory, no pull into it can start."""
    memory = host.memory()
    target = host.hold("target", memory)
    memory.seal()
    with pytest.raises(ResourceExhausted):
        target.open_receivers()
    target.apply(Update(state=State.FAILED, weights=Weights()))


# Reading


@pytest.mark.parametrize("rank", [-1, 1, 1 << 40])
def test_an_unknown_rank(host, rank):
    """Reading or describing a rank that does not exist is `NotFound`."""
    seed = host.seed()
    with pytest.raises(NotFound, match="rank"):
        seed.manifest(rank)
    with pytest.raises(NotFound), seed.reading(rank, 1):
        pass


def test_a_dummy_has_nothing_to_read(host):
    """An arena without weights is not lent to readers."""
    target = host.hold("target", host.memory())
    with pytest.raises(NotFound, match="no readable rank"):
        read(target, 0)


def test_reading_another_epoch(host):
    """A reader of weights that are gone is told so before it reads."""
    with pytest.raises(EpochChanged, match="is at epoch 1, not 2"):
        read(host.seed(), 2)


def test_reading_while_a_commit_is_applied(host):
    """Nothing is read while the sequence is odd, nor after it until the relay hears of it."""
    memory = host.memory(DATA)
    seed = host.hold("seed", memory)
    for sequence in (1, 2):
        memory.arenas[0].sequence = sequence
        with pytest.raises(EpochChanged, match="is being updated"):
            read(seed)
    told = Update(state=State.READY, weights=Weights("v1", memory.digest, 2))
    seed.apply(told)
    assert same_weights(LAYOUT, read(seed, 2), DATA)
    memory.arenas[0].sequence = 4
    seed.apply(told)  # the same word again is no news of that
    with pytest.raises(EpochChanged, match="is being updated"):
        read(seed, 2)
    for state in (State.UPDATING, State.READY):  # an update that came to nothing
        seed.apply(replace(told, state=state))
    assert same_weights(LAYOUT, read(seed, 2), DATA)


def test_changing_comes_before_what_the_reader_made_of_it(host):
    """A source that changed under a reader is never called corrupt."""
    memory = host.memory(DATA)
    seed = host.hold("seed", memory)

    def misread(commits: int) -> None:
        with seed.reading(0, 1):
            memory.arenas[0].sequence += 2 * commits
            raise ValueError("these bytes make no sense")

    with pytest.raises(ValueError, match="no sense"):
        misread(0)
    with pytest.raises(EpochChanged, match="while it was read"):
        misread(1)


def _exchanged(manifest: Manifest, first: int, second: int) -> Manifest:
    """Returns the layout of two units that have changed places."""
    one, other = manifest.units[first], manifest.units[second]

    def called(unit, like):
        tensors = tuple(
            replace(mine, name=its.name, logical=its.logical)
            for mine, its in zip(unit.tensors, like.tensors, strict=True)
        )
        return replace(unit, name=like.name, tensors=tensors, digests=like.digests)

    return manifest.renamed([called(one, other), called(other, one)])


def test_units_that_have_changed_places(host):
    """Those of equal extents may, in a new epoch of one that serves; others never."""
    layout = lay_out_bytes([100, 100, 200])
    data = random_bytes(layout)
    memory = host.memory(data, layouts=(layout,))
    seed = host.hold("seed", memory, placement=Placement(1, 2, 0, "before"))
    (old,) = memory.manifests
    moved = _exchanged(old, 0, 1)
    assert [unit.name for unit in moved.units] == ["unit.1", "unit.0", "unit.2"]
    digest = weights_digest([moved])
    good = Update(
        state=State.READY, weights=Weights("v1", digest, 2), manifests=(moved,),
        placement=Placement(1, 2, 0, "after"),
    )  # fmt: skip
    for wrong in (
        replace(good, weights=Weights("v1", digest, 1)),
        replace(good, manifests=(lay_out_bytes([100, 200, 100]),)),
    ):
        with pytest.raises(Refused, match="the arena has changed: "):
            seed.apply(wrong)
    assert (seed.manifests, record(seed, "", 0).placement.expert_map) == ([old], "before")
    seed.apply(good)
    assert (seed.manifests, record(seed, "", 0).placement.expert_map) == ([moved], "after")
    with pytest.raises(EpochChanged, match="is at epoch 2, not 1"):
        read(seed, 1)
    dummy = host.hold("dummy", host.memory(layouts=(layout,)))
    with pytest.raises(Refused, match="the arena has changed"):
        dummy.apply(good)


# Leaving


def test_a_detached_holding_lives_as_long_as_its_leases(host):
    """Who holds a lease reads on after the engine has gone, and nobody else begins."""
    before = resources()
    memory = host.memory(DATA)
    seed = host.hold("seed", memory)
    lease = host.holdings.acquire("seed", seed.generation, 1, memory.digest, "target")
    host.holdings.detach(seed)
    memory.close()
    assert host.holdings.records("") == []
    with pytest.raises(NotFound, match="'seed' is not attached"):
        host.holdings.acquire("seed", seed.generation, 1, seed.weights.digest, "late")
    assert host.holdings.leased(lease.lease)[1] is seed
    assert same_weights(LAYOUT, read(seed), DATA)
    host.holdings.leases.release(lease.lease)
    host.holdings.sweep()
    assert before.are_back()
    with pytest.raises(LeaseEnded):
        host.holdings.leased(lease.lease)


def test_a_detached_holding_goes_when_its_lease_expires(host):
    """A reader that has gone without a word keeps memory for the time of a lease only."""
    before = resources()
    memory = host.memory(DATA)
    seed = host.hold("seed", memory)
    host.holdings.acquire("seed", "", 1, memory.digest, "target")
    host.holdings.detach(seed)
    memory.close()
    host.clock.now += LEASE_SECONDS - 1
    host.holdings.sweep()
    assert resources() != before
    host.clock.now += 2
    host.holdings.sweep()
    assert before.are_back()


def test_nothing_is_unmapped_under_a_reader(host):
    """A block that is being read stays mapped until it is read, lease or not."""
    seed = host.seed()
    with seed.reading(0, 1) as arena:
        host.holdings.detach(seed)
        assert same_weights(LAYOUT, bytes(arena.view(0, LAYOUT.data_bytes)), DATA)
    host.holdings.sweep()
    with pytest.raises(NotFound):
        read(seed)


@pytest.mark.parametrize(("epoch", "digest"), [(2, None), (0, "0" * 32), (1, "0" * 32), (1, "")])
def test_a_lease_is_on_weights_as_announced(host, epoch, digest):
    """A lease on weights that the instance does not hold is refused."""
    seed = host.seed()
    digest = seed.weights.digest if digest is None else digest
    with pytest.raises(EpochChanged, match="holds other weights by now"):
        host.holdings.acquire("seed", "", epoch, digest, "target")


def test_no_lease_on_a_dummy_or_another_life(host):
    """Only the life that was announced, and only complete weights, can be leased."""
    seed = host.seed()
    with pytest.raises(NotFound):
        host.holdings.acquire("seed", "another life", 1, seed.weights.digest, "x")
    host.hold("target", host.memory())
    with pytest.raises(WrongState, match="holds no complete weights"):
        host.holdings.acquire("target", "", 0, "", "x")


def test_rounds_leave_nothing_behind(host):
    """Attaching, filling, leasing and leaving many times leaks no descriptor and no mapping."""
    before = resources()
    for number in range(20):
        memory = host.memory(DATA)
        seed = host.hold("seed", memory, generation=str(number))
        lease = host.holdings.acquire("seed", "", 1, memory.digest, "target")
        read(seed)
        dummy = host.memory()
        target = host.hold("target", dummy)
        target.open_receivers()
        if number % 2:
            target.return_mapping()
            host.holdings.leases.release(lease.lease)
        host.holdings.leases.end_all("seed", str(number))
        for holding in (seed, target):
            host.holdings.detach(holding)
        for one in (memory, dummy):
            one.close()
        assert before.are_back()


def test_closing_lets_go_of_everything(host):
    """A relay that ends unmaps all, whatever leases there are."""
    before = resources()
    memory = host.memory(DATA)
    host.hold("seed", memory)
    host.holdings.acquire("seed", "", 1, memory.digest, "target")
    host.holdings.close()
    memory.close()
    assert before.are_back()
    with pytest.raises(RelayError):
        host.holdings.get("seed")
