"""Who fits, who does not, and the words for it."""

import pytest
from fakes import FORMAT, instance
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.format import Format, Placement
from relay_service.core.instance import FILLING_EPOCH, Filling, State, Weights
from relay_service.core.match import Target, match

TARGET = Target("target", FORMAT, Placement())


def with_facts(**changes: str) -> Format:
    """Returns the format of all tests with some facts changed, or taken out by `""`."""
    facts = {name.replace(".", "_"): (name, value) for name, value in FORMAT.facts}
    for key, value in changes.items():
        facts[key] = (facts[key][0], value)
    return Format(tuple(fact for fact in facts.values() if fact[1]))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (with_facts(), ""),
        (with_facts(dtype="float32"), "dtype: seed bfloat16, target float32"),
        (with_facts(config_hidden_size="65"), "config.hidden_size: seed 64, target 65"),
        (with_facts(kernel_format="2", dtype="x"), "kernel_format: seed 1, target 2"),
        (with_facts(dtype=""), "dtype: seed bfloat16, target absent"),
        (Format((*FORMAT.facts, ("extra", "1"))), "extra: seed absent, target 1"),
        (Format(tuple(reversed(FORMAT.facts))), "facts: same values in another order"),
    ],
)
def test_format_differences_in_words(target, words):
    """The first fact that differs is named with both values, the seed's first."""
    assert FORMAT.difference(target) == words
    assert (FORMAT.fingerprint == target.fingerprint) == (words == "")


facts = st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=4).map(tuple)


@given(facts, facts)
def test_equal_fingerprints_are_equal_facts(left, right):
    """Two formats have one fingerprint if, and only if, they have the same facts."""
    assert (Format(left).fingerprint == Format(right).fingerprint) == (left == right)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (instance(), ""),
        (instance(state=State.PAUSED), ""),
        (instance(state=State.DRAINING), ""),
        (
            instance(state=State.UPDATING),
            "state: UPDATING is changing its weights, and can be asked when it is through",
        ),
        (instance(state=State.DUMMY), "state: DUMMY holds no complete weights"),
        (instance(state=State.LANDING), "state: LANDING holds no complete weights"),
        (instance(state=State.FAILED), "state: FAILED holds no complete weights"),
        (instance(weights=Weights("v1", "", 1)), "state: READY holds no complete weights"),
        (
            instance(format=with_facts(dtype="float16")),
            "dtype: seed float16, target bfloat16",
        ),
        (instance(placement=Placement(2, 1)), ""),
        (instance(placement=Placement(1, 4)), ""),
        (instance(placement=Placement(1, 1, 2)), ""),
    ],
)
def test_reasons(source, reason):
    """An instance fits, or the first reason why it does not is said in words."""
    (judged,) = match(TARGET, [source])
    assert judged.reason == reason
    assert judged.fits == (reason == "")


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(), ""),
        (Placement(2, 1), "tensor_parallel_size: seed 2, target 1"),
        (Placement(1, 4), "expert_parallel_size: seed 4, target 1"),
    ],
)
def test_other_placements(placement, words):
    """An instance that is placed otherwise fits, and it is said in words how it is placed."""
    (judged,) = match(TARGET, [instance(placement=placement)])
    assert judged.fits
    assert judged.recut == words


def test_the_same_placement_comes_first():
    """However loaded, what can be copied comes before what must be cut anew."""
    fleet = [
        instance("a", placement=Placement(2)),
        instance("b", leases=9),
        instance("c", format=with_facts(dtype="float16")),
    ]
    assert [m.instance.instance for m in match(TARGET, fleet)] == ["b", "a", "c"]


def test_a_target_without_a_format_takes_any_holder():
    """Without a format or placement every complete holder fits, and no dummy does."""
    holder = instance(format=Format(()), placement=Placement(8, 8))
    assert [m.fits for m in match(Target(), [holder, instance(state=State.DUMMY)])] == [True, False]


def test_order():
    """Those that fit come first, the least loaded first, then by name; the target is left out."""
    fleet = [
        instance("d", leases=0, state=State.DUMMY),
        instance("c", leases=1),
        instance("b", leases=0),
        instance("a", leases=1),
        instance("target"),
    ]
    assert [m.instance.instance for m in match(TARGET, fleet)] == ["b", "a", "c", "d"]


def test_a_map_is_named_where_everything_else_is_the_same():
    """Its digest is what two instances can compare."""
    seed, target = Placement(2, 2, 4, "ab12"), Placement(2, 2, 4, "cd34")
    assert seed.difference(target) == "expert_map: seed ab12, target cd34"
    assert seed.difference(seed) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"placement": Placement(2)}, "tensor_parallel_size: seed 2, target 1"),
        ({"format": with_facts(dtype="float16")}, "dtype: seed float16, target bfloat16"),
        ({"filling": None}, "state: DUMMY holds no complete weights"),
        ({"filling": Filling("tiny", "v1", "digest", FILLING_EPOCH + 1, "target")},
         "it reads from target itself"),
        ({"filling": Filling("tiny", "v1", "digest", FILLING_EPOCH + 1, "between")},
         "it reads from target itself"),
    ],
)  # fmt: skip
def test_incomplete_ones(changes, reason):
    """One that is being filled fits as long as it is placed alike and isn't fed by the target."""
    coming = Filling("tiny", "v1", "digest", FILLING_EPOCH + 1, "seed")
    source = instance(
        "source", **{"state": State.DUMMY, "weights": Weights(), "filling": coming} | changes
    )
    between = instance(
        "between", state=State.DUMMY, filling=Filling("tiny", "v1", "digest", 1, "target")
    )
    judged = {m.instance.instance: m.reason for m in match(TARGET, [source, between])}
    assert judged["source"] == reason
