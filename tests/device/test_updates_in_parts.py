"""Weights that are pushed to a model that serves: by whatever name, order, size and type they come.

Everything is compared with ranks that were started on the new weights.
"""

import pytest
import torch
from oracles import make
from safetensors.torch import load_file, save_file
from updated_service import (
    piece_bytes,
    pushable,
    shuffled,
    with_tokenizer,
    write,
)

from clients.engine_updates import Tensor
from clients.errors import CallFailed
from engine_service.core import expert_moves
from seedrelay.v1 import engine_pb2

EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights A and B of a model with a head of its own."""
    root = tmp_path_factory.mktemp("fresh")
    return [write(root / name, seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Weights A and B of a model with experts."""
    root = tmp_path_factory.mktemp("sparse")
    first = make("mixtral", root / "a", vocab_size=300).folder
    second = with_tokenizer(root / "b") if (root / "b").mkdir() is None else None
    for file in first.iterdir():
        data = file.read_bytes()
        (second / file.name).write_bytes(data)
        if file.suffix == ".safetensors":
            tensors = {name: 0.5 * one.flip(0) for name, one in load_file(file).items()}
            save_file(tensors, second / file.name)
    return [with_tokenizer(one) for one in (first, second)]


async def test_names_that_are_wrong_or_lack(serving, folders):
    """S07, S08: all that is unknown or missing is listed, and nothing has changed."""
    engine = await serving.start(folders[0])
    before, said, tensors = engine.facts, (await engine.say()).tokens, pushable(folders[1])
    whole = list(tensors.values())
    query = "model.layers.0.self_attn.q_proj.weight"
    cases = {
        "unknown tensors: base_model.model": [
            one._replace(name=f"base_model.model.{one.name}") for one in whole
        ],
        "unknown tensors: .*q_proj.base_layer.weight": [
            one._replace(name=one.name.replace("q_proj.", "q_proj.base_layer.")) for one in whole
        ],
        "unknown tensors: extra": [*whole, tensors[query]._replace(name="extra")],
        f"missing tensors: {query}": [one for one in whole if one.name != query],
        "missing tensors: model.layers.1": [one for one in whole if "layers.1." not in one.name],
    }
    for words, pushed in cases.items():
        with pytest.raises(CallFailed, match=words) as refused:
            await engine.push("v2", pushed)
        assert refused.value.code == "INVALID_ARGUMENT"
        assert (engine.facts, (await engine.say()).tokens) == (before, said)
    with pytest.raises(CallFailed, match="unknown tensors: extra"):
        await engine.push("v2", cases["unknown tensors: extra"][-1:],
                          completeness="COMPLETENESS_PARTIAL")  # fmt: skip
    assert engine.facts == before


@pytest.mark.parametrize("nbytes", [1 << 10, 16 * 24, 1 << 22])
async def test_any_order_and_any_cut(serving, folders, nbytes, monkeypatch):
    """S09: halves of fused matrices may lie far apart; bytes and tokens are the same."""
    piece_bytes(monkeypatch, nbytes)
    fresh = await serving.start(folders[1], tp=2)
    engine = await serving.start(folders[0], tp=2)
    whole = list(pushable(folders[1]).values())
    back = list(pushable(folders[0]).values())
    for order in (whole, whole[::-1], shuffled(whole, 3)):
        report = await engine.push("b", order)
        assert engine.facts.digests == fresh.facts.digests
        assert [one.digest for one in report.ranks] == list(fresh.facts.digests)
        assert (await engine.say()).tokens == (await fresh.say()).tokens
        await engine.push("a", back)


