"""Which sequences run next, and where their KV goes."""

import contextlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_service.core.blocks import BlockPool
from engine_service.core.request import Finish, GenerationRequest, Sequence
from engine_service.core.rows import row_of
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.step_messages import Sampled, Sampling
from engine_service.errors import EngineError, InvalidRequest, QueueFull, RequestExists
from relay_service.core.instance import Weights

WEIGHTS = Weights("v1", "digest", 1)


def request(
    length: int = 4, max_tokens: int = 100, stop_ids=(), first: int = 1, priority: int = 0, name=""
) -> GenerationRequest:
    """Returns a request with a prompt of so many tokens."""
    return GenerationRequest(
        prompt=tuple(range(first, first + length)), sampling=Sampling(), max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids), priority=priority, request=name,
    )  # fmt: skip


def scheduler(
    blocks: int = 16, context: int = 1000, running: int = 8, waiting: int = 8, chunk: int = 512
) -> Scheduler:
    """Returns a scheduler over blocks of 4 tokens."""
    return Scheduler(Limits(context, running, waiting, 4, chunk), BlockPool(blocks, 4))


def chunks(one: Scheduler, token: int = 7) -> dict[Sequence, int]:
    """Runs one step; returns how many tokens it computed for whom."""
    batch = one.schedule(WEIGHTS)
    found = {sequence: sequence.chunk for sequence in batch}
    one.commit(batch, Sampled((token,) * len(batch)), WEIGHTS)
    return found


def step(one: Scheduler, token: int = 7) -> list[int]:
    """Runs one step in which every row samples the same token; returns who was in it."""
    batch = one.schedule(WEIGHTS)
    one.commit(batch, Sampled((token,) * len(batch)), WEIGHTS)
    return [sequence.number for sequence in batch]


def add(one: Scheduler, asked: GenerationRequest) -> Sequence:
    """Queues a request that wants one answer."""
    (sequence,) = one.add(asked)
    return sequence


def events(sequence) -> list:
    """Takes what was published so far: tokens, ends and errors."""
    found = []
    while not sequence.events.empty():
        event = sequence.events.get_nowait()
        found.append(event if isinstance(event, Exception) else (event.token, event.finish))
    return found


def test_prefill_then_decode():
    """The first row is the whole prompt, each later one the last token, at its position."""
    one = scheduler()
    sequence = add(one, request(6))
    (first,) = one.schedule(WEIGHTS)
    row = row_of(first)
    assert (row.tokens, row.position, row.output_index) == ((1, 2, 3, 4, 5, 6), 0, 0)
    assert len(row.blocks) == 2
    one.commit([first], Sampled((7,)), WEIGHTS)
    one.commit(one.schedule(WEIGHTS), Sampled((8,)), WEIGHTS)
    row = row_of(one.schedule(WEIGHTS)[0])
    assert (row.tokens, row.position, row.output_index) == ((8,), 7, 2)
    assert events(sequence) == [(7, None), (8, None)]


def test_order():
    """Who came first runs first, and those who wait join the batch behind."""
    one = scheduler(running=2)
    a, b, c = (add(one, request(max_tokens=m)).number for m in (2, 3, 2))
    assert [step(one) for _ in range(5)] == [[a, b], [a, b], [b, c], [c], []]


@pytest.mark.parametrize(
    ("asked", "token", "steps", "finish"),
    [
        (request(max_tokens=3), 7, 3, Finish.LENGTH),
        (request(max_tokens=1), 7, 1, Finish.LENGTH),
        (request(stop_ids=[7]), 7, 1, Finish.STOP),
        (request(max_tokens=1, stop_ids=[7]), 7, 1, Finish.STOP),
        (request(8), 7, 4, Finish.LENGTH),
    ],
)
def test_ends(asked, token, steps, finish):
    """A sequence ends at a stop token, at its most tokens or at the context, and frees its KV."""
    one = scheduler(context=12)
    sequence = add(one, asked)
    for _ in range(steps):
        assert sequence.finish is None
        step(one, token)
    assert sequence.finish is finish
    assert events(sequence) == [(token, None)] * (steps - 1) + [(token, finish)]
    assert (one.pool.used, one.running) == (0, [])


@pytest.mark.parametrize(
    ("asked", "blocks", "words"),
    [(request(0), 16, "empty"), (request(12), 16, "12 tokens"), (request(8), 2, "may have 8")],
)
def test_requests_that_can_never_be_served(asked, blocks, words):
    """No prompt, or one that fills the context or the whole cache, is refused at once."""
    one = scheduler(blocks=blocks, context=12)
    with pytest.raises(InvalidRequest, match=words):
        one.add(asked)
    assert not one.waiting


def test_the_longest_prompt_that_fits():
    """A prompt of one token less than the context is served, and gets one token."""
    one = scheduler(context=12)
    sequence = add(one, request(11))
    step(one)
    assert events(sequence) == [(7, Finish.LENGTH)]


def test_a_full_queue():
    """Beyond the queue's limit requests are refused; a place that gets free is given again."""
    one = scheduler(waiting=2)
    one.add(request())
    one.add(request())
    with pytest.raises(QueueFull, match="2 requests wait already"):
        one.add(request())
    step(one)
    one.add(request())


