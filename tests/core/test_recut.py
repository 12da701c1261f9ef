"""Filling a target from sources that are placed otherwise."""

import asyncio

import pytest
from cutting import columns, contents, holder, matrices, placements, rows, tensor
from fakes import (
    BytesArena,
    FakeFleet,
    FakeSession,
    FakeSource,
    FakeTransport,
    eventually,
    instance,
    replace,
)
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core import manifest, search
from relay_service.core.dtypes import DType
from relay_service.core.format import Placement
from relay_service.core.holder import Holder
from relay_service.core.lane import CORRUPTIONS_PER_SOURCE
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import weights_digest
from relay_service.core.match import Target
from relay_service.core.planner import Planner
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed
from relay_service.errors import (
    CorruptBlock,
    EpochChanged,
    FormatMismatch,
    NoSource,
    PartsMissing,
    RelayError,
    SourceFailed,
)

HIDDEN, FFN = 96, 200


@pytest.fixture(autouse=True)
def _search_fast(monkeypatch):
    """Asks for sources often: what is under test is not how seldom."""
    monkeypatch.setattr(search, "SEARCH_SECONDS", 0.001)


@pytest.fixture
def _small_blocks(monkeypatch):
    """Blocks so short that small matrices have many."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)


def split(ranks: int, sealed: str = "") -> list[Holder]:
    """Cuts a small model over so many ranks: rows, columns, fused rows, and what all hold."""

    def units(rank: int) -> dict:
        ffn, hidden = FFN // ranks, HIDDEN // ranks
        up = [rows(name, (FFN, HIDDEN), rank * ffn, ffn) for name in ("gate", "up")]
        down = columns("down", (HIDDEN, FFN), rank * ffn, ffn)
        out = columns("out", (HIDDEN, HIDDEN), rank * hidden, hidden)
        return {
            "layer": [tensor("gate_up", *up, dtype=DType.BF16), tensor("down", down)],
            "rest": [
                tensor("out", out, dtype=DType.F32, sealed=sealed),
                tensor("norm", rows("norm", (HIDDEN, 1), 0, HIDDEN), dtype=DType.F32),
            ],
        }

    return [holder(f"rank {rank}", units(rank), rank=rank) for rank in range(ranks)]


def seed(name: str, ranks: list[Holder], salt: str = "") -> FakeSource:
    """Returns a source that holds a model, or with another salt other weights of it."""
    return FakeSource(
        name, [one.manifest for one in ranks], [bytes(contents(one, salt)) for one in ranks]
    )


class Filling:
    """One pull into ranks of bytes."""

    def __init__(self, ranks: list[Holder], *sources: FakeSource, **options) -> None:
        self.ranks = ranks
        self.arenas = [BytesArena(one.manifest.data_bytes) for one in ranks]
        self.receivers = [
            Receiver(one.manifest, arena) for one, arena in zip(ranks, self.arenas, strict=True)
        ]
        self.landed = Landed()
        self.pull(*sources, **options)

    def pull(self, *sources: FakeSource, **options) -> None:
        """Prepares another pull into the same arenas."""
        self.fleet = FakeFleet(*(source.record for source in sources))
        self.transport = FakeTransport(*sources)
        self.receivers = [
            Receiver(one.layout, arena, one.verified)
            for one, arena in zip(self.receivers, self.arenas, strict=True)
        ]
        target = Target("target", instance().format, Placement(len(self.ranks)))
        self.puller = Puller(
            target, self.receivers, self.fleet, [self.transport], PullOptions(**options),
            self.landed,
        )  # fmt: skip

    async def run(self):
        """Pulls, within a time that no test needs."""
        return await asyncio.wait_for(self.puller.run(), 20)

    @property
    def path(self) -> list[tuple[str, str]]:
        """Sources that were tried and why each was left."""
        return [(step.source_instance, step.reason) for step in self.puller.report.path]

    @property
    def bytes_read(self) -> tuple[int, int]:
        """Bytes that came, and those of them that had to be read again."""
        return self.puller.bytes_moved, self.puller.bytes_reread

    def assert_filled(self, salt: str = "") -> None:
        """Checks that every rank holds what cutting the model itself gives, and knows it."""
        for one, arena, receiver in zip(self.ranks, self.arenas, self.receivers, strict=True):
            assert arena.data == contents(one, salt)
            assert receiver.complete
        right = seed("right", self.ranks, salt)
        assert [r.manifest() for r in self.receivers] == right.manifests


def whole_blocks(source: FakeSource) -> int:
    """Returns how many blocks a source has on all ranks."""
    return sum(one.block_count for one in source.manifests)


def total_bytes(source: FakeSource) -> int:
    """Returns the bytes of all blocks of a source."""
    return sum(one.weight_bytes for one in source.manifests)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("held", "wanted"), [(2, 1), (1, 2), (4, 2), (2, 4), (1, 8), (3, 3)])
async def test_another_number_of_ranks(held, wanted):
    """Every block of a source is read once, and every rank holds its part of the model."""
    source = seed("seed", split(held))
    filling = Filling(split(wanted), source)
    report = await filling.run()
    filling.assert_filled()
    assert sorted(source.reads) == sorted(
        index for one in source.manifests for index in range(one.block_count)
    )
    (step,) = report.path
    said = f"tensor_parallel_size: seed {held}, target {wanted}" if held != wanted else ""
    assert (step.recut, step.reason) == (said, "complete")
    assert filling.bytes_read == (total_bytes(source), 0)
    assert step.bytes_verified == total_bytes(source)
    assert report.source_weights_digest == weights_digest(source.manifests)
    assert report.weights_digest == weights_digest(seed("target", filling.ranks).manifests)
    assert (report.weights_digest == report.source_weights_digest) == (held == wanted)
    assert filling.puller.bytes_verified == sum(r.total_bytes for r in filling.receivers)
    assert source.leases == 0


async def test_experts_that_lie_elsewhere():
    """Ranks of equal number whose experts lie elsewhere are filled, by units that move whole."""

    def ranks(order: str) -> list[Holder]:
        half = len(order) // 2
        return [
            holder(
                f"rank {rank}",
                {
                    f"expert.{name}": [tensor(f"expert.{name}", rows(name, (70, 30), 0, 70))]
                    for name in names
                },
                rank=rank,
            )
            for rank, names in enumerate((order[:half], order[half:]))
        ]

    source = seed("seed", ranks("abcdef"))
    filling = Filling(ranks("fcadbe"), source)
    report = await filling.run()
    filling.assert_filled()
    assert report.path[0].recut == "unit: seed expert.a, target expert.f"
    units = {unit.name: unit.digest for one in source.manifests for unit in one.units}
    assert units == {
        unit.name: unit.digest for one in filling.receivers for unit in one.manifest().units
    }


@pytest.mark.usefixtures("_small_blocks")
async def test_the_same_placement_comes_first():
    """A source that can be copied is taken, however loaded; if it fails, it is asked once more."""
    like, other = seed("z", split(2)), seed("a", split(1))
    like.record = replace(like.record, leases=9)
    filling = Filling(split(2), like, other)
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("z", "complete")]
    like.fails_after, like.error = len(like.reads) + 3, SourceFailed("it died")
    filling = Filling(split(2), like, other)
    await filling.run()
    filling.assert_filled()
    assert filling.path == [("z", "it died"), ("z", "it died"), ("a", "complete")]


@pytest.mark.usefixtures("_small_blocks")
async def test_a_second_source_goes_on_where_the_first_died():
    """A source of the same placement and weights is asked only for what has not come."""
    first, second = seed("a", split(2)), seed("b", split(2))
    first.fails_after, first.error = 20, SourceFailed("it died")
    filling = Filling(split(1), first, second)
    report = await filling.run()
    filling.assert_filled()
    assert filling.path == [("a", "it died"), ("b", "complete")]
    assert len(second.reads) == whole_blocks(second) - 20
    assert filling.bytes_read == (total_bytes(second), 0)
    assert sum(step.bytes_verified for step in report.path) == total_bytes(second)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("salt", ["", "other weights"])
async def test_a_second_source_of_another_placement(salt):
    """What came is forgotten where the next source is cut otherwise still, and is said so."""
    first, second = seed("a", split(2)), seed("b", split(4), salt)
    first.fails_after, first.error = 20, SourceFailed("it died")
    filling = Filling(split(1), first, second)
    report = await filling.run()
    filling.assert_filled(salt)
    assert len(second.reads) == whole_blocks(second)
    moved, again = filling.bytes_read
    assert again == report.path[0].bytes_verified > 0
    assert moved - again == total_bytes(second)


@pytest.mark.usefixtures("_small_blocks")
async def test_other_weights_in_the_same_placement():
    """What came of other weights is forgotten, though the plan is the same."""
    first, second = seed("a", split(2)), seed("b", split(2), "other weights")
    first.fails_after, first.error = 20, SourceFailed("it died")
    filling = Filling(split(1), first, second)
    await filling.run()
    filling.assert_filled("other weights")
    assert len(second.reads) == whole_blocks(second)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("salt", ["", "other weights"])
async def test_a_like_source_keeps_what_is_whole(salt):
    """From a source that can be copied only those blocks are read that it has otherwise."""
    first, like = seed("a", split(2)), seed("b", split(1), salt)
    first.fails_after, first.error = 30, SourceFailed("it died")
    filling = Filling(split(1), first)
    with pytest.raises(NoSource):
        await filling.run()
    there = filling.receivers[0].blocks_verified
    assert there > 0
    filling.pull(like)
    report = await filling.run()
    filling.assert_filled(salt)
    kept = 0 if salt else there
    assert report.blocks_reused == kept
    assert len(like.reads) == whole_blocks(like) - kept


@pytest.mark.usefixtures("_small_blocks")
async def test_after_a_copy_that_broke_off():
    """What was copied is forgotten when the only source left must be cut anew."""
    like, other = seed("a", split(1)), seed("b", split(2))
    like.fails_after, like.error = 20, SourceFailed("it died")
    filling = Filling(split(1), like, other)
    await filling.run()
    filling.assert_filled()
    assert filling.path[-1] == ("b", "complete")
    assert len(other.reads) == whole_blocks(other)
    moved, again = filling.bytes_read
    assert moved - again == total_bytes(other)
    assert again > 0


@pytest.mark.usefixtures("_small_blocks")
async def test_a_copy_in_between_spoils_what_was_cut():
    """What a copy has written over counts no more when the first source comes back."""
    first, like = seed("a", split(2)), seed("b", split(1), "other weights")
    first.fails_after, first.error = 30, SourceFailed("it died")
    like.fails_after, like.error = 20, SourceFailed("it died")
    filling = Filling(split(1), first)
    with pytest.raises(NoSource):
        await filling.run()
    filling.pull(like)
    with pytest.raises(NoSource):
        await filling.run()
    back = seed("a", split(2))
    filling.pull(back)
    await filling.run()
    filling.assert_filled()
    assert len(back.reads) == whole_blocks(back)


@pytest.mark.usefixtures("_small_blocks")
async def test_a_later_pull_takes_up_the_rest():
    """What an earlier pull has cut is kept for a source of the same placement and weights."""
    first, second = seed("a", split(2)), seed("b", split(2))
    first.fails_after, first.error = 30, SourceFailed("it died")
    filling = Filling(split(1), first)
    with pytest.raises(NoSource):
        await filling.run()
    there = filling.receivers[0].blocks_verified
    filling.pull(second)
    report = await filling.run()
    filling.assert_filled()
    assert report.blocks_reused == there > 0
    assert len(second.reads) == whole_blocks(second) - 30


@pytest.mark.usefixtures("_small_blocks")
async def test_a_pull_that_ends_between_a_write_and_its_digest():
    """What was written and not digested yet is digested when a later pull takes it up."""
    first, second = seed("a", split(2)), seed("b", split(2))
    filling = Filling(split(1), first)
    arena = filling.arenas[0]

    def view(*_):
        first.fails_after, first.error = 0, SourceFailed("no more")
        del arena.view
        raise OSError("it went away")

    arena.view = view
    with pytest.raises(NoSource, match="it went away"):
        await filling.run()
    there = len(filling.landed.blocks)
    assert there > 0
    filling.pull(second)
    await filling.run()
    filling.assert_filled()
    assert len(second.reads) == whole_blocks(second) - there


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("row", [9, 2500])
async def test_what_nobody_fills_is_zero(row):
    """Nonsense between tensors and rows, from an earlier source, does not stay."""

    def gappy(rank: int, first: int, count: int, row: int) -> Holder:
        held = [
            tensor("a", rows("a", (3, 5), first, count), row=row),
            tensor("b", columns("b", (7, 3), first, count)),
        ]
        return holder(f"rank {rank}", {"u": held}, rank=rank)

    whole = gappy(0, 0, 3, row=row)
    good = seed("good", [gappy(0, 0, 1, row=0), gappy(1, 1, 2, row=0)])
    filling = Filling([whole], good)
    filling.arenas[0].data[:] = b"\1" * whole.manifest.data_bytes
    await filling.run()
    assert filling.receivers[0].complete
    for unit in whole.manifest.units:
        here = slice(unit.offset, unit.offset + unit.nbytes)
        assert filling.arenas[0].data[here] == contents(whole)[here]


@pytest.mark.usefixtures("_small_blocks")
async def test_a_source_that_is_updated():
    """Nothing of the old weights stays when a source is updated while it is read."""
    old, new = seed("seed", split(2)), seed("seed", split(2), "new weights")
    new.record = replace(new.record, weights=replace(new.record.weights, version="v2", epoch=2))
    old.fails_after, old.error = 40, EpochChanged("seed is at epoch 2")
    filling = Filling(split(1), old)
    running = asyncio.create_task(filling.run())
    await eventually(lambda: filling.puller.report.path and filling.puller.report.path[-1].reason)
    filling.transport.sources["seed"] = new
    filling.fleet.known = [new.record]
    report = await running
    filling.assert_filled("new weights")
    assert report.weight_version == "v2"
    assert filling.path == [("seed", "seed is at epoch 2"), ("seed", "complete")]


@pytest.mark.usefixtures("_small_blocks")
async def test_a_corrupt_block_is_read_again():
    """Wrong bytes are not written anywhere, and are read again."""
    source = seed("seed", split(2))
    source.corrupt[3] = CORRUPTIONS_PER_SOURCE
    filling = Filling(split(1), source)
    await filling.run()
    filling.assert_filled()
    assert "block 3" in filling.puller.report.note
    assert (filling.puller.blocks_failed, filling.bytes_read[1]) == (2, 2000)
    assert filling.puller.blocks_landed == whole_blocks(source)


@pytest.mark.usefixtures("_small_blocks")
async def test_only_wrong_bytes():
    """A source whose bytes stay wrong is left by the block's name, and nothing is complete."""
    source = seed("seed", split(2))
    source.corrupt[3] = 1000
    filling = Filling(split(1), source)
    with pytest.raises(CorruptBlock, match=r"rank [01], tensor gate_up, block 3"):
        await filling.run()
    assert not filling.receivers[0].complete


