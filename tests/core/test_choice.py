"""Whom a target reads from, and who reads from whom in the end."""

import pytest
from fakes import FakeClock, instance
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.choice import Candidate, choose, nearest, reads_from
from relay_service.core.instance import Filling, RankBlocks, State, Weights
from relay_service.core.offer import Offer, OfferSlot
from relay_service.core.seats import FRESH_SECONDS, Seats
from relay_service.errors import ReadsFromReader


def holder(name: str, leases: int = 0, **known) -> Candidate:
    """Returns a complete holder."""
    return Candidate(instance(name, leases=leases), **known)


def target(name: str, have: int = 2, leases: int = 0, source: str = "seed", **known) -> Candidate:
    """Returns one that is being filled."""
    record = instance(
        name, leases=leases, state=State.LANDING, weights=Weights(),
        ranks=(RankBlocks(0, have, 4, 4096),),
        filling=Filling("tiny", "v1", "digest", 7, source),
    )  # fmt: skip
    return Candidate(record, **known)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (holder("z", 9), holder("a", recut=True)),
        (holder("z", 9), holder("a", broke_off=True)),
        (holder("z", 9), holder("a", full=True)),
        (holder("z", 9, near=True), holder("a")),
        (target("z", near=True), holder("a")),
        (holder("z"), holder("a", 1)),
        (holder("z"), target("a")),
        (target("z"), holder("a", 1)),
        (target("z", 3), target("a", 2)),
        (target("z", 2), target("a", 3, leases=1)),
        (holder("z", 1), target("a", leases=1)),
        (holder("z", 3), target("a", 0)),
        (holder("a"), holder("b")),
    ],
)
def test_which_is_better(better, worse):
    """Of two sources, for a target that has one block, one is better, in whatever order."""
    assert choose([better, worse], 1) is better
    assert choose([worse, better], 1) is better


def test_who_reads_from_whom():
    """Readers are found through any number of others, and a circle ends."""
    fleet = [
        target(name, source=source).instance for name, source in zip("bcdxy", "abcyx", strict=True)
    ]
    assert reads_from("a", fleet) == {"b", "c", "d"}
    assert reads_from("c", fleet) == {"d"}
    assert reads_from("x", fleet) == {"x", "y"}
    assert reads_from("d", fleet) == set()


def test_readers_that_come_at_once():
    """The first one stays, each later one reads from whoever came before it."""
    seats = Seats(FakeClock())
    assert seats.send_on([], "a") == ""
    assert [seats.send_on(["a"], reader) for reader in "bcd"] == ["a", "b", "c"]


def test_the_reader_itself_takes_no_seat():
    """Who broke off and comes back finds its own lease, and is not sent to itself."""
    seats = Seats(FakeClock())
    assert seats.send_on(["a"], "a") == ""
    assert seats.send_on(["a"], "b") == "a"
    assert seats.send_on(["a"], "b") == "a"
    assert seats.send_on([], "b") == ""


def test_who_came_long_ago_is_not_named():
    """After a while nobody knows where the last one went: a reader of this source is named."""
    clock = FakeClock()
    seats = Seats(clock)
    seats.send_on([], "a")
    seats.send_on(["a"], "b")
    clock.now += FRESH_SECONDS + 1
    assert seats.send_on(["a"], "c") == "a"


def test_who_closes_a_gap():
    """The nearest one behind, of those that are there."""
    assert nearest(["b", "a", "seed"], {"seed", "a", "x"}) == "a"
    assert nearest(["b"], {"x"}) == nearest([], {"x"}) == ""


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200))
def test_a_manifest_takes_few_steps(names):
    """However often who comes again, each has it from one that came before, in few steps."""
    seats, steps = Seats(FakeClock()), {}
    for name in map(str, names):
        seats.send_on(["first"], name)
        holder = seats.manifest_holder(name)
        assert holder != name
        steps[name] = steps[holder] + 1 if holder else 1
    once = list(dict.fromkeys(map(str, names)))
    if len(once) == len(names):
        assert max(steps.values()) <= len(names).bit_length()


@given(st.integers(1, 200))
def test_who_comes_at_once_forms_one_chain(count):
    """Each is sent to the one before it, so nobody is read by two and there is no circle."""
    seats, reads, readers = Seats(FakeClock()), {}, []
    for name in map(str, range(count)):
        reads[name] = seats.send_on(readers, name) or "source"
        readers = readers or [name]
    assert list(reads.values()) == ["source", *map(str, range(count - 1))]


