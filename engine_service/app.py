"""Joins the rings of the engine service, runs it, and ends it cleanly.

The front imports no torch: only the rank workers do, in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from pathlib import Path

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from clients.credentials import Credentials
from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.bring_up import BringUp
from engine_service.core.engine import Engine
from engine_service.core.fill import Filler
from engine_service.core.instance import Identity, Instance
from engine_service.core.ranks import RankGroup
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.supervisor import Supervisor
from engine_service.errors import ConfigError, EngineError
from engine_service.rpc import server as rpc
from engine_service.rpc.gateway import GatewayServicer
from engine_service.rpc.metrics import EngineCollector
from engine_service.rpc.metrics_updates import UpdateCollector
from engine_service.rpc.relay_link import GrpcRelayLink
from engine_service.rpc.servicer import EngineServicer
from relay_service.core.instance import State
from relay_service.core.process import announce_listening, stop_on_signals
from relay_service.errors import DeviceError
from relay_service.memory import cuda_driver
from relay_service.rpc.metrics_server import MetricsServer
from seedrelay.v1 import engine_pb2_grpc

FAILED_LINGER_SECONDS = 3.0
"""Time in which a failed service still says why it failed before it exits."""

_log = logging.getLogger(__name__)


async def serve(config: EngineConfig, ranks: RankGroup) -> str:
    """Runs an engine on ranks that were spawned, until SIGTERM or SIGINT.

    Returns the address at which to start again, when a rank of an instance that was ready
    has died and the configuration says so; else nothing. Raises `EngineError` when it
    cannot listen, or can never be ready.
    """
    _check_device(config)
    stopping = stop_on_signals()
    credentials = rpc.credentials(config.security)
    server = rpc.new_server(credentials)
    address = rpc.bind(server, config.listen, credentials)
    metrics = MetricsServer(config.metrics_listen, config.security)
    with rpc.own_errors():
        metrics_address = await metrics.start()
    instance = _build(config, ranks, credentials)
    metrics.show(EngineCollector(instance))
    filler, supervisor = Filler(instance), Supervisor(instance)
    servicer = EngineServicer(instance, filler)
    metrics.show(UpdateCollector(instance, lambda: servicer.updates))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(GatewayServicer(instance), server)
    health = rpc.add_standard_services(server)
    await server.start()
    announce_listening(
        "engine", instance.identity.name, config.advertise or address, metrics_address
    )
    tasks = [
        asyncio.create_task(rpc.follow(instance.lifecycle, health)),
        asyncio.create_task(supervisor.run()),
        asyncio.create_task(BringUp(instance, filler).run()),
        asyncio.create_task(_tell_of_pauses(instance)),
    ]
    try:
        await _until_over(instance, stopping)
    finally:
        await _drain(instance, config.grace_seconds)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks[1:])
        await instance.close()
        failed = instance.lifecycle.reason
        instance.lifecycle.to(State.STOPPED, failed)
        await metrics.stop()
        await server.stop(1.0)
        tasks[0].cancel()
    if not failed:
        return ""
    if ranks.lost and config.on_rank_death == "restart" and instance.has_served:
        _log.warning("starting again: %s", failed)
        return address
    raise EngineError(failed)


def _check_device(config: EngineConfig) -> None:
    """Raises `ConfigError` where a rank would have no device: sooner than a worker could."""
    if config.device != "cuda":
        return
    try:
        count = len(cuda_driver.load().devices())
    except DeviceError as error:
        raise ConfigError.of(error) from error
    if count < config.ranks:
        raise ConfigError(
            f"{config.ranks} ranks need a CUDA device each, there are {count}",
            field="tp", expected=str(config.ranks), found=str(count),
            hint="lower --tp or --ep, or show more devices with CUDA_VISIBLE_DEVICES",
        )  # fmt: skip


def _build(config: EngineConfig, ranks: RankGroup, credentials: Credentials) -> Instance:
    limits = Limits(
        config.max_context_tokens,
        config.max_running,
        config.max_waiting,
        config.kv_block_tokens,
        config.prefill_chunk_tokens,
    )
    scheduler = Scheduler(limits, BlockPool(config.kv_blocks, config.kv_block_tokens))
    model = Path(config.model).resolve().name
    identity = Identity(config.name, uuid.uuid4().hex, model)
    open_link = functools.partial(GrpcRelayLink, credentials=credentials)
    return Instance(config, identity, ranks, Engine(scheduler, ranks), open_link)


async def _tell_of_pauses(instance: Instance) -> None:
    """Lets the relay know; it reads on from a paused instance."""
    before = State.STARTING
    async for state in instance.lifecycle.watch():
        held = before in (State.PAUSED, State.UPDATING)
        if state is State.PAUSED or (state is State.READY and held):
            await instance.tell_relay()
        before = state


async def _until_over(instance: Instance, stopping: asyncio.Event) -> None:
    """Returns when somebody asks to stop, or a while after the instance has failed."""

    async def failed() -> None:
        async for state in instance.lifecycle.watch():
            if state is State.FAILED:
                await asyncio.sleep(FAILED_LINGER_SECONDS)
                return

    waits = [asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(failed())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _drain(instance: Instance, grace_seconds: float) -> None:
    """Admits nothing more, lets what runs finish, then ends it with what it has.

    Who is frozen, or waits for a pause to end, has nothing to wait for. A commit comes to its
    end: ranks that were stopped in the middle of it would have neither weights.
    """
    failed = instance.lifecycle.reason if instance.lifecycle.state is State.FAILED else ""
    instance.lifecycle.to(State.DRAINING, failed)
    instance.pauser.stop()
    scheduler = instance.engine.scheduler
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            await instance.engine.idle()
            async with instance.turn.taken("the end of the service"):
                pass  # whoever changes weights has come to an end
    scheduler.abort_all(instance.engine.weights)