async def test_a_tensor_at_the_limit_of_a_piece(serving, tmp_path, monkeypatch):
    """S10, S47: one piece exactly, an element less, one more; and larger than any message."""
    before, after = (write(tmp_path / str(n), n, vocab_size=17000) for n in (1, 2))
    tensors = pushable(after)
    assert len(tensors[EMBED].data) > 4 << 20
    engine, fresh = await serving.start(before), await serving.start(after)
    await engine.push("v2", list(tensors.values()))
    assert engine.facts.digests == fresh.facts.digests
    back = pushable(before)
    size = len(back["model.norm.weight"].data)
    for number, nbytes in enumerate((size - 16, size, size + 16), 3):
        piece_bytes(monkeypatch, nbytes)
        pushed = {n: t for n, t in (back if number % 2 else tensors).items() if "norm" in n}
        await engine.push(f"v{number}", list(pushed.values()), completeness="COMPLETENESS_PARTIAL")
        held = engine.model.ranks[0].arena.tensors["norm"]
        assert bytes(held.view(torch.uint8).numpy()) == bytes(pushed["model.norm.weight"].data)


async def test_a_router_keeps_its_precision(serving, sparse):
    """S11: in float32 to the bit; in bfloat16 the report of its session says so."""
    engine = await serving.start(sparse[0], dtype="bfloat16", weight_format="plain")
    name, partial = "model.layers.0.block_sparse_moe.gate.weight", "COMPLETENESS_PARTIAL"
    router = torch.full(engine.model.ranks[0].arena.tensors["layer.0.router"].shape, 1 + 2**-20)
    for kind, dtype, pushed in (("F32", "float32", router), ("BF16", "", router.bfloat16())):
        data = bytes(pushed.contiguous().view(torch.uint8).numpy())
        report = await engine.push(
            f"in {kind}", [Tensor(name, kind, pushed.shape, data)], completeness=partial
        )
        assert torch.equal(engine.model.ranks[0].arena.tensors["layer.0.router"], pushed.float())
        told = [(one.source, one.target) for one in report.ranks[0].conversions]
        assert told == ([] if dtype else [("bfloat16", "float32")])


# Experts


async def test_experts_that_were_moved(serving, sparse):
    """S66: every slot gets the new weights of the expert that lies there now."""
    slots = ((3, 1), (0, 2))
    groups = [engine_pb2.GroupExperts(experts=held) for held in slots]
    layers = [engine_pb2.LayerExperts(layer=layer, groups=groups) for layer in range(3)]
    engine = await serving.start(sparse[0], ep=2)
    fresh = await serving.start(sparse[1], ep=2)
    said = (await fresh.say()).tokens
    for one in (engine, fresh):
        await one.client.set_expert_map(layers, 60)
    assert (await engine.say()).tokens != said
    await engine.update("v2", sparse[1])
    assert engine.facts.digests == fresh.facts.digests
    assert (await engine.say()).tokens == said


async def test_an_update_while_experts_move(serving, sparse, monkeypatch):
    """S66: it waits for its turn or is told who has it, and a move while it stages is refused."""
    engine = await serving.start(sparse[0], ep=2)
    groups = [engine_pb2.GroupExperts(experts=held) for held in ((3, 1), (0, 2))]
    layers = [engine_pb2.LayerExperts(layer=0, groups=groups)]
    refusals = []

    async def meanwhile(self, layer, slots, report, move=expert_moves.ExpertMoves._move):
        with pytest.raises(CallFailed, match="a move of experts changes the weights") as refused:
            await engine.update("v2", sparse[1])
        refusals.append(refused.value.code)
        await move(self, layer, slots, report)

    monkeypatch.setattr(expert_moves.ExpertMoves, "_move", meanwhile)
    await engine.client.set_expert_map(layers, 60)
    assert refusals == ["UNAVAILABLE"]
    session = await engine.begin("v2")
    with pytest.raises(CallFailed, match="experts are moved afterwards") as refused:
        await engine.client.set_expert_map(layers, 60)
    assert refused.value.code == "FAILED_PRECONDITION"
    await engine.client.abort_update(session)
    fresh = await serving.start(sparse[1], ep=2)
    said = (await fresh.say()).tokens
    await engine.update("v2", sparse[1])
    assert (await engine.say()).tokens == said