@pytest.mark.usefixtures("_small_blocks")
async def test_a_write_that_fails_is_noticed():
    """What isn't in the arena when it was written never counts as landed."""
    source = seed("seed", split(2))
    filling = Filling(split(1), source)
    filling.arenas[0].scatter = lambda *_: False
    with pytest.raises(CorruptBlock):
        await filling.run()
    assert filling.landed.blocks == set()
    assert not filling.receivers[0].complete


@pytest.mark.usefixtures("_small_blocks")
async def test_what_was_verified_is_what_is_written():
    """Bytes that change after they were verified, in the memory of a source, reach no arena."""
    source = seed("seed", split(2))
    filling = Filling(split(1), source)
    session_read = FakeSession.read

    async def read(session, rank, blocks, land, limit):
        def land_and_change(index, data):
            lent[:] = [data]
            land(index, data)

        await session_read(session, rank, blocks, land_and_change, limit)

    lent, arena = [], filling.arenas[0]

    def scatter(block, pieces):
        lent[0][:] = bytes(len(lent[0]))
        return BytesArena.scatter(arena, block, pieces)

    arena.scatter = scatter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSession, "read", read)
        await filling.run()
    filling.assert_filled()


@pytest.mark.usefixtures("_small_blocks")
async def test_what_cannot_be_cut_is_refused():
    """A format that cannot be cut is refused with its reason and a hint; no byte moves."""
    source = seed("seed", split(2, sealed="packed in tiles"))
    filling = Filling(split(1, sealed="packed in tiles"), source)
    with pytest.raises(FormatMismatch, match="packed in tiles") as refused:
        await filling.run()
    message, details = str(refused.value), refused.value.details
    assert message.startswith(
        "seed does not fit: tensor_parallel_size: seed 2, target 1, and out: no source holds it"
    )
    assert (details["field"], details["source"]) == ("placement", "seed")
    assert "placed like a source" in details["hint"]
    assert source.reads == []
    assert source.leases == 0


