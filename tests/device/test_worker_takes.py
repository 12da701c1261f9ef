"""A worker takes units out of memory that it was passed: at once, and closes it in any case."""

import socket
from contextlib import contextmanager
from pathlib import Path

from oracles import make
from tiny_llama import serving_rank, start_message

from engine_service.core import messages
from engine_service.core.member_messages import Taken, TakeUnits, Wanted
from engine_service.core.messages import encode
from engine_service.device.worker import Worker
from engine_service.errors import ArenaError, EngineError
from relay_service.core.channel import BlockingChannel


@contextmanager
def _worker():
    ours, theirs = socket.socketpair()
    worker, front = Worker(BlockingChannel(theirs)), BlockingChannel(ours)

    def ask(command, *descriptors):
        front.send(encode(command), descriptors)
        try:
            worker._answer(messages.decode_command(worker._channel.receive()))
        except EngineError as error:
            return error
        while isinstance(reply := messages.decode_reply(front.receive()), messages.Progress):
            pass
        return reply

    yield worker, ask
    front.close()
    theirs.close()


def test_a_fresh_rank_takes_units_before_torch_is_there(tmp_path):
    """It answers Start at once although others compute already, and builds nothing to copy."""
    folder = make("dots1", tmp_path, num_key_value_heads=4).folder
    other = serving_rank(folder)
    start = start_message(folder, world_size=2, expert_parallel_size=2, joins_later=True,
                          rank=1, redundant_experts=8)  # fmt: skip
    manifest = other.arena.digested()
    units = tuple(Wanted(unit.name, unit.name, unit.digests) for unit in manifest.units)
    with _worker() as (worker, ask):
        opened = _descriptors()
        wrong = ask(TakeUnits(manifest, units), other.arena.descriptors[0])
        assert "before Start" in str(wrong)
        assert _descriptors() == opened
        assert isinstance(ask(start), messages.Allocated)
        arena = _descriptors()
        reply = ask(TakeUnits(manifest, units), other.arena.descriptors[0])
        assert reply == Taken(sum(unit.nbytes for unit in manifest.units))
        bad = ask(
            TakeUnits(manifest, (units[0]._replace(),))
            if False
            else TakeUnits(manifest, (Wanted("no", "no", ()),)),
            other.arena.descriptors[0],
        )
        assert isinstance(bad, ArenaError)
        assert _descriptors() == arena
        assert worker._rank is None
        memory = worker._planned[1].memory.mapping
        assert bytes(memory.view(0, manifest.data_bytes)) == bytes(
            other.arena.view(0, manifest.data_bytes)
        )


def _descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))
