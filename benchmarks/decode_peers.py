"""Who generates in `engine_throughput`: our engine, transformers; and what memory allows.

All get token ids and answer with the time at which each token of each answer was there.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import table
from clients.engine import EngineClient
from clients.launch import Service
from seedrelay.v1 import engine_pb2

Prompts = list[list[int]]
Stamps = list[list[float]]
"""By answer: when each of its tokens was there, in seconds since the request."""


class Ours:
    """Our engine, as a client sees it: a stream per prompt, all begun at once."""

    def __init__(self, engine: Service, interval: int = 1) -> None:
        """`interval`: tokens of a message."""
        self.name = "seedrelay" if interval == 1 else f"seedrelay by {interval}"
        self._engine = engine
        self._interval = interval
        self.pid = engine.pid

    def generate(self, prompts: Prompts, tokens: int) -> Stamps:
        """Generates exactly so many tokens for each prompt."""
        return asyncio.run(self._generate(prompts, tokens))

    async def _generate(self, prompts: Prompts, tokens: int) -> Stamps:
        async with EngineClient(self._engine.address) as client:
            await client.status()  # connected
            began = time.perf_counter()
            return await asyncio.gather(
                *(self._stamps(client, prompt, tokens, began) for prompt in prompts)
            )

    async def _stamps(
        self, client: EngineClient, prompt: list[int], tokens: int, began: float
    ) -> list[float]:
        request = engine_pb2.GenerateRequest(
            tokens=engine_pb2.TokenPrompt(token_ids=prompt),
            sampling=engine_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
            stream_interval=self._interval,
        )
        stamps: list[float] = []
        async for message in client.generate(request):
            stamps += [time.perf_counter() - began] * len(message.token_ids)
        return stamps


class Peer:
    """An engine in a process of its own, behind a pipe."""

    def __init__(self, name: str, pid: int, pipe: Connection) -> None:
        self.name = name
        self.pid = pid
        self._pipe = pipe

    def generate(self, prompts: Prompts, tokens: int) -> Stamps:
        """Generates exactly so many tokens for each prompt."""
        self._pipe.send((prompts, tokens))
        stamps: Stamps = self._pipe.recv()
        return stamps


def be_transformers(pipe: Connection, model: str, dtype: str, threads: int) -> None:
    """Generates with `transformers`, greedily, all prompts in one batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    class Clock(StoppingCriteria):
        """Notes when each step was done."""

        def __init__(self) -> None:
            self.stamps: list[float] = []
            self.began = time.perf_counter()

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            self.stamps.append(time.perf_counter() - self.began)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(prompts: Prompts, tokens: int) -> Stamps:
        ids, clock = torch.tensor(prompts), Clock()
        with torch.inference_mode():
            loaded.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                min_new_tokens=tokens, stopping_criteria=StoppingCriteriaList([clock]),
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [clock.stamps] * len(prompts)

    _serve(pipe, generate)


def be_reader(pipe: Connection, threads: int) -> None:
    """Measures how fast memory can be read: sums of 1 GiB, bytes per second."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(1 << 28)

    def read() -> float:
        began = time.perf_counter()
        data.sum()
        return data.nbytes / (time.perf_counter() - began)

    pipe.send("ready")
    table.answer(pipe, {"read": read})


def _serve(pipe: Connection, generate: Any) -> None:
    pipe.send("ready")
    try:
        while True:
            pipe.send(generate(*pipe.recv()))
    except EOFError:
        return


def weight_bytes(model: Path) -> int:
    """Returns the bytes of weights that one step reads."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
