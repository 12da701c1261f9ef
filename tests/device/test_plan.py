"""What a rank prepares while torch is imported, and what a front does before gRPC is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import start_message

from engine_service.core import messages
from engine_service.device.plan import plan
from engine_service.device.rank import Rank
from engine_service.errors import ConfigError, ModelError
from relay_service.errors import ResourceExhausted


def _modules_after(script: str, *arguments: str) -> set[str]:
    """Runs a script in a process of its own; returns the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {script}; print('\\n'.join(sys.modules))", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_planning_and_allocating_need_no_torch(tied):
    """A worker may allocate its arena before torch is there."""
    script = (
        "from pathlib import Path; import engine_service.device.worker as worker;"
        "from engine_service.core import messages;"
        "start = messages.decode_command(Path(sys.argv[1]).read_bytes());"
        "assert worker.plan(start).memory.mapping.data_bytes"
    )
    command = tied.parent / "start.msgpack"
    command.write_bytes(messages.encode(start_message(tied)))
    imported = _modules_after(script, str(command))
    assert "engine_service.device.plan" in imported
    assert "torch" not in imported


def test_a_front_spawns_its_ranks_before_it_imports_grpc():
    """What takes longest begins first."""
    imported = _modules_after("import engine_service.start")
    assert "engine_service.core.ranks" in imported
    assert not {"grpc", "google.protobuf", "torch"} & imported


def test_a_rank_takes_over_what_was_planned(tied):
    """Its arena is the planned memory, all zero."""
    start = start_message(tied)
    planned = plan(start)
    rank = Rank(start, planned=planned)
    assert rank.arena.manifest == planned.manifest
    assert rank.arena.descriptors[0] == planned.memory.fd
    assert rank.arena.address == planned.memory.mapping.address
    assert not any(rank.arena.view(0, planned.manifest.data_bytes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": 2}, ConfigError),
        ({"dtype": "int4"}, ModelError),
    ],
)
def test_what_cannot_be_served_is_refused_before_memory_is_taken(tied, monkeypatch, changes, error):
    """Nothing is allocated for settings that cannot work."""
    monkeypatch.setattr("engine_service.device.plan.allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(error):
        plan(start_message(tied, **changes))


def test_a_model_beyond_the_memory_is_refused(tied: Path):
    """The host says no before anything is built."""
    raw = json.loads((tied / "config.json").read_bytes())
    raw |= {"num_hidden_layers": 20, "hidden_size": 1 << 15, "intermediate_size": 1 << 17,
            "vocab_size": 1 << 20}  # fmt: skip
    start = start_message(tied)
    huge = messages.Start(start.config, {"config.json": json.dumps(raw).encode()})
    with pytest.raises(ResourceExhausted):
        plan(huge)