async def test_who_does_not_say_what_it_holds_is_refused():
    """Without coordinates nothing is cut, and the tensor is named."""
    unsaid = [lay_out(n, [UnitSpec("u", (TensorSpec("w", DType.U8, (4, 4)),))]) for n in range(2)]
    source = FakeSource("seed", unsaid, [bytes(one.data_bytes) for one in unsaid])
    filling = Filling(split(1), source)
    with pytest.raises(FormatMismatch, match="seed rank 0: w does not say which rows"):
        await filling.run()
    assert source.reads == []


@pytest.mark.usefixtures("_small_blocks")
async def test_parts_that_the_source_lacks():
    """A source that is placed otherwise and holds too little is left, with what it lacks."""
    source = seed("seed", split(3)[:2])
    filling = Filling(split(1), source)
    with pytest.raises(PartsMissing, match=r"gate_up: gate: rows 132\.\.199 of 200") as refused:
        await filling.run()
    assert "seed" in refused.value.details["path"]
    assert source.reads == []


@pytest.mark.usefixtures("_small_blocks")
async def test_a_source_of_too_many_ranks():
    """A source is not asked for more manifests than anybody has ranks."""
    source = seed("seed", split(2))
    source.record = replace(source.record, ranks=source.record.ranks * 1000)
    with pytest.raises(NoSource, match="2000 ranks"):
        await Filling(split(1), source).run()


