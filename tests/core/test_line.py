"""Who takes the place of a source that has gone."""

from fakes import instance

from relay_service.core.instance import State, Weights
from relay_service.core.line import Line
from relay_service.errors import Refused, SourceFailed

SEED = instance("seed")
MIDDLE = instance("middle", state=State.DUMMY, weights=Weights())
LOST = instance("lost")
GONE = SourceFailed("gone")


def line(*upstream: str) -> Line:
    """Returns a line whose leading source is filled through others."""
    made = Line()
    made.leads(LOST, upstream)
    return made


def closes(made: Line, *known, but: str = "") -> str:
    """Names who closes the gap; empty for nobody."""
    found = made.close_gap(known, lambda one: one.instance != but)
    return found.instance if found else ""


def test_the_next_behind_and_then_the_next():
    """Each is asked once, in order, also one that is filled itself."""
    made = line("middle", "seed")
    made.failed(LOST, GONE)
    assert [closes(made, SEED, MIDDLE) for _ in range(3)] == ["middle", "seed", ""]


def test_who_is_filled_is_read_with_what_it_will_hold():
    """A dummy that nobody announced as filled yet has the weights of the one that has gone."""
    found = line("middle").close_gap([MIDDLE], lambda _: True)
    assert found.weights.digest == LOST.weights.digest


def test_who_may_not_be_asked_is_passed_over():
    """Whoever was left for wrong bytes, say, is not read for a gap."""
    assert closes(line("middle", "seed"), SEED, MIDDLE, but="middle") == "seed"


def test_other_weights_close_no_gap():
    """Whoever was updated meanwhile has a seat for others."""
    updated = instance("seed", weights=Weights("v2", "other digest", 2))
    assert closes(line("seed"), updated) == ""


def test_a_source_that_refuses_leaves_no_gap():
    """It's there, and so keeps its seat; what another one does has nothing to do with that."""
    for failed, closed in ((LOST, ""), (MIDDLE, "seed")):
        made = line("seed")
        made.failed(failed, Refused("no"))
        assert closes(made, SEED) == closed
