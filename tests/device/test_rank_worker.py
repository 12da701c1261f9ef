"""A worker process answers its front over a socket pair, in order."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import Sequence, run, start_message

from engine_service.core import messages
from engine_service.core.messages import (
    Allocated,
    Capture,
    Captured,
    CheckProbe,
    Commit,
    Done,
    Failed,
    LoadDisk,
    Loaded,
    Progress,
    Recorded,
    RecordProbe,
)
from engine_service.core.step_messages import Row, Sampled, Sampling, Step
from relay_service.memory.host import HostArena

PROMPT = [1, 2, 3]


class Worker:
    """The front's side of one worker process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        self._staging, staging = socket.socketpair()
        fds = theirs.fileno(), staging.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_service.device.worker", *map(str, fds)],
            pass_fds=fds,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(Path.cwd())},
        )
        theirs.close()
        staging.close()
        self._buffer = b""
        self.descriptors: list[int] = []
        self.progress: list[Progress] = []

    def ask(self, command):
        """Sends a command and returns its reply; keeps progress and descriptors."""
        frame = messages.encode(command)
        self._socket.sendall(len(frame).to_bytes(4, "little") + frame)
        while isinstance(reply := messages.decode_reply(self._frame()), Progress):
            self.progress.append(reply)
        return reply

    def step(self, rows):
        """Runs one step."""
        reply = self.ask(Step(rows))
        assert isinstance(reply, Sampled), reply
        return reply

    def _frame(self) -> bytes:
        while len(self._buffer) < 4 or len(self._buffer) < 4 + self._size():
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
            assert data, "the worker has gone"
            self._buffer += data
            self.descriptors += descriptors
        frame = self._buffer[4 : 4 + self._size()]
        self._buffer = self._buffer[4 + self._size() :]
        return frame

    def _size(self) -> int:
        return int.from_bytes(self._buffer[:4], "little")

    def close(self) -> int:
        """Leaves, as a front that ends, and returns the worker's exit code."""
        self._socket.close()
        self._staging.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        return self.process.wait(20)


@pytest.fixture
def worker():
    """A worker process."""
    worker = Worker()
    yield worker
    if worker.process.poll() is None:
        worker.process.kill()
        worker.close()


@pytest.fixture(scope="module")
def seed(tied):
    """A worker that serves from disk, with its graph captured."""
    seed = Worker()
    assert isinstance(seed.ask(start_message(tied)), Allocated)
    seed.loaded = seed.ask(LoadDisk(str(tied)))
    assert isinstance(seed.ask(Capture()), Captured)
    yield seed
    seed.close()


def test_a_seed_loads_captures_and_serves(seed, captured):
    """Tokens over the socket are those of the runner in this process."""
    assert isinstance(seed.loaded, Loaded)
    assert seed.loaded.manifest.verified
    assert seed.loaded.manifest == captured.arena.digested()
    total = seed.loaded.report.bytes_read
    assert seed.progress[-1] == Progress(total, total)
    here, there = Sequence(PROMPT), Sequence(PROMPT)
    run(captured.runner.step, [here], 8)
    run(seed.step, [there], 8)
    assert here.output == there.output


def test_a_dummy_filled_from_outside_equals_its_seed(seed, worker, tied):
    """Bytes written through the descriptor make a target that passes the seed's probe."""
    recorded = seed.ask(RecordProbe())
    assert isinstance(recorded, Recorded)
    allocated = worker.ask(start_message(tied))
    assert allocated.manifest == seed.loaded.manifest.without_digests()
    assert isinstance(worker.ask(Capture()), Captured)
    assert worker.ask(CheckProbe(recorded.probe)).kind == "ProbeMismatch"
    assert worker.ask(Step((Sequence(PROMPT).row(),))).kind == "WrongState"
    size = allocated.manifest.data_bytes
    source = HostArena(seed.descriptors[0], size, writable=False)
    target = HostArena(worker.descriptors[0], size, writable=True)
    target.land(0, source.view(0, size))
    source.close()
    target.close()
    assert worker.ask(Commit()) == Done()
    assert worker.ask(CheckProbe(recorded.probe)) == Done()
    here, there = Sequence(PROMPT), Sequence(PROMPT)
    run(seed.step, [here], 8)
    run(worker.step, [there], 8)
    assert here.output == there.output


