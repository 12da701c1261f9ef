"""Which sequences run next, and where their KV goes."""

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_service.core import scheduler as module
from engine_service.core.blocks import BlockPool
from engine_service.core.messages import Sampling
from engine_service.core.request import Finish, GenerationRequest
from engine_service.core.scheduler import Limits, Scheduler, row_of
from engine_service.errors import EngineError, InvalidRequest, QueueFull
from relay_service.core.instance import Weights

WEIGHTS = Weights("v1", "digest", 1)


def request(length: int = 4, max_tokens: int = 100, stop_ids=()) -> GenerationRequest:
    """Returns a request with a prompt of so many tokens."""
    return GenerationRequest(
        prompt=tuple(range(1, length + 1)),
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids),
    )


def scheduler(
    blocks: int = 16, context: int = 1000, running: int = 8, waiting: int = 8
) -> Scheduler:
    """Returns a scheduler over blocks of 4 tokens."""
    return Scheduler(Limits(context, running, waiting, 4), BlockPool(blocks, 4))


def step(one: Scheduler, token: int = 7) -> list[int]:
    """Runs one step in which every row samples the same token; returns who was in it."""
    batch = one.schedule()
    one.commit(batch, (token,) * len(batch), WEIGHTS)
    return [sequence.number for sequence in batch]


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
    sequence = one.add(request(6))
    (first,) = one.schedule()
    row = row_of(first)
    assert (row.tokens, row.position, row.output_index) == ((1, 2, 3, 4, 5, 6), 0, 0)
    assert len(row.blocks) == 2
    one.commit([first], (7,), WEIGHTS)
    one.commit(one.schedule(), (8,), WEIGHTS)
    row = row_of(one.schedule()[0])
    assert (row.tokens, row.position, row.output_index) == ((8,), 7, 2)
    assert events(sequence) == [(7, None), (8, None)]


def test_order():
    """Who came first runs first, and those who wait join the batch behind."""
    one = scheduler(running=2)
    a, b, c = (one.add(request(max_tokens=m)).number for m in (2, 3, 2))
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
    sequence = one.add(asked)
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
    sequence = one.add(request(11))
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
    old, young = one.add(request(7)), one.add(request(7))
    later = one.add(request(1))
    assert step(one) == step(one) == [old.number, young.number]
    assert one.pool.free == 0 or young in one.running
    ran = step(one)
    assert ran == [old.number]
    assert [s.number for s in one.waiting] == [young.number, later.number]
    assert young.blocks == []
    assert young.pending == (*range(1, 8), 7, 7)
    one.remove(old, Finish.ABORT)
    assert step(one)[0] == young.number
    assert [token for token, _ in events(young)] == [7, 7, 7]


def test_prompts_share_a_budget(monkeypatch):
    """A step takes as many prompts as its budget holds; one that is larger alone goes alone."""
    monkeypatch.setattr(module, "MAX_PREFILL_TOKENS", 10)
    one = scheduler(blocks=100)
    a, b, c, d = (one.add(request(n)).number for n in (6, 4, 1, 30))
    assert step(one) == [a, b]
    assert step(one) == [a, b, c]
    assert step(one) == [a, b, c, d]


@pytest.mark.parametrize("stage", ["waiting", "scheduled", "running", "preempted", "finished"])
def test_cancelling_at_every_stage(stage):
    """A sequence that is cancelled frees its blocks and its place, wherever it is; twice too."""
    one = scheduler(blocks=4)
    other = one.add(request(7)) if stage == "preempted" else None
    sequence = one.add(request(7, max_tokens=1 if stage == "finished" else 100))
    batch = [] if stage == "waiting" else one.schedule()
    if stage in ("running", "finished"):
        one.commit(batch, (7,) * len(batch), WEIGHTS)
    if stage == "preempted":
        while sequence not in one.waiting:
            one.commit(batch, (7,) * len(batch), WEIGHTS)
            batch = one.schedule()
    for _ in range(2):
        one.remove(sequence, Finish.ABORT)
    if stage == "scheduled":
        one.commit(batch, (7,), WEIGHTS)
        assert events(sequence) == []
    assert sequence not in one.running
    assert sequence not in one.waiting
    assert one.pool.used == (len(other.blocks) if other else 0)
    assert sequence.finish is (Finish.LENGTH if stage == "finished" else Finish.ABORT)


def test_a_batch_that_lost_one():
    """A token for a sequence that left during the step is dropped; the others get theirs."""
    one = scheduler()
    stays, leaves = one.add(request()), one.add(request())
    batch = one.schedule()
    one.remove(leaves, Finish.ABORT)
    one.commit(batch, (7, 8), WEIGHTS)
    assert events(stays) == [(7, None)]
    assert leaves.output == []


def test_ending_all():
    """Draining ends every sequence with what it has, failing ends every one with the error."""
    one = scheduler(running=1)
    sequences = [one.add(request()) for _ in range(2)]
    step(one)
    one.abort_all(WEIGHTS)
    assert [events(s) for s in sequences] == [
        [(7, None), (None, Finish.ABORT)],
        [(None, Finish.ABORT)],
    ]
    sequences = [one.add(request()) for _ in range(2)]
    step(one)
    error = EngineError("over")
    one.fail_all(error)
    assert [events(s)[-1] for s in sequences] == [error, error]
    assert (one.pool.used, one.running, list(one.waiting)) == (0, [], [])


class Blocks(RuleBasedStateMachine):
    """Requests come, run, end and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(blocks=9, context=40, running=4, waiting=5)
        self.live = []
        self.batch = None

    @rule(length=st.integers(0, 45), max_tokens=st.integers(1, 60))
    def add(self, length, max_tokens):
        """A request comes."""
        with contextlib.suppress(InvalidRequest, QueueFull):
            self.live.append(self.scheduler.add(request(length, max_tokens, [3])))

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self):
        """A step begins."""
        self.batch = self.scheduler.schedule()
        for sequence in self.batch:
            row = row_of(sequence)
            assert row.tokens
            assert row.position + len(row.tokens) == sequence.length
            assert len(row.blocks) * 4 >= sequence.length
        assert self.batch or not self.scheduler.waiting

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def commit(self, data):
        """A step ends."""
        tokens = tuple(data.draw(st.integers(1, 9)) for _ in self.batch)
        self.scheduler.commit(self.batch, tokens, WEIGHTS)
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

    @invariant()
    def no_block_is_lost_or_shared(self):
        """Every block is free or belongs to one sequence that runs."""
        pool, one = self.scheduler.pool, self.scheduler
        owned = [block for sequence in self.live for block in sequence.blocks]
        assert sorted([*owned, *pool._free]) == list(range(pool.total))
        assert all(sequence in one.running for sequence in self.live if sequence.blocks)
        assert all(sequence.finish is None for sequence in [*one.running, *one.waiting])
        assert len(one.running) <= one.limits.max_running


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlocks = Blocks.TestCase
