"""What the options of `seedrelay relay` do to a real process."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import FakeEngine, Memory, lay_out_bytes, random_bytes
from stage import Stage, eventually, seedrelay

from clients.launch import Service
from clients.relay import RelayClient
from relay_service.core.attachment import Accepted
from relay_service.core.manifest import BLOCK_BYTES
from seedrelay.v1 import weights_pb2

LAYOUT = lay_out_bytes([4 * BLOCK_BYTES])
LIMIT = 4 * BLOCK_BYTES


def niceness(service: Service) -> set[int]:
    """Returns the priorities of all threads of a service."""
    stats = [path.read_text() for path in Path(f"/proc/{service.pid}/task").glob("*/stat")]
    return {int(stat.rpartition(")")[2].split()[16]) for stat in stats}


@pytest.mark.parametrize(("arguments", "nice"), [([], 5), (["--nice", "9"], 9)])
async def test_engines_come_first(stage: Stage, arguments: list[str], nice: int) -> None:
    """Every thread of a relay yields to engines, those that move bytes included."""
    relay = stage.relay(*arguments)
    async with RelayClient(relay.address) as client:
        await client.attachment()
    assert niceness(relay) == {max(nice, os.getpriority(os.PRIO_PROCESS, 0))}


async def test_directories_by_list_and_repeated(stage: Stage) -> None:
    """The status says which of all that were named answer."""
    first, second = stage.relay(), stage.relay()
    relay = stage.relay("--join", f"{first.address},127.0.0.1:9", "--join", second.address)

    def answering() -> set[str]:
        shown = seedrelay("status", relay.address, "--json").json()
        return {one["address"] for one in shown["directories"] if one["reachable"]}

    await eventually(lambda: answering() == {first.address, second.address})
    shown = seedrelay("status", relay.address)
    assert "127.0.0.1:9 (does not answer)" in shown.out
    assert seedrelay("status", "127.0.0.1:9", "--watch").status == 3


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """A seed and a dummy without models."""
    engines = [
        FakeEngine("seed", Memory([LAYOUT], [random_bytes(LAYOUT)])),
        FakeEngine("target", Memory([LAYOUT])),
    ]
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("option", ["--ingress-limit", "--egress-limit-per-instance"])
async def test_limits(stage: Stage, engines: list[FakeEngine], option: str) -> None:
    """They hold between two instances of one host, too."""
    relay = stage.relay(option, "4MiB/s")
    async with RelayClient(relay.address) as client:
        path, _ = await client.attachment()
        for engine in engines:
            assert isinstance(await engine.attach(path), Accepted)
        began = time.monotonic()
        done = [one async for one in client.pull("target", weights_pb2.PullOptions())][-1]
    assert done.report.bytes_moved == LAYOUT.weight_bytes
    assert time.monotonic() - began >= (LAYOUT.weight_bytes - BLOCK_BYTES) / LIMIT
    wrong = seedrelay("relay", "--listen", "127.0.0.1:0", option, "fast")
    assert (wrong.status, "'fast' is not a rate" in wrong.err) == (2, True)
