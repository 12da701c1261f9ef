"""Grants: who may read which blocks on a connection of its own, once and for how long."""

from itertools import pairwise

import pytest
from fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core.grants import (
    GRANT_SECONDS,
    MAX_CONNECTIONS,
    MAX_PER_READ,
    NAME_BYTES,
    TOKEN_BYTES,
    Grant,
    Grants,
    check_runs,
    runs_of,
)
from relay_service.errors import InvalidRequest, Refused, ResourceExhausted

GRANT = Grant("lease", "seed", "life", 1, 0, ((0, 4), (9, 1)))
BLOCKS = st.lists(st.integers(0, 60), max_size=40)


def test_a_grant_is_good_once():
    """Whoever shows it first gets what it permits; a second time it is unknown."""
    grants = Grants()
    first, second = grants.issue(GRANT, 2)
    assert first != second
    assert grants.redeem(first) is GRANT
    assert grants.redeem(second) is GRANT
    for used in (first, second):
        with pytest.raises(Refused):
            grants.redeem(used)


def test_a_grant_expires():
    """A grant that nobody shows in time is refused, and takes no room any more."""
    clock = FakeClock()
    grants = Grants(clock)
    in_time, late = grants.issue(GRANT, 2)
    clock.now += GRANT_SECONDS - 0.1
    grants.redeem(in_time)
    clock.now += 0.2
    with pytest.raises(Refused):
        grants.redeem(late)
    assert grants.in_use == 1


def test_its_name_alone_is_worth_nothing():
    """A wrong secret is refused and does not spoil the grant; neither does one cut short."""
    grants = Grants()
    (token,) = grants.issue(GRANT, 1)
    secret = token[NAME_BYTES:]
    wrong = [bytes([secret[0] ^ 1]) + secret[1:], secret[:-1], b"", secret + b"\0"]
    for other in wrong:
        with pytest.raises(Refused):
            grants.redeem(token[:NAME_BYTES] + other)
    assert len(token) == TOKEN_BYTES
    assert grants.redeem(token) is GRANT


def test_connections_are_few():
    """The fuller a relay is, the fewer connections one reader gets; in the end none."""
    grants, given_out = Grants(), []
    while grants.in_use < MAX_CONNECTIONS:
        given_out.append(grants.issue(GRANT, 100))
    with pytest.raises(ResourceExhausted):
        grants.issue(GRANT, 1)
    counts = [len(tokens) for tokens in given_out]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (MAX_PER_READ, 1)
    assert grants.in_use == sum(counts) == MAX_CONNECTIONS
    grants.redeem(given_out[0][0])
    assert grants.in_use == MAX_CONNECTIONS
    grants.release()
    assert grants.in_use == MAX_CONNECTIONS - 1
    assert len(grants.issue(GRANT, 0)) == 1


@given(BLOCKS)
def test_runs_are_the_blocks(blocks):
    """Runs hold just these blocks, in order, as few of them as can be."""
    runs = runs_of(blocks)
    assert [b for first, count in runs for b in range(first, first + count)] == sorted(set(blocks))
    assert all(first > sum(before) for before, (first, _) in pairwise(runs))
    if runs:
        check_runs(runs, 61)


@given(BLOCKS, st.integers(-2, 70), st.integers(-2, 12))
def test_a_grant_covers_its_blocks_and_no_others(blocks, first, count):
    """A run may be read just when each of its blocks is granted."""
    grant = Grant("lease", "seed", "life", 1, 0, runs_of(blocks))
    wanted = set(range(first, first + count))
    assert grant.covers(first, count) == (bool(wanted) and wanted <= set(blocks))


@pytest.mark.parametrize(
    "runs",
    [(), ((0, 0),), ((-1, 2),), ((4, 2), (0, 1)), ((0, 2), (1, 1)), ((9, 2),), ((0, 1 << 62),)],
)
def test_runs_that_cannot_be(runs):
    """Runs that are empty, out of order, doubled or beyond the end are refused."""
    with pytest.raises(InvalidRequest):
        check_runs(runs, 10)