def test_errors_are_answered_and_the_worker_goes_on(worker, tied, tmp_path):
    """Bad configuration, wrong order, bad folder: each is typed, none is the end."""
    assert worker.ask(Capture()).kind == "WrongState"
    bad = start_message(tied, dtype="int3")
    assert worker.ask(bad).kind == "UnsupportedModel"
    assert worker.ask(start_message(tied, device="tpu")).kind == "ConfigError"
    assert worker.ask(start_message(tied, rank=1)).kind == "ConfigError"
    assert worker.ask(start_message(tied, world_size=2)).kind == "UnsupportedModel"
    assert isinstance(worker.ask(start_message(tied)), Allocated)
    assert worker.ask(start_message(tied)).kind == "WrongState"
    failed = worker.ask(LoadDisk(str(tmp_path)))
    assert (failed.kind, failed.details) == ("CheckpointError", {"file": str(tmp_path)})
    assert isinstance(worker.ask(LoadDisk(str(tied))), Loaded)


@pytest.mark.parametrize(
    "row",
    [
        Row((), 0, (0,), 0, Sampling()),
        Row((199,), 0, (0,), 0, Sampling()),
        Row((-1,), 0, (0,), 0, Sampling()),
        Row((1,), 128, (0,) * 32, 0, Sampling()),
        Row((1,), -1, (0,), 0, Sampling()),
        Row((1,) * 9, 0, (0,), 0, Sampling()),
        Row((1,), 0, (999,), 0, Sampling()),
        Row((1,), 0, (-1,), 0, Sampling()),
    ],
)
def test_a_row_that_does_not_fit_is_refused(seed, row):
    """The step is refused, and the next one served."""
    failed = seed.ask(Step((row,)))
    assert isinstance(failed, Failed)
    assert failed.kind == "InvalidRequest"
    assert len(seed.step((Sequence(PROMPT).row(),)).tokens) == 1


def test_a_worker_leaves_when_its_front_does(worker, tied):
    """The end of the stream is a clean exit, and the arena goes with the process."""
    worker.ask(start_message(tied))
    assert worker.close() == 0


def test_a_worker_that_was_never_asked_leaves_too(worker):
    """A front that dies before its first command leaves nothing behind."""
    assert worker.close() == 0


def test_signals_for_the_front_do_not_stop_a_worker(worker, tied):
    """Ctrl-C reaches the whole process group; a rank waits for its front to drain."""
    worker.ask(start_message(tied))
    for number in (signal.SIGINT, signal.SIGTERM):
        worker.process.send_signal(number)
    assert isinstance(worker.ask(LoadDisk(str(tied))), Loaded)


def test_a_worker_dies_with_a_killed_front():
    """SIGKILL of the front takes the worker along, even where the socket stays open."""
    script = (
        "import socket, subprocess, sys, os\n"
        "ours, theirs = socket.socketpair()\n"
        "os.set_inheritable(ours.fileno(), True)\n"
        "w = subprocess.Popen([sys.executable, '-m', 'engine_service.device.worker',"
        " str(theirs.fileno()), str(os.dup(theirs.fileno()))],"
        " pass_fds=[theirs.fileno(), theirs.fileno() + 1, ours.fileno()])\n"
        "from engine_service.core import messages\n"
        "frame = messages.encode(messages.Capture())\n"
        "ours.sendall(len(frame).to_bytes(4, 'little') + frame)\n"
        "ours.recv(4)\n"
        "print(w.pid, flush=True)\n"
        "ours.recv(1 << 20)\n"
        "ours.recv(1)\n"
    )
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(front.stdout.readline())
    watched = os.pidfd_open(pid)
    front.kill()
    front.communicate(timeout=20)
    ending = select.poll()
    ending.register(watched, select.POLLIN)
    assert ending.poll(20_000)
    os.close(watched)
