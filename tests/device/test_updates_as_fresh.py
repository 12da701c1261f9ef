"""Updates of a model that serves, over real sockets: afterwards it is what a fresh one would be.

Everything is compared with ranks that were started on the new weights.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fp8_checkpoints import write_float8
from updated_service import (
    pushable,
    with_tokenizer,
    write,
)

from clients.errors import CallFailed
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LONG = [5 + (11 * i * i) % 250 for i in range(96)]
ABORT = "PAUSE_MODE_ABORT"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A and B of a model with a head of its own."""
    root = tmp_path_factory.mktemp("fresh")
    return [write(root / name, seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Weights A and B of a model whose head is the embedding."""
    root = tmp_path_factory.mktemp("tied")
    return [
        write(root / name, seed, tie_word_embeddings=True) for name, seed in (("a", 1), ("b", 2))
    ]


# What was computed before


@pytest.mark.parametrize("clear", [True, False])
async def test_no_answer_comes_of_kv_of_other_weights(serving, folders, clear):
    """S01: flushed or not; and the report says which."""
    fresh = await serving.start(folders[1])
    engine = await serving.start(folders[0])
    before = await engine.say()
    assert (await engine.say()).last.usage.cached_tokens > 0
    report = await engine.update("v2", folders[1], clear_cache=clear)
    assert (report.cache_kept, report.flushed_blocks > 0) == (not clear, clear)
    after, expected = await engine.say(), await fresh.say()
    assert after.tokens == expected.tokens != before.tokens
    assert after.logprobs == expected.logprobs
    assert after.last.usage.cached_tokens == 0
    assert (await engine.say()).last.usage.cached_tokens > 0
    assert engine.facts.digests == fresh.facts.digests


# What a tensor is to others


async def test_tied_weights(serving, tied, tmp_path):
    """S02: the embedding alone changes both; a head that is another one is refused."""
    engine = await serving.start(tied[0])
    tensors = pushable(tied[1])
    assert HEAD not in tensors
    mixed = load_file(tied[0] / "model.safetensors")
    mixed[EMBED] = load_file(tied[1] / "model.safetensors")[EMBED]
    folder = write(tmp_path / "mixed", 1, tie_word_embeddings=True)
    save_file(mixed, folder / "model.safetensors")
    fresh = await serving.start(folder)
    before, partial = engine.facts, {"completeness": "COMPLETENESS_PARTIAL"}
    head = tensors[EMBED]._replace(name=HEAD)
    other = head._replace(data=pushable(tied[0])[EMBED].data)
    for pushed in ([head], [tensors[EMBED], other]):
        with pytest.raises(CallFailed, match=HEAD) as refused:
            await engine.push("v2", pushed, **partial)
        assert refused.value.code == "INVALID_ARGUMENT"
        assert engine.facts == before
    for version, pushed in (("v2", [tensors[EMBED]]), ("v3", [head, tensors[EMBED]])):
        report = await engine.push(version, pushed, **partial)
        assert any(EMBED in note for note in report.notes) == (len(pushed) == 2)
        assert engine.facts.digests == fresh.facts.digests
        assert (await engine.say()).tokens == (await fresh.say()).tokens
    request = engine_pb2.CheckWeightsRequest(mode=engine_pb2.CHECK_MODE_DIGEST, list_tensors=True)
    found = await engine.client.check(request, 60)
    assert found.equal
    alias = {one.name: one.alias for one in found.ranks[0].tensors}
    assert (alias["embed"], alias["head"]) == ("", "embed")


async def test_scales_that_are_not_sent(serving, tmp_path):
    """S03: float8 matrices without their scales are refused by name; with them all is finite."""
    before, after = (
        with_tokenizer(write_float8(tmp_path / str(n), seed=n, vocab_size=300)) for n in (1, 2)
    )
    engine = await serving.start(before, weight_format="fp8")
    facts, tensors = engine.facts, pushable(after)
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    assert scales
    with pytest.raises(CallFailed, match=rf"missing tensors: .*{scales[0]}") as refused:
        await engine.push("v2", [t for name, t in tensors.items() if name not in scales])
    assert (refused.value.code, engine.facts) == ("INVALID_ARGUMENT", facts)
    await engine.push("v2", list(tensors.values()))
    fresh = await serving.start(after, weight_format="fp8")
    assert engine.facts.digests == fresh.facts.digests
    assert (await engine.say()).tokens == (await fresh.say()).tokens


@pytest.mark.parametrize("source", ["disk", "push"])
@pytest.mark.parametrize("form", ["plain", "int8", "packed"])
async def test_what_is_derived_follows(serving, folders, form, source):
    """S05, S06, S45: fused, packed and computed tensors, far into a context, in place."""
    engine = await serving.start(folders[0], weight_format=form, dtype=_dtype(form))
    fresh = await serving.start(folders[1], weight_format=form, dtype=_dtype(form))
    await engine.say(LONG)
    places = engine.addresses
    if source == "disk":
        await engine.update("v2", folders[1], allow_narrowing=True)
    else:
        await engine.push("v2", list(pushable(folders[1]).values()), allow_narrowing=True)
    assert engine.facts.digests == fresh.facts.digests
    assert (await engine.say(LONG)).tokens == (await fresh.say(LONG)).tokens
    assert engine.addresses == places
    tables = engine.model.ranks[0].arena.tensors
    for name in ("rotary.cos", "rotary.sin"):
        assert torch.isfinite(tables[name]).all()
        assert torch.equal(tables[name], fresh.model.ranks[0].arena.tensors[name])


def _dtype(form: str) -> str:
    return "bfloat16" if form == "packed" else "float32"


async def test_a_dummy_is_not_updated(serving, folders):
    """S06: it has no weights that could be changed, and says so."""
    engine = await serving.start(folders[0])
    for state in (State.DUMMY, State.LANDING):
        engine.service.enter(state)
        with pytest.raises(CallFailed, match=f"is {state}: weights that serve") as refused:
            await engine.update("v2", folders[1])
        assert refused.value.code == "FAILED_PRECONDITION"
