"""Who is asked for which blocks, and how fast each gives."""

import asyncio
import math

import pytest
from fakes import FakeClock, eventually
from hypothesis import given
from hypothesis import strategies as st

from relay_service.core import pool
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.pace import HALF_LIFE_SECONDS, SETTLE_SECONDS, Pace, fraction
from relay_service.core.pool import Pool


class Blocks:
    """Blocks of which some are missing, and a pool of them; four make a unit."""

    def __init__(self, count: int) -> None:
        self.there: set[int] = set()
        self.all = range(count)
        self.pool = Pool(self.missing, lambda block: block // 4)
        self.clock = FakeClock()

    def missing(self) -> list[int]:
        """Lists what has not come."""
        return [block for block in self.all if block not in self.there]

    def join(self) -> Pace:
        """Lets one more source take part."""
        pace = Pace(self.clock)
        self.pool.join(pace)
        return pace


def paced(clock: FakeClock, nbytes: int, seconds: float) -> Pace:
    """Returns the pace of a source that has given something within some time."""
    pace = Pace(clock)
    pace.asked()
    clock.now += seconds
    pace.landed(nbytes)
    return pace


def test_a_pace():
    """It is told after a while, counts only the time in which something is asked, and fades."""
    clock = FakeClock()
    pace = Pace(clock)
    pace.asked()
    clock.now += SETTLE_SECONDS / 2
    pace.landed(100)
    assert (pace.rate, pace.seconds_for(100)) == (None, None)
    clock.now += SETTLE_SECONDS / 2
    assert pace.rate == pytest.approx(100 / SETTLE_SECONDS, rel=0.2)
    before, silent = pace.rate, pace.silent_seconds
    pace.answered()
    clock.now += 1000
    assert (pace.rate, pace.silent_seconds) == (before, 0.0)
    assert silent == SETTLE_SECONDS / 2
    pace.asked()
    clock.now += 20 * HALF_LIFE_SECONDS
    assert pace.rate < before / 1000
    assert pace.silent_seconds == 20 * HALF_LIFE_SECONDS


def test_a_pace_of_nothing():
    """Who gives nothing would need for ever."""
    clock = FakeClock()
    assert paced(clock, 0, 1.0).seconds_for(1) == math.inf


def test_fractions():
    """Work is split by pace; who is not known yet counts as one of the others."""
    clock = FakeClock()
    fast, slow = paced(clock, 3000, 1.0), paced(clock, 1000, 1.0)
    for pace in (fast, slow):
        pace.answered()
    new = Pace(clock)
    parts = [fraction(one, [fast, slow, new]) for one in (fast, slow, new)]
    assert sum(parts) == pytest.approx(1.0)
    assert parts[0] > parts[2] > parts[1]
    assert fraction(new, [new, Pace(clock)]) == 0.5


async def test_one_source_is_asked_for_everything():
    """A source alone is asked for all that is missing, at once and in order."""
    blocks = Blocks(10)
    blocks.there = {3}
    claim = await blocks.pool.claim(blocks.join())
    assert claim.blocks == [0, 1, 2, 4, 5, 6, 7, 8, 9]


async def recalled(blocks: Blocks, first: Pace, second: Pace):
    """Has a second source come while the first one is asked for everything."""
    claim = await blocks.pool.claim(first)
    waiting = asyncio.create_task(blocks.pool.claim(second))
    await eventually(lambda: claim.recalled)
    assert not waiting.done()
    again = asyncio.create_task(_again(blocks, claim, first))
    return await again, await waiting


async def _again(blocks: Blocks, claim, reader: Pace):
    blocks.pool.give_back(claim)
    return await blocks.pool.claim(reader)


async def test_a_second_source_takes_the_tail():
    """What the first has not given is shared: the front stays with it, and units stay whole."""
    blocks = Blocks(18)
    a, b = await recalled(blocks, blocks.join(), blocks.join())
    assert [*a.blocks, *b.blocks] == list(range(18))
    assert b.blocks[0] in (8, 12)


async def test_what_is_over_soon_is_not_recalled(monkeypatch):
    """Nothing is recalled of who has given it in no time, of a few blocks, or of a last one."""
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.001)
    blocks = Blocks(1000)
    fast, idle = blocks.join(), blocks.join()
    claim = await blocks.pool.claim(fast)
    blocks.clock.now += 1
    fast.landed(100_000 * BLOCK_BYTES)
    waiting = asyncio.create_task(blocks.pool.claim(idle))
    looks = 0

    def look():
        nonlocal looks
        looks += 1
        return looks > 20 or claim.recalled

    await eventually(look)
    assert not claim.recalled
    blocks.there = set(range(999))
    blocks.clock.now += 1000
    looks = 0
    await eventually(look)
    assert not claim.recalled
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_what_came_wrong_is_asked_of_another():
    """A block goes to somebody else, and back only where nobody else is left to ask."""
    blocks = Blocks(1)
    liar, honest = blocks.join(), blocks.join()
    claim = await blocks.pool.claim(liar)
    blocks.pool.came_wrong(liar, 0)
    blocks.pool.give_back(claim)
    waiting = asyncio.create_task(blocks.pool.claim(liar))
    await asyncio.sleep(0)
    assert not waiting.done()
    claim = await blocks.pool.claim(honest)
    assert claim.blocks == [0]
    assert not waiting.done()
    blocks.pool.came_wrong(honest, 0)
    blocks.pool.give_back(claim)
    assert (await waiting).blocks == [0]


async def test_leaving():
    """Who has left is given nothing more, and what it is asked for is recalled."""
    blocks = Blocks(4)
    leaver, other = blocks.join(), blocks.join()
    claim = await blocks.pool.claim(leaver)
    waiting = asyncio.create_task(blocks.pool.claim(other))
    blocks.pool.leave(leaver)
    assert claim.recalled
    assert await blocks.pool.claim(leaver) is None
    blocks.pool.give_back(claim)
    assert (await waiting).blocks == [0, 1, 2, 3]


@given(st.data())
def test_every_block_once(data):
    """Whoever joins, fails or lies: no block is asked of two at a time, and all land."""
    asyncio.run(_play(data))


async def _play(data) -> None:
    blocks = Blocks(data.draw(st.integers(1, 40), label="blocks"))
    asked: set[int] = set()
    most = data.draw(st.integers(2, 4), label="sources")

    async def read(number: int) -> None:
        """Reads some of each claim, and then returns, is recalled, lies or fails."""
        reader = blocks.join()
        while claim := await blocks.pool.claim(reader):
            assert claim.blocks
            assert not asked & set(claim.blocks), "asked of two"
            asked.update(claim.blocks)
            for block in claim.blocks:
                assert block not in blocks.there, "read twice"
                await asyncio.sleep(0)
                end = data.draw(st.sampled_from(["on", "on", "on", "lie", "fail", "slow"]))
                if end == "slow":
                    blocks.clock.now += 1
                if end == "lie":
                    blocks.pool.came_wrong(reader, block)
                    break
                if end == "fail":
                    break
                blocks.there.add(block)
                reader.landed(BLOCK_BYTES)
                if claim.recalled:
                    break
            asked.difference_update(claim.blocks)
            blocks.pool.give_back(claim)
            if number and end == "fail":
                blocks.pool.leave(reader)

    async with asyncio.timeout(20):
        await asyncio.gather(*(read(number) for number in range(most)))
    assert not blocks.missing()