@given(st.data(), matrices, st.sampled_from([64, 100, 4096]))
def test_whatever_fails_nothing_wrong_is_complete(data, model, block_bytes):
    """Sources of any placement die, lie and change: the target equals a model, or isn't complete.

    What an earlier pull left in the arenas is of no harm to a later one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK_BYTES", block_bytes)
        patch.setattr(search, "SEARCH_SECONDS", 0.0)
        patch.setattr(search, "EXPIRY_SECONDS", 0.0)
        held = [data.draw(placements(model)) for _ in range(2)]
        filling = Filling(data.draw(st.sampled_from(held) | placements(model)))
        for _ in range(data.draw(st.integers(1, 3))):
            filling.pull(*(data.draw(_sources(f"s{n}", held)) for n in range(2)))
            try:
                report = asyncio.run(filling.run())
            except RelayError:
                _assert_nothing_wrong(filling)
            else:
                filling.assert_filled(report.weight_version)
                assert report.weights_digest == weights_digest(
                    [receiver.manifest() for receiver in filling.receivers]
                )


@st.composite
def _sources(draw, name: str, held: list[list[Holder]]) -> FakeSource:
    """A source of one of two weights, which may break off or send wrong bytes."""
    salt = draw(st.sampled_from(["", "", "x"]))
    source = seed(name, draw(st.sampled_from(held)), salt)
    weights = replace(source.record.weights, version=salt)
    source.record = replace(source.record, weights=weights)
    if draw(st.booleans()):
        source.fails_after = draw(st.integers(0, whole_blocks(source)))
        source.error = draw(st.sampled_from([SourceFailed("x"), EpochChanged("x"), OSError("x")]))
    for index in draw(st.lists(st.integers(0, 9), max_size=3)):
        source.corrupt[index] = draw(st.integers(1, 4))
    return source


def _assert_nothing_wrong(filling: Filling) -> None:
    """Checks that every block that counts as there is of the one or of the other weights."""
    for one, arena, receiver in zip(filling.ranks, filling.arenas, filling.receivers, strict=True):
        models = [contents(one), contents(one, "x")]
        for index in set(range(one.manifest.block_count)) - set(receiver.missing):
            block = one.manifest.block(index)
            here = slice(block.offset, block.offset + block.nbytes)
            assert arena.data[here] in [model[here] for model in models]


def test_a_hostile_cut_is_not_looked_through_for_ever(monkeypatch):
    """A tensor in a great many overlapping pieces costs a bounded time."""
    monkeypatch.setattr("relay_service.core.planner.MAX_STEPS", 10_000)
    pieces = [
        holder(f"rank {n}", {"u": [tensor("w", rows("w", (400, 400), n, 1))]}, rank=n)
        for n in range(400)
    ]
    target = holder("target", {"u": [tensor("w", rows("w", (400, 400), 0, 400))]})
    with pytest.raises(FormatMismatch, match="w in too many pieces"):
        Planner(pieces).plan(target)
