"""A served model whose weights are updated over real sockets, and what fresh ranks say."""

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

from engines import Service, tokens
from fakes import byte_level_tokenizer
from rank_threads import Ranks
from served_ranks import served
from tiny_llama import write_checkpoint

from clients import engine_updates
from clients.engine_updates import Tensor
from clients.safetensors_files import read_folder
from engine_service.core import model_files
from engine_service.core.scheduler import Limits
from engine_service.core.tokenizer import TextCodec
from relay_service.core.manifest import weights_digest
from seedrelay.v1 import engine_pb2

VOCABULARY, BLOCKS, BLOCK_TOKENS = 300, 160, 4
LIMITS = Limits(112, 16, 16, BLOCK_TOKENS)
PROMPT = [3 + (7 * i * i) % 200 for i in range(24)]


class Said(NamedTuple):
    """An answer."""

    tokens: list[int]
    logprobs: list[float]
    last: engine_pb2.GenerateResponse


class Facts(NamedTuple):
    """All that says which weights serve: what lies in memory, and what is told of it."""

    digests: tuple[str, ...]
    version: str
    epoch: int


class Updated:
    """An engine service over real ranks."""

    def __init__(self, model: Ranks, service: Service) -> None:
        self.model, self.service, self.client = model, service, service.client

    @property
    def facts(self) -> Facts:
        """What serves; what is said of it must be what lies there."""
        instance = self.service.instance
        weights = instance.engine.weights
        found = [rank.arena.digested() for rank in self.model.ranks]
        assert [one.digest for one in instance.manifests] == [one.digest for one in found]
        assert weights.digest == weights_digest(found)
        return Facts(tuple(one.digest for one in found), weights.version, weights.epoch)

    @property
    def addresses(self) -> list[dict[str, int]]:
        """Where each tensor lies, by rank."""
        return [
            {name: tensor.data_ptr() for name, tensor in rank.arena.tensors.items()}
            for rank in self.model.ranks
        ]

    async def say(self, prompt: list[int] = PROMPT, count: int = 12, **asked: Any) -> Said:
        """Answers a prompt greedily."""
        request = tokens(*prompt, max_tokens=count, ignore_eos=True, logprobs=1, **asked)
        chunks = await self.service.answer(**request)
        likely = [at.token.logprob for chunk in chunks for at in chunk.logprobs]
        return Said([token for c in chunks for token in c.token_ids], likely, chunks[-1])

    async def update(self, version: str, folder: Path, **changes: Any) -> engine_pb2.UpdateReport:
        """Updates from a folder in one call."""
        request = engine_pb2.UpdateWeightsRequest(update=from_disk(version, folder, **changes))
        return [message async for message in self.client.update(request)][-1].report

    async def begin(self, version: str, **changes: Any) -> str:
        """Begins an update that is pushed; returns its session."""
        update = engine_pb2.WeightUpdate(weight_version=version, source={"push": {}}, **changes)
        request = engine_pb2.BeginWeightUpdateRequest(update=update)
        return (await self.client.begin_update(request)).session

    async def push(
        self, version: str, tensors: list[Tensor], **changes: Any
    ) -> engine_pb2.UpdateReport:
        """Pushes tensors and commits them."""
        session = await self.begin(version, **changes)
        await self.client.push(session, tensors)
        return await self.client.commit_update(session)


def from_disk(version: str, folder: Path, **changes: Any) -> engine_pb2.WeightUpdate:
    """Returns an update from a folder."""
    source = {"disk": {"folder": str(folder)}}
    return engine_pb2.WeightUpdate(weight_version=version, source=source, **changes)


def write(folder: Path, seed: int, **changes: Any) -> Path:
    """Writes a checkpoint with a tokenizer; two ranks can share it."""
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "tie_word_embeddings": False}
    write_checkpoint(folder, seed, **(sizes | changes))
    return with_tokenizer(folder)


def with_tokenizer(folder: Path) -> Path:
    """Adds a tokenizer to a folder."""
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    return folder


def pushable(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by name."""
    return {one.name: one for one in read_folder(folder)}


def shuffled(tensors: list[Tensor], seed: int) -> list[Tensor]:
    """Returns tensors in another order."""
    return random.Random(seed).sample(tensors, len(tensors))  # noqa: S311 - no secret


def piece_bytes(monkeypatch, nbytes: int) -> None:
    """Has the client cut tensors into such pieces."""
    monkeypatch.setattr(engine_updates, "PIECE_BYTES", nbytes)


class Served(contextlib.AsyncExitStack):
    """Serves models until it is left."""

    async def start(self, folder: Path, tp: int = 1, ep: int = 1, **settings: Any) -> Updated:
        """Starts a service on a folder's weights; updates may read beside it."""
        settings = {"kv_blocks": BLOCKS, "kv_block_tokens": BLOCK_TOKENS} | settings
        model = self.enter_context(Ranks(folder, tp, ep, **settings))
        service = served(model, folder.name, LIMITS, BLOCKS)
        instance = service.instance
        instance.files = model_files.read_folder(folder)
        instance.codec = TextCodec(instance.files)
        instance.config = dataclasses.replace(instance.config, model_root=str(folder.parent))
        await service.start()
        self.push_async_callback(service.stop)
        return Updated(model, service)
