"""Engines in this process, over real sockets, with a runner that adds one instead of a model."""

import asyncio
import json

from fakes import FakeRunner, byte_level_tokenizer
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from clients.credentials import NOTHING, Credentials
from clients.engine import EngineClient
from engine_service.config import EngineConfig
from engine_service.core.blocks import BlockPool
from engine_service.core.engine import Engine
from engine_service.core.fill import Filler
from engine_service.core.instance import Identity, Instance
from engine_service.core.scheduler import Limits, Scheduler
from engine_service.core.tokenizer import TextCodec
from engine_service.rpc import server as rpc
from engine_service.rpc.gateway import GatewayServicer
from engine_service.rpc.servicer import EngineServicer
from relay_service.core.instance import State, Weights
from seedrelay.v1 import engine_pb2, engine_pb2_grpc

VOCAB = 300
CONTEXT = 64
EOS = 250
LIMITS = Limits(CONTEXT, 4, 2, 4)


class FakeRanks(FakeRunner):
    """Ranks without processes."""

    def __init__(self) -> None:
        super().__init__()
        self.workers, self.arenas, self.descriptors = [], [], []


class Service:
    """One engine service in this process."""

    def __init__(self, limits: Limits = LIMITS, blocks: int = 32) -> None:
        self.ranks = FakeRanks()
        self.scheduler = Scheduler(limits, BlockPool(blocks, 4))
        self.instance = Instance(
            EngineConfig(model="tiny", listen="127.0.0.1:0"),
            Identity("one", "life", "tiny"),
            self.ranks,
            Engine(self.scheduler, self.ranks),
            lambda _address: None,
        )
        self.instance.engine.weights = Weights("v1", "ab" * 16, 1)
        self.instance.files = {
            "tokenizer.json": byte_level_tokenizer().to_str().encode(),
            "config.json": json.dumps({"vocab_size": VOCAB, "eos_token_id": EOS}).encode(),
        }
        self.instance.codec = TextCodec(self.instance.files)
        self.instance.lifecycle.state = State.READY

    async def start(self, listen: str = "127.0.0.1:0", credentials: Credentials = NOTHING) -> None:
        """Listens and runs steps."""
        self._server = rpc.new_server(credentials)
        address = rpc.bind(self._server, listen, credentials)
        self.servicer = EngineServicer(self.instance, Filler(self.instance))
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self.servicer, self._server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            GatewayServicer(self.instance), self._server
        )
        health = rpc.add_standard_services(self._server)
        await self._server.start()
        self._tasks = [
            asyncio.create_task(rpc.follow(self.instance.lifecycle, health)),
            asyncio.create_task(self.instance.engine.run()),
        ]
        self.address = address
        self.client = EngineClient(address, credentials)

    async def stop(self) -> None:
        """Ends it."""
        await self.client.close()
        await self._server.stop(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def enter(self, state: State, reason: str = "") -> None:
        """Puts the instance in a state, by whatever way."""
        self.instance.lifecycle.state = State.STARTING
        self.instance.lifecycle.to(State.FAILED)
        self.instance.lifecycle.state, self.instance.lifecycle.reason = state, reason

    async def answer(self, **request) -> list[engine_pb2.GenerateResponse]:
        """Generates to the end."""
        return [c async for c in self.client.generate(engine_pb2.GenerateRequest(**request))]


def tokens(*ids: int, **sampling) -> dict:
    """Returns a request with a tokenized prompt."""
    return {"tokens": {"token_ids": ids}, "sampling": {"max_tokens": 3} | sampling}