def test_the_youngest_is_preempted():
    """Without a free block the youngest goes back to the head of the queue and starts over."""
    one = scheduler(blocks=4)
    old, young = add(one, request(7)), add(one, request(7, first=50))
    later = add(one, request(1))
    assert step(one) == step(one) == [old.number, young.number]
    assert one.pool.free == 0 or young in one.running
    ran = step(one)
    assert ran == [old.number]
    assert [s.number for s in one.waiting] == [young.number, later.number]
    assert young.blocks == []
    assert (young.pending, young.cached) == (9, 0)
    one.remove(old, Finish.ABORT)
    assert step(one)[0] == young.number
    assert [token for token, _ in events(young)] == [7, 7, 7]


def test_prompts_share_a_budget():
    """A step computes so many prompt tokens and no more, whoever they belong to."""
    one = scheduler(blocks=100, chunk=10)
    a, b, c = (add(one, request(n, first=100 * n)) for n in (6, 7, 9))
    assert chunks(one) == {a: 6, b: 4}
    assert chunks(one) == {a: 1, b: 3, c: 7}
    assert chunks(one) == {a: 1, b: 1, c: 2}
    assert chunks(one) == {a: 1, b: 1, c: 1}
    assert [len(events(s)) for s in (a, b, c)] == [4, 3, 2]


def test_a_long_prompt_stalls_nobody():
    """While a prompt of many chunks is read, an answer that runs gets a token in every step."""
    one = scheduler(blocks=100, chunk=8)
    running = add(one, request(4))
    step(one)
    long = add(one, request(80, first=200))
    for number in range(10):
        assert len(events(running)) == 1
        assert (long.cached, long.output) == (8 * number, [])
        step(one)
    assert len(events(long)) == 1


def test_a_row_of_a_chunk():
    """A chunk is placed behind the one before, and only the last one samples."""
    one = scheduler(chunk=4)
    sequence = add(one, request(6))
    (sequence,) = one.schedule(WEIGHTS)
    row = row_of(sequence)
    assert (row.tokens, row.position, row.samples) == ((1, 2, 3, 4), 0, False)
    one.commit([sequence], Sampled((-1,)), WEIGHTS)
    row = row_of(*one.schedule(WEIGHTS))
    assert (row.tokens, row.position, row.samples, row.output_index) == ((5, 6), 4, True, 0)
    assert events(sequence) == []


def test_the_higher_priority_runs_first():
    """Among those that wait the higher priority goes first, equal ones in their order."""
    one = scheduler(running=1)
    asked = [(0, 1), (5, 1), (0, 1), (5, 1), (-1, 1)]
    numbers = [add(one, request(4, most, priority=priority)).number for priority, most in asked]
    order = [step(one)[0] for _ in asked]
    assert order == [numbers[i] for i in (1, 3, 0, 2, 4)]


def test_the_lowest_priority_is_preempted():
    """Without a free block the lowest priority gives its blocks up, even if it came first."""
    one = scheduler(blocks=4)
    low, high = add(one, request(7, priority=-1)), add(one, request(7, first=50))
    while low in one.running or not low.output:
        step(one)
    assert high in one.running


def test_several_answers():
    """The prompt is computed once; each answer has its seed, and its events say which it is."""
    one = scheduler(chunk=100)
    first, second, third = one.add(request(9), 3)
    assert chunks(one) == {first: 9}
    assert chunks(one) == {first: 1, second: 1, third: 1}
    assert (second.cached, second.reused) == (9, 8)
    assert [s.request.sampling.seed for s in (first, second, third)] == [0, 1, 2]
    found = [first.events.get_nowait().index for _ in range(first.events.qsize())]
    assert found == [0, 0, 1, 2]
    one.remove(first, Finish.ABORT)
    assert chunks(one) == {second: 1, third: 1}


def test_answers_do_not_wait_for_one_that_left():
    """When the answer that was to compute the prompt leaves, the next one does."""
    one = scheduler(chunk=4)
    first, second = one.add(request(6), 2)
    assert chunks(one) == {first: 4}
    one.remove(first, Finish.ABORT)
    assert second in chunks(one)


def test_names():
    """A name is taken while its request is served, and free before and after."""
    one = scheduler()
    sequence = add(one, request(name="a"))
    add(one, request(name="b"))
    with pytest.raises(RequestExists, match="'a'"):
        one.add(request(name="a"))
    assert one.named("a") == [sequence]
    one.remove(sequence, Finish.ABORT)
    assert one.named("a") == []
    add(one, request(name="a"))
    add(one, request())
    add(one, request())
    assert one.named("") == []


