"""Starting, ending, dying: nothing is lost, nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest
from fakes import FakeEngine, Memory, random_bytes, seam_layout
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from stage import (
    READY,
    Fleet,
    Stage,
    answer,
    eventually,
    health,
    reach,
    refusal,
    request,
    seedrelay,
    status_of,
)

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import Service
from clients.relay import RelayClient
from seedrelay.v1 import engine_pb2

SERVICE = "seedrelay.v1.EngineService"


async def test_sigterm_drains(stage: Stage, model: Path) -> None:
    """At SIGTERM a running stream ends whole, new calls are refused, and the exit is clean."""
    engine = stage.engine(model)
    await reach(engine)
    asked = request(max_tokens=300)
    expected = await answer(engine, asked)
    async with EngineClient(engine.address) as client:
        stream = client.generate(asked)
        got = list((await anext(stream)).token_ids)
        os.kill(engine.pid, signal.SIGTERM)
        await eventually(lambda: _is_refused(engine))
        last = None
        async for last in stream:
            got += last.token_ids
    assert got == expected
    assert last is not None
    assert last.finish_reason == engine_pb2.FINISH_REASON_LENGTH
    assert engine.wait() == 0


async def test_grace_over_and_second_sigterm(stage: Stage, model: Path) -> None:
    """When the grace is over a stream ends with what it has; a second SIGTERM exits at once."""
    patient = stage.engine(model, "--grace", "0.2")
    hasty = stage.engine(model, "--grace", "600")
    await reach(patient)
    await reach(hasty)
    async with EngineClient(patient.address) as client:
        stream = client.generate(request(max_tokens=1900))
        await anext(stream)
        os.kill(patient.pid, signal.SIGTERM)
        *_, last = [message async for message in stream]
    assert last.finish_reason == engine_pb2.FINISH_REASON_ABORT
    assert last.usage.completion_tokens < 1900
    assert patient.wait() == 0
    async with EngineClient(hasty.address) as client:
        stream = client.generate(request(max_tokens=1900))
        await anext(stream)
        os.kill(hasty.pid, signal.SIGTERM)
        await eventually(lambda: _is_refused(hasty))
        os.kill(hasty.pid, signal.SIGTERM)
        with pytest.raises(ClientError):
            async for _ in stream:
                pass
    assert hasty.wait() == 1


@pytest.mark.full
async def test_rank_killed(stage: Stage, model: Path) -> None:
    """A killed rank ends streams UNAVAILABLE; health says so, and the service exits."""
    engine = stage.engine(model)
    status = await reach(engine)
    async with EngineClient(engine.address) as client:
        stream = client.generate(request(max_tokens=1900))
        await anext(stream)
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(ClientError) as caught:
            async for _ in stream:
                pass
    assert caught.value.code == "UNAVAILABLE"

    async def not_serving() -> bool:
        return await health(engine, SERVICE) == "NOT_SERVING"

    await eventually(not_serving, seconds=2)
    assert (await refusal(engine, request())).code == "UNAVAILABLE"
    assert engine.wait() == 1
    assert "rank 0" in engine.log_tail()


async def test_ranks_are_started_again(stage: Stage, model: Path) -> None:
    """If so configured, a killed rank costs a start: same address, same pid, another life."""
    engine = stage.engine(model, "--on-rank-death", "restart")
    before = await reach(engine)
    expected = await answer(engine)
    os.kill(before.ranks[0].pid, signal.SIGKILL)

    async def another_life() -> engine_pb2.EngineStatus | None:
        try:
            status = await status_of(engine)
        except ClientError:
            return None
        is_new = status.generation != before.generation
        return status if is_new and status.state == READY else None

    after = await eventually(another_life, seconds=60)
    assert after.ranks[0].pid != before.ranks[0].pid
    assert not _runs(before.ranks[0].pid)
    assert await answer(engine) == expected
    assert engine.stop() == 0


async def test_front_killed_leaves_no_orphan(stage: Stage, model: Path) -> None:
    """Workers are spawned, not forked, and end with a front that is killed."""
    relay = stage.relay()
    engine = stage.engine(model, "--relay", relay.address)
    status = await reach(engine)
    (worker,) = [rank.pid for rank in status.ranks]
    command = Path(f"/proc/{worker}/cmdline").read_bytes()
    assert b"engine_service.device.worker" in command
    engine.kill()
    await eventually(lambda: not _runs(worker))
    listed = await eventually(lambda: _instances(relay, 0))
    assert listed == "[]"


async def test_nothing_is_left(stage: Stage, model: Path) -> None:
    """Filling and stopping targets leaves the relay with what it held before."""
    relay = stage.relay()
    seed = stage.engine(model, "--relay", relay.address)
    await reach(seed)
    counts = []
    for _ in range(2):
        target = stage.target(relay)
        await reach(target)
        processes = target.processes()
        assert target.stop() == 0
        assert not any(map(_runs, processes))
        await eventually(lambda: _instances(relay, 1))
        counts.append(_held(relay))
    assert counts[-1] == counts[0]
    socket_path = _attachment_socket(relay)
    assert socket_path.exists()
    assert relay.stop() == 0
    assert not socket_path.exists()


async def test_restarted_relay_is_whole_again(stage: Stage, model: Path) -> None:
    """When a killed relay is started anew the seed attaches by itself and fills a target."""
    relay = stage.relay()
    seed = stage.engine(model, "--relay", relay.address, "--weight-version", "v2")
    await reach(seed)
    relay.kill()
    assert len(await answer(seed)) == 16
    again = stage.relay_again(relay)
    target = stage.target(again)
    status = await reach(target)
    assert status.weight_version == "v2"
    assert await answer(target) == await answer(seed)


async def test_restarted_directory_is_whole_again(stage: Stage) -> None:
    """A directory that lost its memory knows every instance again; one that left is not listed."""
    directory = stage.relay()
    relay = stage.relay("--join", directory.address)
    layout = seam_layout()
    stayer, leaver = (
        FakeEngine(name, Memory([layout], [random_bytes(layout)])) for name in ("stayer", "leaver")
    )
    async with RelayClient(relay.address) as client:
        path, _ = await client.attachment()
    await stayer.attach(path)
    await leaver.attach(path)
    await eventually(lambda: _instances(directory, 2))
    directory.kill()
    again = stage.relay_again(directory)
    await eventually(lambda: _instances(again, 2))
    leaver.close()
    assert "stayer" in await eventually(lambda: _instances(again, 1))
    relay.kill()
    await eventually(lambda: _instances(again, 0))
    stayer.close()


async def test_cancelled_call_frees_its_kv(fleet: Fleet) -> None:
    """Who leaves, or whose deadline is over, frees KV and slot; a neighbour is unharmed."""
    engine = fleet.seed
    neighbour = request(max_tokens=400)
    alone = await answer(engine, neighbour)
    beside = asyncio.ensure_future(answer(engine, neighbour))
    async with EngineClient(engine.address) as client:
        stream = client.generate(request("leaving", max_tokens=1900))
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(ClientError) as caught:
            async for _ in client.generate(request("late", max_tokens=1900), timeout=0.5):
                pass
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert await beside == alone

    async def idle() -> bool:
        status = await status_of(engine)
        return (status.running, status.waiting, status.kv_blocks_used) == (0, 0, 0)

    await eventually(idle)


async def test_streams_run_together(fleet: Fleet) -> None:
    """Many streams run at once and each gives the same greedy tokens as alone."""
    engine = fleet.seed
    asked = [request(f"{n} seeds", max_tokens=24) for n in range(8)]
    alone = [await answer(engine, one) for one in asked]
    together = await asyncio.gather(*(answer(engine, one) for one in asked))
    assert list(together) == alone


async def test_sampling_by_seed(fleet: Fleet) -> None:
    """The same seed gives the same tokens whatever else is served; another seed gives others."""
    engine = fleet.seed

    def drawn(seed: int) -> engine_pb2.GenerateRequest:
        return request(max_tokens=24, temperature=1.0, top_p=0.95, min_p=0.01, seed=seed)

    alone = await answer(engine, drawn(1))
    busy = await asyncio.gather(*(answer(engine, drawn(n)) for n in (1, 2, 3)))
    assert busy[0] == alone
    assert busy[1] != alone


async def test_reflection_names_the_services(fleet: Fleet) -> None:
    """Both services answer the standard reflection with their own services and health."""
    for service, name in ((fleet.relay, "RelayService"), (fleet.seed, "EngineService")):
        names = await _reflected(service)
        assert {f"seedrelay.v1.{name}", "grpc.health.v1.Health"} <= names


async def test_generate_command(fleet: Fleet) -> None:
    """`generate --json` prints chunks with their version, the last one with usage and spans."""
    result = await asyncio.to_thread(
        seedrelay, "generate", "--engine", fleet.seed.address, "--max-tokens", "6", "--ignore-eos",
        "--json", "seeds",
    )  # fmt: skip
    assert result.status == 0
    last = result.json()
    assert last["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 6
    assert last["version_spans"] == [{"weight_version": "v9", "epoch": 1, "start": 0, "end": 6}]
    assert '"weight_version": "v9"' in result.out.splitlines()[0]


async def _is_refused(engine: Service) -> bool:
    try:
        await answer(engine, request(max_tokens=1))
    except ClientError as error:
        return error.code == "UNAVAILABLE"
    return False


async def _instances(relay: Service, count: int) -> str:
    """Returns the fleet as text once it has so many instances; empty before."""
    result = await asyncio.to_thread(seedrelay, "status", relay.address, "--json")
    names = [one["instance"] for one in result.json()["instances"]]
    return str(names) if len(names) == count else ""


async def _reflected(service: Service) -> set[str]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([asked])):
            return {one.name for one in response.list_services_response.service}
    return set()


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _held(service: Service) -> tuple[int, int]:
    """Counts a process's memfds and its mappings of them."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{service.pid}/fd").iterdir()]
    maps = Path(f"/proc/{service.pid}/maps").read_text()
    return sum("memfd:" in link for link in links), maps.count("memfd:")


def _attachment_socket(relay: Service) -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108
    name = f"relay-{relay.address.replace(':', '-')}.sock"
    return Path(runtime) / f"seedrelay-{os.getuid()}" / name
