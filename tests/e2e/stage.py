"""Real services in real processes, on tiny random models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import LaunchError, Service
from seedrelay.v1 import engine_pb2, weights_pb2

READY = weights_pb2.INSTANCE_STATE_READY
DUMMY = weights_pb2.INSTANCE_STATE_DUMMY
PROMPT = "What is a seed?"
LIMIT_SECONDS = 90.0


@dataclass
class Result:
    """What a command printed and how it ended."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """Returns the last line of stdout as JSON."""
        return json.loads(self.out.splitlines()[-1])


@dataclass
class Fleet:
    """A relay and the seed that is attached to it."""

    relay: Service
    seed: Service


class Stage:
    """Starts services and commands, and ends what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: list[Service] = []

    def relay(self, *arguments: str, listen: str = "127.0.0.1:0") -> Service:
        """Starts a relay."""
        return self._start("relay", "--listen", listen, *arguments)

    def relay_again(self, ended: Service, *arguments: str) -> Service:
        """Starts a relay at the address of one that has ended.

        The system may have lent its port to somebody's connection meanwhile: who waits gets it.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                return self.relay(*arguments, listen=ended.address)
            except LaunchError as error:
                if "port is in use" not in str(error) or time.monotonic() > deadline:
                    raise

    def engine(self, model: Path, *arguments: str, listen: str = "127.0.0.1:0") -> Service:
        """Starts an engine with little memory and one thread."""
        return self._start(
            "engine", "--model", str(model), "--listen", listen, "--threads", "1",
            "--kv-cache-tokens", "2048", *arguments,
        )  # fmt: skip

    def target(self, relay: Service, *arguments: str, model: Path | None = None) -> Service:
        """Starts a dummy that fills itself, from an empty folder unless one is named."""
        return self.engine(
            model or self.empty(), "--load-format", "dummy", "--relay", relay.address, *arguments
        )

    def empty(self) -> Path:
        """Makes an empty folder."""
        folder = self.folder / f"empty-{time.monotonic_ns()}"
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Ends every service, the last one first."""
        for service in reversed(self.services):
            service.stop()

    def _start(self, *arguments: str) -> Service:
        log = self.folder / f"{arguments[0]}-{len(self.services)}.log"
        service = Service(list(arguments), log)
        self.services.append(service)
        return service


def seedrelay(*arguments: str) -> Result:
    """Runs a command as an operator would."""
    done = subprocess.run(
        [sys.executable, "-m", "clients", *arguments],
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


async def reach(
    service: Service, state: weights_pb2.InstanceState = READY
) -> engine_pb2.EngineStatus:
    """Waits until an engine is in a state; tells its reason when it fails instead."""
    async with EngineClient(service.address) as client, asyncio.timeout(LIMIT_SECONDS):
        async for status in client.watch():
            if status.state == state:
                return await client.status()
            assert status.state != weights_pb2.INSTANCE_STATE_FAILED, status.reason
    raise AssertionError(service.log_tail())


async def status_of(service: Service) -> engine_pb2.EngineStatus:
    """Returns an engine's status."""
    async with EngineClient(service.address) as client:
        return await client.status()


def request(
    text: str = PROMPT, max_tokens: int = 16, **sampling: Any
) -> engine_pb2.GenerateRequest:
    """Makes a request that only stops at its length unless told otherwise."""
    params = {"ignore_eos": True, **sampling}
    return engine_pb2.GenerateRequest(
        text=text, sampling=engine_pb2.SamplingParams(max_tokens=max_tokens, **params)
    )


async def answer(service: Service, asked: engine_pb2.GenerateRequest | None = None) -> list[int]:
    """Returns the token ids of an answer."""
    async with EngineClient(service.address) as client:
        return [t async for m in client.generate(asked or request()) for t in m.token_ids]


async def eventually(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Polls until `what` (a function or a coroutine function) returns something true."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


async def health(service: Service, name: str) -> str:
    """Asks the standard health service; an unreachable one is `UNREACHABLE`."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        except grpc.aio.AioRpcError as error:
            return "UNREACHABLE" if error.code() is grpc.StatusCode.UNAVAILABLE else str(error)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def refusal(service: Service, asked: engine_pb2.GenerateRequest) -> ClientError:
    """Returns the error that a request is refused with."""
    try:
        await answer(service, asked)
    except ClientError as error:
        return error
    raise AssertionError("the request was served")


def flip(pid: int, address: int) -> None:
    """Flips a bit of the memory of a process, as nothing but a fault would."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        byte = memory.read(1)
        memory.seek(address)
        memory.write(bytes([byte[0] ^ 4]))
