"""What a pull offers while it lands, and what nobody may read of it yet."""

import pytest
from fakes import BytesArena, FakeSession, FakeSource, instance, lay_out_bytes, random_bytes

from relay_service.core.format import Placement
from relay_service.core.lane import Lane
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.match import Target
from relay_service.core.offer import OfferSlot
from relay_service.core.offering import Offering
from relay_service.core.pull_report import PathStep
from relay_service.core.reading import Copied
from relay_service.core.receiver import Receiver
from relay_service.core.recut import Landed, Recut
from relay_service.errors import NotYet, SourceBusy

LAYOUT = lay_out_bytes([2 * BLOCK_BYTES])
DUMMY = instance("target")


class Scene:
    """The offers of one target, and what its relay makes of them."""

    def __init__(self, placement=DUMMY.placement) -> None:
        self.offers = []
        target = Target("target", DUMMY.format, placement)
        self.offering = Offering(target, self.offers.append)
        self.receivers = [Receiver(LAYOUT, BytesArena(LAYOUT.data_bytes))]

    def begin(self, lane: Lane) -> list:
        """Begins to read; returns the manifests that are offered, None for no offer."""
        self.offering.begin(lane)
        return self.manifests

    def land(self, lane: Lane, source: FakeSource) -> None:
        """Lands all blocks of a source."""
        way = Copied(source.manifests, self.receivers)
        self.offering.lead(lane, way)
        for block in way.missing(0):
            at = source.manifests[0].block(block)
            way.land(0, block, memoryview(source.contents[0])[at.offset : at.offset + at.nbytes])

    @property
    def manifests(self) -> list | None:
        """What is offered at last."""
        return self.offers[-1] and self.offers[-1].manifests


def lane_to(name: str, seed: int = 0) -> tuple[Lane, FakeSource]:
    """Returns an open lane, and its source."""
    source = FakeSource(name, [LAYOUT], [random_bytes(LAYOUT, seed)])
    lane = Lane(source.record, False, PathStep(name, ""), FakeSession(source))
    return lane, source


def busy(*upstream: str) -> SourceBusy:
    """Returns what a busy source says of the line that it sends somebody to."""
    return SourceBusy("busy", next="a").knowing(upstream, b"told")


def test_the_same_weights_are_known_from_another_source():
    """Readers of what has landed read on while the next source is asked for its manifests."""
    scene, (lane, source), (other, _) = Scene(), lane_to("a"), lane_to("b")
    assert scene.begin(lane) == []
    scene.land(lane, source)
    assert scene.begin(other) == source.manifests


def test_other_weights_make_the_former_ones_unknown():
    """Also when those come again: what lies there now may be of either."""
    scene, (lane, source), (other, _) = Scene(), lane_to("a"), lane_to("b", 1)
    scene.begin(lane)
    scene.land(lane, source)
    assert scene.begin(other) == []
    assert scene.begin(lane) == []


def test_nothing_is_read_before_digests_are_known():
    """Blocks that are verified may be of what landed before."""
    scene, (lane, source), (other, _) = Scene(), lane_to("a"), lane_to("b", 1)
    slot = OfferSlot("target")
    scene.begin(lane)
    scene.land(lane, source)
    slot.put(scene.offers[-1], scene.receivers)
    slot.check(0, 0, scene.offers[-1].epoch)
    scene.begin(other)
    slot.put(scene.offers[-1], scene.receivers)
    with pytest.raises(NotYet):
        slot.check(0, 0, scene.offers[-1].epoch)


def test_what_will_come_is_offered_before_the_lease():
    """With the line and the probe that a busy source told; the lease confirms the line."""
    scene, (lane, _) = Scene(), lane_to("a")
    scene.offering.foresee(lane.source, busy("b", "seed"))
    (early,) = scene.offers
    assert (early.upstream, early.manifests, early.probe) == (("a", "b", "seed"), [], b"told")
    lane.session.upstream = ("b", "seed")
    scene.begin(lane)
    assert scene.offers[-1].continues(early)


def test_what_nobody_foretold_is_not_offered_before_the_lease():
    """A line that nobody told would admit those that are part of it; after a lease it's known."""
    scene, (lane, _) = Scene(), lane_to("a")
    scene.offering.foresee(lane.source, busy())
    assert scene.offers == []
    scene.begin(lane)
    scene.offering.foresee(lane.source, busy("b", "seed"))
    assert len(scene.offers) == 1


def test_what_is_cut_anew_is_not_offered():
    """Neither when that is known from the start, nor when manifests tell."""
    scene, (lane, _) = Scene(Placement(2)), lane_to("a")
    scene.offering.foresee(lane.source, busy("b", "seed"))
    assert scene.offers == []
    assert scene.begin(lane) is None
    scene = Scene()
    assert scene.begin(lane) == []
    scene.offering.lead(lane, Recut("a", [], [], Landed()))
    assert scene.offers[-1] is None
