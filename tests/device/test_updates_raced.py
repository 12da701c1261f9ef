"""Updates of a model that serves, among streams, pauses and other callers."""

import asyncio
import itertools

import pytest
from engines import tokens
from updated_service import PROMPT, from_disk, write

from clients.engine import EngineClient
from clients.errors import CallFailed
from seedrelay.v1 import engine_pb2

ABORT, LENGTH = engine_pb2.FINISH_REASON_ABORT, engine_pb2.FINISH_REASON_LENGTH
KEEP, RETRACT = engine_pb2.PAUSE_MODE_KEEP, engine_pb2.PAUSE_MODE_RETRACT
REFUSED = {"FAILED_PRECONDITION", "UNAVAILABLE"}
"""What a call may be told that another one has come before."""
LIMIT_SECONDS = 10.0
UPDATES, ROUNDS = 50, 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A and B."""
    root = tmp_path_factory.mktemp("raced")
    return [write(root / name, seed) for name, seed in (("a", 1), ("b", 2))]


class Stream:
    """A stream that is read to its end."""

    def __init__(self, client, prompt, count):
        self.chunks, self.begun = [], asyncio.Event()
        self._wanted = engine_pb2.GenerateRequest(
            **tokens(*prompt, max_tokens=count, ignore_eos=True)
        )
        self.ended = asyncio.ensure_future(self._read(client))

    @property
    def tokens(self):
        """What came."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    async def reach(self, count):
        """Waits until so many tokens have come."""
        while len(self.tokens) < count:
            self.begun.clear()
            await self.begun.wait()

    async def _read(self, client):
        async for chunk in client.generate(self._wanted):
            self.chunks.append(chunk)
            self.begun.set()


def _streams(client, number, count):
    return [Stream(client, [n + 1, *PROMPT[:7]], count) for n in range(number)]


async def test_every_rank_is_told(serving, folders):
    """S17: who pauses, updates or checks reaches both, and the replies name both."""
    engine, fresh = await serving.start(folders[0], tp=2), await serving.start(folders[1], tp=2)
    async with EngineClient(engine.service.address) as other:
        await engine.client.pause(engine_pb2.PauseGenerationRequest())
        late = Stream(other, PROMPT, 12)
        report = await engine.update("v2", folders[1])
        assert [(one.rank, one.digest) for one in report.ranks] == list(
            enumerate(fresh.facts.digests)
        )
        assert all(one.bytes_changed > 0 for one in report.ranks)
        assert (await other.status()).pause.operator
        assert late.tokens == []
        await other.resume()
        await late.ended
    found = await engine.client.check(
        engine_pb2.CheckWeightsRequest(mode=engine_pb2.CHECK_MODE_DIGEST), 60
    )
    assert found.equal
    assert [one.digest for one in found.ranks] == list(fresh.facts.digests)
    assert late.tokens == (await fresh.say()).tokens


async def test_abort_and_flush_under_load(serving, folders):
    """S18: each update serves with an empty cache, and every stream gets its last message."""
    engine = await serving.start(folders[0])
    for number in range(UPDATES):
        streams = _streams(engine.client, 16, 60)
        await asyncio.gather(*(one.reach(1) for one in streams[:8]))
        report = await engine.update(
            f"v{number}", folders[1 - number % 2], pause_mode="PAUSE_MODE_ABORT", clear_cache=True
        )
        assert not report.cache_kept
        assert report.requests.aborted > 0
        async with asyncio.timeout(LIMIT_SECONDS):
            await asyncio.gather(*(one.ended for one in streams))
        for one in streams:
            last = one.chunks[-1]
            assert last.finish_reason in (ABORT, LENGTH)
            assert len(one.tokens) == last.usage.completion_tokens
            assert len(last.version_spans) <= 1
    fresh = await serving.start(folders[UPDATES % 2])
    assert (await engine.say()).tokens == (await fresh.say()).tokens


async def test_a_flush_while_streams_are_retracted(serving, folders):
    """S19: nothing in the queue holds it up, and each stream gets all its tokens."""
    engine = await serving.start(folders[0])
    streams = _streams(engine.client, 8, 40)
    await asyncio.gather(*(one.reach(3) for one in streams))
    async with asyncio.timeout(LIMIT_SECONDS):
        paused = await engine.client.pause(engine_pb2.PauseGenerationRequest(mode=RETRACT))
        assert paused.requests.retracted == 8
        flushed = await engine.client.flush()
        assert flushed.blocks_in_use == 0
        await engine.update("v2", folders[1])
        await engine.client.resume()
        await asyncio.gather(*(one.ended for one in streams))
    assert [len(one.tokens) for one in streams] == [40] * 8


async def test_a_stream_of_two_versions(serving, folders):
    """S26: the version switches once, where it was paused, and the spans say so."""
    engine = await serving.start(folders[0])
    stream = Stream(engine.client, PROMPT, 60)
    await stream.reach(20)
    await engine.client.pause(engine_pb2.PauseGenerationRequest(mode=KEEP))
    await engine.update("v2", folders[1])
    await engine.client.resume()
    await stream.ended
    labels = [c.weight_version for c in stream.chunks for _ in c.token_ids]
    runs = [(version, len(list(run))) for version, run in itertools.groupby(labels)]
    (first, before), (second, after) = runs
    assert (first, second, before + after) == ("v1", "v2", 60)
    assert before >= 20
    spans = stream.chunks[-1].version_spans
    assert [(one.weight_version, one.start, one.end) for one in spans] == [
        ("v1", 0, before), ("v2", before, 60),
    ]  # fmt: skip


async def test_pause_update_and_continue_race(serving, folders):
    """S21: three callers, no one waits for ever, and the streams come to their end."""
    engine = await serving.start(folders[0])
    streams = _streams(engine.client, 4, 90)
    await asyncio.gather(*(one.reach(1) for one in streams))
    await engine.client.pause(engine_pb2.PauseGenerationRequest(mode=KEEP))
    async with asyncio.timeout(LIMIT_SECONDS):
        await engine.update("v2", folders[1])
    clients = [EngineClient(engine.service.address) for _ in range(3)]
    updates = itertools.cycle((1, 0))

    async def pause(number):
        mode = (KEEP, RETRACT)[number % 2]
        await clients[0].pause(engine_pb2.PauseGenerationRequest(mode=mode), LIMIT_SECONDS)

    async def update(number):
        asked = from_disk(f"race {number}", folders[next(updates)])
        request = engine_pb2.UpdateWeightsRequest(update=asked)
        _ = [one async for one in clients[1].update(request, LIMIT_SECONDS)]

    async def resume(_):
        await clients[2].resume()

    async def repeat(act):
        done = 0
        for number in range(ROUNDS):
            try:
                await act(number)
                done += 1
            except CallFailed as error:
                if error.code not in REFUSED:
                    raise
        return done

    done = await asyncio.gather(*(repeat(act) for act in (pause, update, resume)))
    assert all(done), done
    await clients[2].resume()
    async with asyncio.timeout(LIMIT_SECONDS):
        await asyncio.gather(*(one.ended for one in streams))
    assert [len(one.tokens) for one in streams] == [90] * 4
    assert engine.facts.epoch == 2 + done[1]
    for client in clients:
        await client.close()
