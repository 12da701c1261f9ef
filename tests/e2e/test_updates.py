"""Weights are updated in place under load: every source with every pause mode.

One process serves model A and one model B: what they say is what each answer is held to.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from stage import Stage, eventually, reach, status_of
from tokenizers import Tokenizer

from clients.engine import EngineClient
from clients.errors import CallFailed
from clients.launch import Service
from clients.relay import RelayClient
from clients.safetensors_files import read_folder
from relay_service.core.match import Target
from seedrelay.v1 import engine_pb2

MODES = ("abort", "wait", "keep", "retract")
SOURCES = ("disk", "push", "relay")
STREAMS, TOKENS, BEGUN = 16, 48, 2
UPDATES = 200
"""As many as follow each other; memory is measured from when each pair has had its turn."""
LIMIT_SECONDS = 90.0
ENGINE = "engine"
LEASE_WAIT_NANOS = 200_000_000
SAMPLE = {
    ("disk", "abort"), ("push", "wait"), ("relay", "keep"), ("disk", "retract"),
}  # fmt: skip
"""Every source and every mode."""


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
        self.relay = stage.relay()
        shared = ("--tp", "2", "--relay", self.relay.address, "--kv-cache-tokens", "8192")
        self.references = {
            name: stage.engine(folder, *shared, "--instance-name", name)
            for name, folder in models.items()
        }
        self.engine = stage.engine(
            models["a"], *shared, "--weight-version", "v0", "--instance-name", ENGINE
        )
        self._numbers = itertools.count(1)
        self._tokenizer = Tokenizer.from_file(str(models["a"] / "tokenizer.json"))
        texts = [f"{number}. What does a seed need" + " more" * number for number in range(STREAMS)]
        self.prompts = [self._tokenizer.encode(text).ids for text in texts]
        self.known = self._tokenizer.encode("Why is the sea salty, and since when?").ids
        """A prompt that nobody asks while weights change."""

    async def ready(self) -> None:
        """Waits for all, and asks the references what they say to the prompts."""
        services = [*self.references.values(), self.engine]
        *_, status = await asyncio.gather(*(reach(one) for one in services))
        self.addresses = [rank.arena_address for rank in status.ranks]
        self.answers = {
            name: [one.tokens for one in await together(service, [*self.prompts, self.known])]
            for name, service in self.references.items()
        }

    async def update(self, source: str, mode: str, to: str) -> engine_pb2.UpdateReport:
        """Updates the engine."""
        asked = engine_pb2.WeightUpdate(
            weight_version=f"v{next(self._numbers)}", pause_mode=f"PAUSE_MODE_{mode.upper()}",
            lease_wait={"nanos": LEASE_WAIT_NANOS},
        )  # fmt: skip
        async with EngineClient(self.engine.address) as client:
            done = await (self._pushed if source == "push" else self._whole)(
                client, asked, source, to
            )
        self.serves = to
        return done

    async def read(self, relay: RelayClient) -> str:
        """Takes a lease on what the engine serves, and never gives it back."""
        known = [match.instance for match in await relay.sources(Target())]
        (found,) = [one for one in known if one.instance == ENGINE]
        return (await relay.acquire_lease(found, "frozen")).lease

    async def _whole(
        self, client: EngineClient, asked: engine_pb2.WeightUpdate, source: str, to: str
    ) -> engine_pb2.UpdateReport:
        if source == "disk":
            asked.source.disk.folder = str(self.models[to])
        else:
            asked.source.relay.options.source_instance = to
        request = engine_pb2.UpdateWeightsRequest(update=asked)
        return [message.report async for message in client.update(request)][-1]

    async def _pushed(
        self, client: EngineClient, asked: engine_pb2.WeightUpdate, _source: str, to: str
    ) -> engine_pb2.UpdateReport:
        asked.source.push.SetInParent()
        begun = await client.begin_update(engine_pb2.BeginWeightUpdateRequest(update=asked))
        await client.push(begun.session, read_folder(self.models[to]))
        return await client.commit_update(begun.session)

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


async def ask_until(
    done: asyncio.Event,
    client: EngineClient,
    prompt: list[int],
    begun: list[Played],
    former: list[Played] | None,
) -> None:
    """Asks again and again until `done`, so that something runs whenever weights change.

    It begins after a `former` one has: answers in step would all end at once, and none run then.
    """
    if former is not None:
        await eventually(lambda: former and former[0].begun.is_set(), 60)
    while not done.is_set():
        begun.append(Played(prompt))
        await play(client, begun[-1])


async def together(service: Service, prompts: list[list[int]], *counts: int) -> list[Played]:
    """Asks all prompts at once."""
    async with EngineClient(service.address) as client:
        pairs = itertools.zip_longest(prompts, counts, fillvalue=TOKENS)
        return await asyncio.gather(*(play(client, Played(p), n) for p, n in pairs))


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.full)
        for pair in itertools.product(SOURCES, MODES)
    ],
)
async def test_an_update_under_load(scene: Scene, source: str, mode: str) -> None:
    """What ran says what its mode promises, and all that follows what a fresh process says."""
    before, after = scene.serves, "b" if scene.serves == "a" else "a"
    old = (await status_of(scene.engine)).weight_version
    async with (
        EngineClient(scene.engine.address) as client,
        RelayClient(scene.relay.address) as relay,
        asyncio.timeout(LIMIT_SECONDS),
    ):
        await play(client, Played(scene.known))
        applied, running = asyncio.Event(), [list[Played]() for _ in scene.prompts]
        asking = asyncio.gather(
            *(
                ask_until(
                    applied, client, prompt, begun, running[number - 4] if number > 3 else None
                )
                for number, (prompt, begun) in enumerate(zip(scene.prompts, running, strict=True))
            )
        )
        await eventually(lambda: all(one and one[0].begun.is_set() for one in running), 60)
        lease = await scene.read(relay)
        done = await scene.update(source, mode, after)
        with pytest.raises(CallFailed, match=f"its weights are updated to {done.weight_version}"):
            await relay.grant_read(lease, 0, [(0, 1)], 1)
        applied.set()
        await asking
        first = await play(client, Played(scene.known))
    assert (done.readers, done.leases_ended) == (1, 1)
    assert done.seconds_for_readers >= LEASE_WAIT_NANOS / 1e9
    status = await status_of(scene.engine)
    reference = await status_of(scene.references[after])
    assert [rank.digest for rank in status.ranks] == [rank.digest for rank in reference.ranks]
    assert done.weights_digest == status.weights_digest == reference.weights_digest
    assert [rank.arena_address for rank in status.ranks] == scene.addresses
    assert (first.tokens, first.last.usage.cached_tokens) == (scene.answers[after][-1], 0)
    followers = await together(scene.engine, scene.prompts)
    assert [one.tokens for one in followers] == scene.answers[after][:-1]
    for number, one in ((n, one) for n, begun in enumerate(running) for one in begun):
        _check_books(scene, one, {old, done.weight_version})
        answers = scene.answers[before][number], scene.answers[after][number]
        _check_mode(one, mode, *answers, done.weight_version)
    played = [one for begun in running for one in begun]
    if mode == "retract":
        await _check_retracted(scene, played, after)
    spread = [len(one.last.version_spans) for one in played]
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


def _check_mode(one: Played, mode: str, old: list[int], new: list[int], version: str) -> None:
    """Tokens and end are what the mode promises; `old` and `new` are whole answers."""
    finish, spans = one.last.finish_reason, one.last.version_spans
    if spans and spans[0].weight_version == version:  # it has waited for the new weights
        assert (one.tokens, finish) == (new, engine_pb2.FINISH_REASON_LENGTH)
        return
    made_before = spans[0].end if spans else 0
    assert one.tokens[:made_before] == old[:made_before]
    if made_before == TOKENS or mode in ("keep", "retract"):
        assert (len(one.tokens), finish) == (TOKENS, engine_pb2.FINISH_REASON_LENGTH)
    else:
        assert (mode, finish) == ("abort", engine_pb2.FINISH_REASON_ABORT)


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


@pytest.mark.full
async def test_one_update_after_another(scene: Scene) -> None:
    """Under load, in turn by every source and mode: nothing waits for ever, nothing grows."""
    stop = asyncio.Event()

    async def ask(prompt: list[int]) -> None:
        async with EngineClient(scene.engine.address) as client:
            while not stop.is_set():
                await play(client, Played(prompt))

    asking = [asyncio.create_task(ask(prompt)) for prompt in scene.prompts[:4]]
    cells = itertools.cycle(itertools.product(SOURCES, MODES))
    async with asyncio.timeout(LIMIT_SECONDS + 2 * UPDATES):
        for number, (source, mode) in zip(range(UPDATES), cells, strict=False):
            await scene.update(source, mode, "b" if scene.serves == "a" else "a")
            if number == len(SOURCES) * len(MODES):
                before = _held(scene.engine)
        stop.set()
        await asyncio.gather(*asking)
    after = _held(scene.engine)
    for pid, held in after.items():
        assert held.descriptors <= before[pid].descriptors + 2, "descriptors leak"
        assert held.threads <= before[pid].threads + 2, "threads leak"
        assert held.private_bytes < before[pid].private_bytes + (24 << 20), "memory leaks"
    followers = await together(scene.engine, scene.prompts)
    assert [one.tokens for one in followers] == scene.answers[scene.serves][:-1]
    assert (await status_of(scene.engine)).epoch > UPDATES


class Held(NamedTuple):
    """What a process has."""

    descriptors: int
    threads: int
    private_bytes: int


def _held(service: Service) -> dict[int, Held]:
    """Looks at every process of a service."""
    found = {}
    for pid in service.processes():
        process = Path(f"/proc/{pid}")
        sizes = [int(n) for n in (process / "statm").read_text().split()]
        found[pid] = Held(
            len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())),
            (sizes[1] - sizes[2]) * os.sysconf("SC_PAGE_SIZE"),
        )  # fmt: skip
    return found
