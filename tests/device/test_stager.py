"""The thread that stages answers a stream of its own, and gives way to whoever serves."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_llama import write_checkpoint
from updating import served, tokens

from engine_service.core import messages
from engine_service.core.messages import Done, Failed, Progress
from engine_service.core.update_messages import (
    ApplyUpdate,
    DropStaging,
    FinishStaging,
    LendStaging,
    OpenStaging,
    StagedFiles,
    StageDisk,
    StageHeaders,
)
from engine_service.device.stager import Stager
from engine_service.device.worker import Worker
from engine_service.errors import ArenaError
from relay_service.core.channel import BlockingChannel


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A and B."""
    return [
        write_checkpoint(tmp_path_factory.mktemp("weights"), seed, num_hidden_layers=2)
        for seed in (1, 2)
    ]


class Front:
    """The front's side of a staging stream."""

    def __init__(self, rank) -> None:
        self._ours, theirs = socket.socketpair()
        self._channel = BlockingChannel(self._ours)
        self.stager = Stager(BlockingChannel(theirs), rank)
        self.progress: list[Progress] = []

    def send(self, command) -> None:
        """Sends a command."""
        self._channel.send(messages.encode(command))

    def answer(self):
        """Waits for an answer."""
        while isinstance(reply := messages.decode_reply(self._channel.receive()), Progress):
            self.progress.append(reply)
        return reply

    def ask(self, command):
        """Sends a command and waits for its answer."""
        self.send(command)
        return self.answer()

    def close(self) -> None:
        """Leaves; the thread ends."""
        self._channel.close()
        self.stager.join()


@pytest.fixture
def front(folders):
    """A rank that serves A, and the front that stages."""
    front = Front(rank := served(folders[0]))
    front.rank = rank
    front.stager.start()
    yield front
    front.close()


def test_it_answers_while_the_rank_serves(front, folders):
    """Errors are answered and end nothing; files and progress come as messages."""
    before = tokens(front.rank)
    assert front.ask(FinishStaging()).kind == "WrongState"
    serves = front.rank.arena.digested()
    assert front.ask(OpenStaging(serves=serves)) == Done()
    failed = front.ask(StageHeaders(()))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.details.get("changed")) == ("CheckpointError", None)
    assert isinstance(front.ask(StageDisk(folder=str(folders[1]))), StagedFiles)
    assert front.progress[-1].bytes_done == front.progress[-1].bytes_total > 0
    assert tokens(front.rank) == before
    front.ask(DropStaging())


def test_what_is_lent_comes_along(front):
    """The descriptor travels with the answer."""
    front.ask(OpenStaging(serves=front.rank.arena.digested()))
    front.send(LendStaging())
    _, (fd,), _, _ = socket.recv_fds(front._ours, 1, 4)
    (own,) = front.rank.staging.descriptors
    assert os.fstat(fd).st_ino == os.fstat(own).st_ino
    os.close(fd)


def test_another_command_ends_a_long_one(front, folders):
    """A read at ten bytes a second would last for hours."""
    front.ask(OpenStaging(serves=front.rank.arena.digested()))
    front.send(StageDisk(folder=str(folders[1]), bytes_per_second=200_000))
    front.send(DropStaging())
    failed = front.answer()
    assert (failed.kind, failed.message) == ("WrongState", "staging was given up")
    assert front.answer() == Done()


def test_a_failure_in_place_says_that_the_weights_are_lost(front, folders, tmp_path):
    """From the first byte on; the front cannot know otherwise."""
    front.ask(OpenStaging(serves=front.rank.arena.digested(), in_place=True))
    failed = front.ask(StageDisk(folder=str(tmp_path)))
    assert "changed" not in failed.details
    front.ask(OpenStaging(serves=front.rank.arena.digested(), in_place=True))
    front.send(StageDisk(folder=str(folders[1]), bytes_per_second=200_000))
    while not front.progress:
        reply = messages.decode_reply(front._channel.receive())
        front.progress.append(reply)
    failed = front.ask(DropStaging())
    assert failed.details["changed"] == "yes"
    lost = front.answer()
    assert (lost.kind, lost.details["changed"]) == ("ArenaError", "yes")


def test_it_gives_way(front):
    """A low priority, and one thread to compute with."""
    front.ask(DropStaging())
    native = front.stager._thread.native_id
    assert os.getpriority(os.PRIO_PROCESS, native) == 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0


def test_threads_that_serve_stay_as_many(front):
    """Also where they have computed nothing yet when the other thread begins."""

    def serving() -> int:
        torch.set_num_threads(2)
        other = Front(front.rank)
        other.stager.start()
        other.ask(DropStaging())
        other.close()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as fresh:
        found = fresh.submit(serving).result()
    torch.set_num_threads(1)
    assert found == 2


@pytest.mark.parametrize("error", [ArenaError("torn"), RuntimeError("torn")])
def test_an_update_that_fails_half_way_ends_the_rank(folders, monkeypatch, error):
    """It is answered, then raised: nobody is served a mixture. A refusal before ends nobody."""
    ours, theirs = socket.socketpair()
    worker, front = Worker(BlockingChannel(theirs)), BlockingChannel(ours)
    worker._rank = rank = served(folders[0])
    raised: list[Exception] = []
    serving = threading.Thread(target=_serve, args=(worker, raised))
    serving.start()

    def ask() -> Failed:
        front.send(messages.encode(ApplyUpdate()))
        return messages.decode_reply(front.receive())

    assert ask().kind == "WrongState"
    rank.staging.answer(OpenStaging(serves=rank.arena.digested()))
    rank.staging.answer(StageDisk(folder=str(folders[1])))
    assert ask().kind == "WrongState"
    rank.staging.answer(FinishStaging())

    def take(_source, _block):
        raise error

    monkeypatch.setattr(rank.arena, "take", take)
    assert ask().message.endswith("torn")
    serving.join()
    assert raised == [error]
    assert not rank.arena.whole
    front.close()
    theirs.close()


def _serve(worker: Worker, raised: list[Exception]) -> None:
    try:
        worker.serve()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        raised.append(error)