@given(st.integers(1, 60), st.sets(st.sampled_from("xyz")))
def test_the_line_that_one_is_sent_to(count, holders):
    """Everyone between is named, nearest first, also who had a seat before anybody came."""
    seats, reads, names = Seats(FakeClock()), {}, [str(n) for n in range(count)]
    readers = sorted(holders) or names[:1]
    for name in names:
        ahead = seats.send_on(readers, name)
        if not ahead:
            continue
        reads[name] = between = [ahead, *reads.get(ahead, [])]
        told = [ahead, *seats.line_of(ahead, readers)]
        assert [one for one in told if one in names] == [one for one in between if one in names]
        assert set(between) <= set(told) <= {*between, *readers} - {name}
        assert len(told) == len(set(told))


def test_the_line_of_one_who_comes_again():
    """Who has come again since is not taken for one of those that came before."""
    seats = Seats(FakeClock())
    for name in "abcdb":
        ahead = seats.send_on(["a"], name)
    assert (ahead, seats.line_of(ahead, ["a"])) == ("d", ["c", "a"])
    clock = FakeClock()
    late = Seats(clock)
    for name in "ab":
        late.send_on(["a"], name)
        clock.now += FRESH_SECONDS + 1
    assert late.line_of("a", ["a"]) == [], "it has a seat"


class Node:
    """One target as sources and readers see it: its offer, and the lease that it reads under."""

    def __init__(self, name: str) -> None:
        self.record = instance(name, weights=Weights("v1", "digest", 1))
        self.slot = OfferSlot(name)
        self.source: Node | None = None
        self.lease = 0

    def switch(self, source: "Node", granted: tuple[int, tuple[str, ...]]) -> None:
        """Reads from another source from now on, as an answer of that one said."""
        self.lease, upstream = granted
        self.source = source
        self.slot.put(Offer(source.record, [], b"", upstream), [])

    def foresee(self, source: "Node", upstream: list[str]) -> None:
        """Reads from nobody, and is sent to a source through which somebody said blocks come."""
        self.source = None
        self.slot.put(Offer(source.record, [], b"", upstream), [])

    def ask(self, source: "Node") -> tuple[int, tuple[str, ...]] | None:
        """Asks for a lease; None if the source refuses, or has nothing."""
        if source.slot.now is None:
            return None
        try:
            epoch = source.slot.admit(self.record.instance, 0, "digest")
        except ReadsFromReader:
            return None
        return epoch, source.slot.now.upstream

    @property
    def reads(self) -> "Node | None":
        """Whom it reads from under a lease that is still good."""
        source = self.source
        good = source and source.slot.now and source.slot.now.epoch == self.lease
        return source if good else None


def in_a_circle(nodes: list[Node]) -> bool:
    """Whether somebody reads from itself, through whomever."""
    for node in nodes:
        seen, at = set(), node
        while at and at.reads:
            if id(at) in seen:
                return True
            seen.add(id(at))
            at = at.reads
    return False


@given(st.data(), st.integers(2, 7))
def test_no_circle_lasts(data, count):
    """However targets change their sources, and however late answers come, no circle is left.

    What an answer said may be old when it's used: then a circle may close, but a change of
    source ends the leases of readers, so once all answers are in there is none. So it is whatever
    a busy source said of the line that it sent somebody to.
    """
    seed = Node("seed")
    seed.slot.put(Offer(instance("disk"), [], b"", ()), [])
    nodes = [Node(f"t{n}") for n in range(count)]
    late: dict[Node, tuple[Node, tuple[int, tuple[str, ...]]]] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        node = data.draw(st.sampled_from(nodes))
        if node in late:
            node.switch(*late.pop(node))
            continue
        source = data.draw(st.sampled_from([*nodes, seed]))
        if source is not node and data.draw(st.booleans()):
            names = st.sampled_from([one.record.instance for one in nodes if one is not node])
            node.foresee(source, data.draw(st.lists(names, unique=True, max_size=4)))
        granted = node.ask(source) if source is not node else None
        if granted and data.draw(st.booleans()):
            late[node] = source, granted
        elif granted:
            node.switch(source, granted)
            assert late or not in_a_circle(nodes)
    for node, answer in late.items():
        node.switch(*answer)
    assert not in_a_circle(nodes)
