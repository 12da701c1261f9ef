"""KV blocks are found by what is in them, and given up in a sensible order."""

from engine_service.core.blocks import BlockPool, extend_keys


def keys(tokens, origin: str = "1/digest") -> list[bytes]:
    """Returns the keys of a sequence's full blocks of 4 tokens."""
    found = []
    extend_keys(found, origin, tokens, 4)
    return found


def filled(pool: BlockPool, tokens, origin: str = "1/digest") -> list[int]:
    """Gives a sequence blocks and publishes the full ones."""
    blocks = []
    assert pool.grow(blocks, len(tokens))
    for block, key in zip(blocks, keys(tokens, origin), strict=False):
        pool.publish(block, key)
    return blocks


def test_a_key_stands_for_all_that_its_block_depends_on():
    """The same tokens behind others, or by other weights, are something else."""
    same = keys(range(8))
    assert len(same) == 2
    assert keys(range(11)) == same
    assert keys([9, 1, 2, 3, 4, 5, 6, 7])[1] != same[1]
    assert not set(keys(range(8), "2/digest")) & set(same)
    assert not set(keys(range(8), "1/other")) & set(same)
    grown = same[:1]
    extend_keys(grown, "1/digest", range(8), 4)
    assert grown == same


def test_a_beginning_is_found_as_far_as_it_is_there():
    """Blocks are shared while they are held and after; the first unknown key ends the search."""
    pool = BlockPool(8, 4)
    first = filled(pool, range(9))
    assert (len(first), pool.cached) == (3, 2)
    assert pool.find(keys([*range(4), 9, 9, 9, 9])) == first[:1]
    assert pool.used == 3
    pool.release(first)
    assert (pool.used, pool.free) == (1, 7)
    assert len(pool.find(keys(range(8)))) == 2


def test_what_was_not_used_for_longest_goes_first():
    """Room is taken from the oldest, from the end of it; and what is held stays."""
    pool = BlockPool(4, 4)
    old, new = filled(pool, range(8)), filled(pool, range(50, 58))
    pool.release(old)
    pool.release(new)
    taken = []
    assert pool.grow(taken, 4)
    assert len(pool.find(keys(range(8)))) == 1
    assert len(pool.find(keys(range(50, 58)))) == 2
    assert not pool.grow([], 4)


def test_the_same_content_twice():
    """Two that compute the same at once publish it once; both can be released."""
    pool = BlockPool(4, 4)
    one, other = filled(pool, range(8)), filled(pool, range(8))
    assert pool.cached == 2
    pool.release(other)
    pool.release(one)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 4)


def test_forgetting():
    """After a flush nothing is found, and what was held goes back to the free ones."""
    pool = BlockPool(4, 4)
    held, left = filled(pool, range(4)), filled(pool, range(50, 54))
    pool.release(left)
    assert pool.forget() == 2
    assert (pool.cached, pool.used) == (0, 1)
    assert pool.find(keys(range(4))) == []
    pool.release(held)
    assert pool.grow([], 16)