@pytest.mark.parametrize("stage", ["waiting", "scheduled", "running", "preempted", "finished"])
def test_cancelling_at_every_stage(stage):
    """A sequence that is cancelled frees its blocks and its place, wherever it is; twice too."""
    one = scheduler(blocks=4)
    other = add(one, request(7)) if stage == "preempted" else None
    sequence = add(one, request(7, max_tokens=1 if stage == "finished" else 100))
    batch = [] if stage == "waiting" else one.schedule(WEIGHTS)
    if stage in ("running", "finished"):
        one.commit(batch, Sampled((7,) * len(batch)), WEIGHTS)
    if stage == "preempted":
        while sequence not in one.waiting:
            one.commit(batch, Sampled((7,) * len(batch)), WEIGHTS)
            batch = one.schedule(WEIGHTS)
    for _ in range(2):
        one.remove(sequence, Finish.ABORT)
    if stage == "scheduled":
        one.commit(batch, Sampled((7,)), WEIGHTS)
        assert events(sequence) == []
    assert sequence not in one.running
    assert sequence not in one.waiting
    assert one.pool.used == (len(other.blocks) if other else 0)
    assert sequence.finish is (Finish.LENGTH if stage == "finished" else Finish.ABORT)


def test_a_batch_that_lost_one():
    """A token for a sequence that left during the step is dropped; the others get theirs."""
    one = scheduler()
    stays, leaves = add(one, request()), add(one, request())
    batch = one.schedule(WEIGHTS)
    one.remove(leaves, Finish.ABORT)
    one.commit(batch, Sampled((7, 8)), WEIGHTS)
    assert events(stays) == [(7, None)]
    assert leaves.output == []


def test_ending_all():
    """Draining ends every sequence with what it has, failing ends every one with the error."""
    one = scheduler(running=1)
    sequences = [add(one, request()) for _ in range(2)]
    step(one)
    one.abort_all(WEIGHTS)
    assert [events(s) for s in sequences] == [
        [(7, None), (None, Finish.ABORT)],
        [(None, Finish.ABORT)],
    ]
    sequences = [add(one, request()) for _ in range(2)]
    step(one)
    error = EngineError("over")
    one.fail_all(error)
    assert [events(s)[-1] for s in sequences] == [error, error]
    assert (one.pool.used, one.running, list(one.waiting)) == (0, [], [])


class Blocks(RuleBasedStateMachine):
    """Requests come, run, end and leave in any order; many of them begin alike.

    The KV of a position is stood for by the tokens that it depends on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(blocks=9, context=40, running=4, waiting=5, chunk=7)
        self.live = []
        self.batch = None
        self.kv = {}

    @rule(
        length=st.integers(0, 45), max_tokens=st.integers(1, 60), answers=st.integers(1, 3),
        priority=st.integers(0, 1), first=st.sampled_from([1, 1, 5]),
    )  # fmt: skip
    def add(self, length, max_tokens, answers, priority, first):
        """A request comes."""
        asked = request(length, max_tokens, [3], first, priority)
        with contextlib.suppress(InvalidRequest, QueueFull):
            self.live += self.scheduler.add(asked, answers)

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self):
        """A step begins: it reads what was computed before, then writes."""
        self.batch = self.scheduler.schedule(WEIGHTS)
        rows = [row_of(sequence) for sequence in self.batch]
        for sequence, row in zip(self.batch, rows, strict=True):
            tokens = sequence.part(0, sequence.length)
            for position in range(row.position):
                place = row.blocks[position // 4], position % 4
                assert self.kv[place] == tokens[: position + 1]
        for sequence, row in zip(self.batch, rows, strict=True):
            tokens = sequence.part(0, sequence.length)
            assert row.tokens
            assert row.samples == (row.position + len(row.tokens) == len(tokens))
            for position in range(row.position, row.position + len(row.tokens)):
                place = row.blocks[position // 4], position % 4
                self.kv[place] = tokens[: position + 1]
        assert sum(len(row.tokens) for row in rows if len(row.tokens) > 1) <= 7
        assert self.batch or not self.scheduler.waiting

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def commit(self, data):
        """A step ends."""
        tokens = tuple(data.draw(st.integers(1, 9)) for _ in self.batch)
        self.scheduler.commit(self.batch, Sampled(tokens), WEIGHTS)
        self.batch = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        """Somebody leaves, perhaps within a step, perhaps after the end."""
        self.scheduler.remove(data.draw(st.sampled_from(self.live)), Finish.ABORT)

    @rule()
    def abort_all(self):
        """Everybody is sent away."""
        self.scheduler.abort_all(WEIGHTS)
        assert self.scheduler.pool.used == 0

    @rule()
    def forget(self):
        """The prefix cache is emptied."""
        self.scheduler.pool.forget()
        assert self.scheduler.pool.cached == 0

    @invariant()
    def no_block_is_lost(self):
        """Every block is free, or belongs to as many running sequences as are counted."""
        pool, one = self.scheduler.pool, self.scheduler
        owned = Counter(block for sequence in self.live for block in sequence.blocks)
        assert sorted([*owned, *pool._empty, *pool._unused]) == list(range(pool.total))
        assert pool.used == len(owned)
        assert all(pool._holders[block] == owned[block] for block in range(pool.total))
        assert all(sequence in one.running for sequence in self.live if sequence.blocks)
        assert all(sequence.finish is None for sequence in [*one.running, *one.waiting])
        assert len(one.running) <= one.limits.max_running


Blocks.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestBlocks = Blocks.TestCase
