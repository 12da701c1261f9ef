"""What a worker answers and when it ends, within this process."""

import socket
from dataclasses import replace

import pytest
from tiny_llama import Sequence, serving_rank

from engine_service.core import messages
from engine_service.core.expert_messages import MoveExperts
from engine_service.core.messages import Failed
from engine_service.core.step_messages import Step
from engine_service.core.update_messages import Trimmed, TrimMemory
from engine_service.device.replies import Replies, kind_of
from engine_service.device.worker import Worker
from relay_service.core.channel import BlockingChannel, ChannelClosed
from relay_service.errors import ManifestError, ResourceExhausted


@pytest.mark.parametrize(
    ("part", "method", "command"),
    [
        ("runner", "step", Step((Sequence([1, 2, 3]).row(),))),
        ("experts", "answer", MoveExperts()),
    ],
)
def test_an_unexpected_error_ends_the_rank(tied, monkeypatch, part, method, command):
    """It is answered with its text, then raised: what a step or a move left behind is unknown."""
    ours, theirs = socket.socketpair()
    served = Worker(BlockingChannel(theirs))
    served._rank = serving_rank(tied)

    def fail(_asked):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(getattr(served._rank, part), method, fail)
    front = BlockingChannel(ours)
    front.send(messages.encode(command))
    with pytest.raises(RuntimeError, match="out of luck"):
        served.serve()
    failed = messages.decode_reply(front.receive())
    assert failed == Failed("EngineError", "RuntimeError: out of luck", {})
    front.close()
    theirs.close()


def test_progress_of_a_long_load_is_bounded():
    """A message per 16 MiB or half a second, and at the end, however small the pieces are."""
    ours, theirs = socket.socketpair()
    now = [0.0]
    replies, total = Replies(BlockingChannel(theirs), clock=lambda: now[0]), 100 << 20
    for done in range(1 << 20, total + 1, 1 << 20):
        now[0] += 0.25 if done in (33 << 20, 34 << 20) else 0.0
        replies.progress(done, total)
    theirs.close()
    front = BlockingChannel(ours)
    seen = [messages.decode_reply(front.receive()).bytes_done >> 20 for _ in range(8)]
    assert seen == [16, 32, 34, 50, 66, 82, 98, 100]
    with pytest.raises(ChannelClosed):
        front.receive()
    front.close()


def test_trimming_memory(tied):
    """A rank says what its device had reserved, before and after; nothing on the CPU."""
    ours, theirs = socket.socketpair()
    served = Worker(BlockingChannel(theirs))
    served._rank = serving_rank(tied)
    front = BlockingChannel(ours)
    for trim in ((0, 0), (100, 60)):
        front.send(messages.encode(TrimMemory()))
        if trim[0]:
            served._rank.device = replace(served._rank.device, trim=lambda: (100, 60))
        served._answer(messages.decode_command(served._channel.receive()))
        assert messages.decode_reply(front.receive()) == Trimmed(*trim)
    front.close()
    theirs.close()


def test_errors_of_the_relay_keep_a_kind_that_the_front_knows():
    """A name that only the relay has becomes the root of the engine's tree."""
    assert kind_of(ResourceExhausted("full")) == "ResourceExhausted"
    assert kind_of(ManifestError("odd")) == "EngineError"
