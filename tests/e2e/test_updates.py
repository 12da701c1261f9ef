"""Weights are updated in place under load: every source with every pause mode.

One process serves model A and one model B: what they say is what each answer is held to.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stage import Stage, reach, seedrelay, status_of
from tokenizers import Tokenizer

from clients.engine import EngineClient
from clients.launch import Service
from seedrelay.v1 import engine_pb2

MODES = ("abort", "wait", "keep", "retract")
SOURCES = ("disk", "push", "relay")
STREAMS, TOKENS, BEGUN = 16, 100, 3
PROMPTS = [[32 + (17 * n + 31 * i * i) % 90 for i in range(24 + n)] for n in range(STREAMS)]
"""Whole characters: an answer's text would depend on half a one before it."""
LIMIT_SECONDS = 90.0


@dataclass
class Played:
    """What a stream has said."""

    prompt: list[int]
    chunks: list[engine_pb2.GenerateResponse] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def last(self) -> engine_pb2.GenerateResponse:
        """The last message."""
        return self.chunks[-1]


class Scene:
    """Two references, and the engine that goes from what one serves to what the other does."""

    def __init__(self, stage: Stage, models: dict[str, Path]) -> None:
        self.models, self.serves = models, "a"
        relay = stage.relay()
        shared = ("--tp", "2", "--relay", relay.address, "--kv-cache-tokens", "8192")
        self.references = {
            name: stage.engine(folder, *shared, "--instance-name", name)
            for name, folder in models.items()
        }
        self.engine = stage.engine(models["a"], *shared, "--weight-version", "v0")
        self._numbers = itertools.count(1)
        self._tokenizer = Tokenizer.from_file(str(models["a"] / "tokenizer.json"))

    async def ready(self) -> None:
        """Waits for all, and asks the references what they say to the prompts."""
        services = [*self.references.values(), self.engine]
        *_, status = await asyncio.gather(*(reach(one) for one in services))
        self.addresses = [rank.arena_address for rank in status.ranks]
        self.answers = {
            name: [one.tokens for one in await together(service, PROMPTS)]
            for name, service in self.references.items()
        }

    async def update(self, source: str, mode: str, to: str) -> dict[str, Any]:
        """Updates the engine as an operator would."""
        what = f"relay:{to}" if source == "relay" else f"{source}:{self.models[to]}"
        done = await asyncio.to_thread(
            seedrelay, "update", "--engine", self.engine.address, "--from", what,
            "--version", f"v{next(self._numbers)}", "--mode", mode, "--json",
        )  # fmt: skip
        assert done.status == 0, done.err
        self.serves = to
        return done.json()

    def text(self, tokens: list[int]) -> str:
        """Decodes a whole answer, end tokens aside."""
        return self._tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def scene(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """Two models of one shape and the three engines."""
    wish = {"hidden_size": 128, "layers": 4, "vocab_size": 4096, "tied": False}
    models = {
        name: make_model(f"update-{name}", seed, **wish) for name, seed in (("a", 0), ("b", 7))
    }
    stage = Stage(tmp_path_factory.mktemp("updates"))
    try:
        scene = Scene(stage, models)
        asyncio.run(scene.ready())
        yield scene
    finally:
        stage.close()


def asked(prompt: list[int], max_tokens: int = TOKENS) -> engine_pb2.GenerateRequest:
    """Asks for so many tokens."""
    return engine_pb2.GenerateRequest(
        tokens=engine_pb2.TokenPrompt(token_ids=prompt),
        sampling=engine_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def play(client: EngineClient, played: Played, max_tokens: int = TOKENS) -> Played:
    """Reads an answer to its end."""
    async for chunk in client.generate(asked(played.prompt, max_tokens)):
        played.chunks.append(chunk)
        if len(played.tokens) >= BEGUN:
            played.begun.set()
    return played


async def together(service: Service, prompts: list[list[int]], *counts: int) -> list[Played]:
    """Asks all prompts at once."""
    async with EngineClient(service.address) as client:
        pairs = itertools.zip_longest(prompts, counts, fillvalue=TOKENS)
        return await asyncio.gather(*(play(client, Played(p), n) for p, n in pairs))


@pytest.mark.parametrize(("source", "mode"), list(itertools.product(SOURCES, MODES)))
async def test_an_update_under_load(scene: Scene, source: str, mode: str) -> None:
    """What ran says what its mode promises, and all that follows what a fresh process says."""
    before, after = scene.serves, "b" if scene.serves == "a" else "a"
    old = (await status_of(scene.engine)).weight_version
    async with EngineClient(scene.engine.address) as client, asyncio.timeout(LIMIT_SECONDS):
        running = [Played(prompt) for prompt in PROMPTS]
        reading = asyncio.gather(*(play(client, one) for one in running))
        await asyncio.gather(*(one.begun.wait() for one in running))
        done = await scene.update(source, mode, after)
        await reading
        first = await play(client, Played(PROMPTS[0]))
    status = await status_of(scene.engine)
    reference = await status_of(scene.references[after])
    assert [rank.digest for rank in status.ranks] == [rank.digest for rank in reference.ranks]
    assert done["weights_digest"] == status.weights_digest == reference.weights_digest
    assert [rank.arena_address for rank in status.ranks] == scene.addresses
    assert first.tokens == scene.answers[after][0]
    # Whoever was sent back has had its prompt read by the new weights: that may be found.
    assert mode == "retract" or first.last.usage.cached_tokens == 0
    followers = await together(scene.engine, PROMPTS)
    assert [one.tokens for one in followers] == scene.answers[after]
    for number, one in enumerate(running):
        _check_books(scene, one, {old, done["weight_version"]})
        _check_mode(one, mode, scene.answers[before][number], done)
    if mode == "retract":
        await _check_retracted(scene, running, after)
    spread = [len(one.last.version_spans) for one in running]
    assert max(spread) == (2 if mode in ("keep", "retract") else 1), "the load was not there"


def _check_books(scene: Scene, one: Played, versions: set[str]) -> None:
    """Text, counts and spans are those of the tokens that came."""
    assert "".join(chunk.text for chunk in one.chunks) == scene.text(one.tokens)
    assert one.last.usage.completion_tokens == len(one.tokens)
    assert one.last.usage.prompt_tokens == len(one.prompt)
    labels = [chunk.weight_version for chunk in one.chunks for _ in chunk.token_ids]
    spans = [s.weight_version for s in one.last.version_spans for _ in range(s.start, s.end)]
    assert labels == spans
    assert set(labels) <= versions


def _check_mode(one: Played, mode: str, expected: list[int], done: dict[str, Any]) -> None:
    finish = engine_pb2.FINISH_REASON_ABORT if mode == "abort" else engine_pb2.FINISH_REASON_LENGTH
    made_before = one.last.version_spans[0].end
    if one.last.version_spans[0].weight_version == done["weight_version"]:
        made_before = 0  # it waited until the new weights served
    assert one.tokens[:made_before] == expected[:made_before]
    if made_before == TOKENS:
        finish = engine_pb2.FINISH_REASON_LENGTH  # it was through before
    assert one.last.finish_reason == finish
    assert mode == "abort" or len(one.tokens) == TOKENS
    assert mode != "wait" or made_before == TOKENS


async def _check_retracted(scene: Scene, running: list[Played], after: str) -> None:
    """What follows the change is what the new weights say to what was there."""
    cut = [one for one in running if len(one.last.version_spans) == 2]
    heads = [one.tokens[: one.last.version_spans[0].end] for one in cut]
    prompts = [one.prompt + head for one, head in zip(cut, heads, strict=True)]
    counts = [TOKENS - len(head) for head in heads]
    rests = await together(scene.references[after], prompts, *counts)
    assert [head + rest.tokens for head, rest in zip(heads, rests, strict=True)] == [
        one.tokens for one in cut
    ]
