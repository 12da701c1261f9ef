"""Updates of a model that serves that come to nothing: afterwards it is what it was, exactly."""

import asyncio
import os
import pickle
import resource
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file, save_file
from test_fp8_checkpoints import write_float8
from updated_service import from_disk, pushable, with_tokenizer, write

from clients.engine import EngineClient
from clients.errors import CallFailed
from seedrelay.v1 import engine_pb2

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PARTIAL = {"completeness": "COMPLETENESS_PARTIAL"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A, B and C."""
    root = tmp_path_factory.mktemp("refused")
    return [write(root / name, seed) for seed, name in enumerate("abc", 1)]


@pytest.fixture
def copied(folders):
    """Copies B with some of its tensors changed, below the root of models."""

    def copy(name, change, **config):
        folder = write(folders[0].parent / name, 2, **config)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


async def _refused(engine, update, words, code="INVALID_ARGUMENT"):
    """What is refused changes nothing: neither bytes nor what is said of them, nor answers."""
    before, said = engine.facts, (await engine.say()).tokens
    with pytest.raises(CallFailed, match=words) as refused:
        await update
    assert (refused.value.code, engine.facts) == (code, before)
    again = await engine.say()
    assert (again.tokens, again.last.weight_version) == (said, before.version)


# Whole or not at all


async def test_one_tensor_that_does_not_fit(serving, folders, copied):
    """S13: the last one has another shape, or all have; afterwards a good update goes through."""
    engine, fresh = await serving.start(folders[0], tp=2), await serving.start(folders[1], tp=2)
    last = copied("last", lambda held: held.update({NORM: held[NORM][:-1].clone()}))
    await _refused(engine, engine.update("v2", last), rf"{NORM} has shape \[63\]")
    tensors = pushable(last)
    ordered = [*(one for name, one in tensors.items() if name != NORM), tensors[NORM]]
    await _refused(engine, engine.push("v2", ordered), rf"{NORM} has shape \[63\]")
    wide = write(folders[0].parent / "wide", 2, hidden_size=96)
    await _refused(engine, engine.update("v2", wide), "hidden_size|shape")
    await engine.update("v2", folders[1])
    assert engine.facts.digests == fresh.facts.digests
    assert (await engine.say()).tokens == (await fresh.say()).tokens


async def test_a_tensor_that_is_wrong_on_one_rank(serving, tmp_path):
    """S13: only the second rank holds the rows that differ, and no rank changes."""
    before, after = (write(tmp_path / str(n), n, tie_word_embeddings=True) for n in (1, 2))
    engine, tensors = await serving.start(before, tp=2), pushable(after)
    differs = bytearray(tensors[EMBED].data)
    differs[-1] ^= 0x40
    head = tensors[EMBED]._replace(name=HEAD, data=bytes(differs))
    await _refused(engine, engine.push("v2", [*tensors.values(), head]), f"{HEAD} differs")
    await engine.push("v2", list(tensors.values()))
    assert engine.facts.version == "v2"


async def test_a_piece_that_is_bad(serving, folders):
    """S14: of three; the commit afterwards is refused, and a retry arrives."""
    engine, tensors = await serving.start(folders[0]), pushable(folders[1])
    norm = tensors[NORM]
    session = await engine.begin("v2", **PARTIAL)
    header = engine_pb2.PushHeader(
        session=session, tensors=[{"name": NORM, "dtype": "F32", "shape": [64]}]
    )
    pieces = [
        engine_pb2.TensorPiece(tensor=0, offset=offset, data=bytes(norm.data[:96]))
        for offset in (0, 224, 160)
    ]
    messages = [engine_pb2.PushWeightsRequest(header=header)]
    messages += [engine_pb2.PushWeightsRequest(piece=piece) for piece in pieces]
    pushing = engine.client._answer(engine.client._stub.PushWeights(iter(messages)))
    await _refused(engine, pushing, NORM)
    await _refused(
        engine, engine.client.commit_update(session), "the update has ended", "FAILED_PRECONDITION"
    )
    records = [(one.weight_version, one.result) for one in await engine.client.versions()]
    assert records[-1] == ("v2", "failed")
    report = await engine.push("v2", [norm], **PARTIAL)
    assert (report.weight_version, (await engine.say()).last.weight_version) == ("v2", "v2")


@contextmanager
def _no_disk():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_is_full(serving, tmp_path):
    """What comes long before its turn has no room; in order it needs none."""
    before, after = (
        with_tokenizer(write_float8(tmp_path / str(n), seed=n, vocab_size=300)) for n in (1, 2)
    )
    engine, tensors = await serving.start(before, weight_format="fp8"), pushable(after)
    halves = [n for n in tensors if "gate_proj" in n or "k_proj" in n or "q_proj" in n]
    early = [tensors[name] for name in (*halves, *(n for n in tensors if n not in halves))]
    with _no_disk():
        await _refused(
            engine, engine.push("v2", early), "no room for .* bytes", "RESOURCE_EXHAUSTED"
        )
        await engine.push("v2", [tensors[name] for name in sorted(tensors)])
    fresh = await serving.start(after, weight_format="fp8")
    assert engine.facts.digests == fresh.facts.digests


# Who may


async def test_two_at_once(serving, folders):
    """S15, S22: while it is paused, one is served and one is told by whom; both get an answer."""
    engine = await serving.start(folders[0], tp=2)
    fresh = [await serving.start(folder, tp=2) for folder in folders[1:]]
    await engine.client.pause(engine_pb2.PauseGenerationRequest())
    async with EngineClient(engine.service.address) as other:
        begin = engine_pb2.BeginWeightUpdateRequest(update=from_disk("b", folders[1]))
        first = (await engine.client.begin_update(begin)).session
        with pytest.raises(CallFailed, match="changes the weights") as busy:
            await other.begin_update(begin)
        assert (busy.value.code, busy.value.retry_seconds) == ("UNAVAILABLE", 1)
        await engine.client.abort_update(first)

        async def update(client, version, folder):
            request = engine_pb2.UpdateWeightsRequest(update=from_disk(version, folder))
            request.wait.FromSeconds(60)
            return [message async for message in client.update(request)][-1].report

        async with asyncio.timeout(60):
            reports = await asyncio.gather(
                update(engine.client, "b", folders[1]), update(other, "c", folders[2])
            )
    assert sorted(one.epoch for one in reports) == [2, 3]
    (last,) = [one for one in reports if one.epoch == 3]
    assert (engine.facts.version, engine.facts.epoch) == (last.weight_version, 3)
    assert engine.facts.digests == fresh["bc".index(last.weight_version)].facts.digests
    assert (await engine.client.status()).HasField("pause")


class _Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


async def test_nothing_is_unpickled_or_read_elsewhere(serving, folders, tmp_path):
    """S44: neither a tensor's bytes nor a `.bin`; and no path leads out of the root."""
    marker = tmp_path / "marker"
    bad = pickle.dumps(_Marker(str(marker)))
    engine, norm = await serving.start(folders[0]), pushable(folders[0])[NORM]
    root = folders[0].parent
    folder = root / "pickled"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(bad)
    (folder / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    await _refused(engine, engine.update("v2", folder), "holds neither model.safetensors")
    (folder / "model.safetensors").write_bytes(bad)
    await _refused(engine, engine.update("v2", folder), "model.safetensors")
    outside = write(tmp_path / "outside", 2)
    (root / "link").symlink_to(outside)
    for path in (outside, "../" * 9 + str(outside), root / "link"):
        await _refused(engine, engine.update("v2", path), "model root|outside|below")
    data = bad.ljust(len(norm.data), b"\0")[: len(norm.data)]
    await engine.push("v2", [norm._replace(data=data)], **PARTIAL)
    assert bytes(engine.model.ranks[0].arena.tensors["norm"].numpy().view("u1")) == data
    assert not marker.exists()
    pickle.loads(bad)  # noqa: S301 - it would have been seen
    assert marker.exists()
