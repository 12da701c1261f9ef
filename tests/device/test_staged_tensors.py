"""What is pushed, in part or whole: what fits, and what is refused by name and changes nothing."""

import pytest
import torch
from format_cases import rounds, serves
from oracles import make
from safetensors.torch import save_file
from test_fp8_checkpoints import write_float8
from tiny_llama import write_checkpoint
from updating import (
    disk,
    finished,
    headers,
    loaded,
    opened,
    pieces,
    push,
    served,
    tokens,
)

from engine_service.core.update_messages import DropStaging, PushedHeader, StageHeaders, StagePiece
from engine_service.device.collector import Collector
from engine_service.errors import ArenaError, CheckpointError, WrongState

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"
VALUE = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Weights A and B whose head is the embedding."""
    return [write_checkpoint(tmp_path_factory.mktemp("tied"), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Weights A and B with a head of their own."""
    return [
        write_checkpoint(
            tmp_path_factory.mktemp("own"), seed, tie_word_embeddings=False, num_hidden_layers=2
        )
        for seed in (1, 2)
    ]  # fmt: skip


def _mixed(folder, before, after, names, tmp_path):
    """Returns a folder with some tensors of B among those of A."""
    tensors = loaded(before) | {name: loaded(after)[name] for name in names}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def _push(rank, tensors, nbytes=1 << 16, *, digests=False):
    rank.staging.answer(headers(tensors, digests=digests))
    for piece in pieces(tensors, nbytes):
        rank.staging.answer(piece)


def _refused(rank, command, words, **details):
    """The command is refused, and what serves is what it was."""
    before = rank.arena.digested()
    with pytest.raises(CheckpointError, match=words) as caught:
        rank.staging.answer(command)
    assert caught.value.details.items() >= details.items()
    assert rank.arena.digested() == before


# Partial


@pytest.mark.parametrize(
    "names", [(NORM,), (KEY,), (QUERY, VALUE), (EMBED, NORM), (HEAD,)], ids=lambda n: n[0]
)
def test_tensors_that_do_not_come_stay(sizes, tmp_path, names):
    """A norm, a part of a fused matrix, an embedding: the rest is what it was, digests too."""
    before, after = sizes
    rank = served(before)
    expected = served(_mixed(before, before, after, names, tmp_path))
    serving = rank.arena.digested()
    opened(rank, partial=True)
    _push(rank, {name: loaded(after)[name] for name in names})
    staged = finished(rank)
    assert rank.arena.digested() == serving
    assert 0 < staged.blocks_changed < serving.block_count - 1
    assert staged.extra_bytes < serving.weight_bytes
    assert f"{len(names)} tensors come, the others stay" in staged.notes
    rank.staging.apply()
    assert staged.manifest == rank.arena.digested() == expected.arena.digested()
    assert tokens(rank) == tokens(expected)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_processed_matrix_comes_whole_or_not_at_all(sizes, tmp_path, name):
    """Where a format makes one matrix of q, k and v, whoever sends one of them sends all."""
    if not serves(name, torch.float32):
        pytest.skip("not on this processor")
    before, after = sizes
    rank, tensors = served(before, weight_format=name), loaded(after)
    opened(rank, partial=True)
    words = f"missing tensors: {VALUE}$"
    _refused(rank, headers({n: tensors[n] for n in (QUERY, KEY)}), words, tensor=VALUE)
    whole = (QUERY, KEY, VALUE, NORM)
    _push(rank, {n: tensors[n] for n in whole})
    staged = finished(rank)
    rank.staging.apply()
    expected = served(_mixed(before, before, after, whole, tmp_path), weight_format=name)
    assert staged.manifest == rank.arena.digested() == expected.arena.digested()


def test_a_full_update_names_what_lacks(sizes):
    """Tensors that were not announced, and then pieces that have not come."""
    before, after = sizes
    rank, tensors = served(before), loaded(after)
    opened(rank)
    fewer = {name: one for name, one in tensors.items() if name != KEY}
    _refused(rank, headers(fewer), f"missing tensors: {KEY}$", tensor=KEY)
    rank.staging.answer(headers(tensors))
    for piece in pieces(tensors, 1 << 16)[:-1]:
        rank.staging.answer(piece)
    last = list(tensors)[-1]
    with pytest.raises(CheckpointError, match=f"incomplete tensors: {last} lacks"):
        finished(rank)
    rank.staging.answer(pieces(tensors, 1 << 16)[-1])  # what has not come may still come
    finished(rank)
    rank.staging.apply()
    assert rank.arena.digested() == served(after).arena.digested()


# Tied weights


def test_a_head_equal_to_the_embedding_is_let_pass(tied):
    """The note says by which rule; the head comes first, and in pieces."""
    rank, tensors = served(tied[0]), loaded(tied[1])
    opened(rank)
    _push(rank, {HEAD: tensors[EMBED].clone(), **tensors}, 999)
    staged = finished(rank)
    assert any("tie_word_embeddings" in note for note in staged.notes)
    rank.staging.apply()
    assert rank.arena.digested() == served(tied[1]).arena.digested()


def _bring_whole(source, rank, folder):
    source(rank, folder)
    finished(rank)


@pytest.mark.parametrize("source", [disk, push], ids=["disk", "push"])
def test_a_head_that_differs_is_refused(tied, tmp_path, source):
    """It could only be dropped: the two are one storage."""
    rank, tensors = served(tied[0]), loaded(tied[1])
    head = tensors[EMBED].clone()
    head[-1, -1] += 1
    save_file({HEAD: head, **tensors}, tmp_path / "model.safetensors")
    opened(rank)
    before = rank.arena.digested()
    with pytest.raises(CheckpointError, match=f"{HEAD} differs from {EMBED}"):
        _bring_whole(source, rank, tmp_path)
    with pytest.raises(WrongState):
        rank.staging.apply()
    assert rank.arena.digested() == before
    rank.staging.answer(DropStaging())


def test_of_a_head_alone_it_is_said_what_to_send(tied):
    """A partial update of a tied model names the embedding."""
    rank = served(tied[0])
    opened(rank, partial=True)
    head = {HEAD: loaded(tied[1])[EMBED]}
    _refused(rank, headers(head), f"{HEAD} is {EMBED} .*send that one instead", tensor=HEAD)
    embedding = {EMBED: loaded(tied[1])[EMBED]}
    _push(rank, embedding)
    finished(rank)
    rank.staging.apply()
    embed, head = rank.arena.tensors["embed"], rank.arena.tensors["head"]
    assert torch.equal(embed, embedding[EMBED])
    assert embed.data_ptr() == head.data_ptr()


# Pieces


WRONG = {
    "an index that is none": (StagePiece(99, 0, b"1234"), "no tensor 99"),
    "an index below": (StagePiece(-1, 0, b"1234"), "no tensor -1"),
    "beyond the end": (StagePiece(0, 252, bytes(8)), f"{NORM} has 64 elements"),
    "before the start": (StagePiece(0, -4, bytes(8)), "no whole number"),
    "half an element": (StagePiece(0, 2, bytes(4)), "no whole number"),
    "a piece of one": (StagePiece(0, 0, bytes(3)), "no whole number"),
    "twice": (StagePiece(0, 4, bytes(8)), f"{NORM}: a part of it has come twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_piece_that_is_wrong_harms_nothing_else(sizes, case):
    """It is refused, and the rest of the update goes on."""
    piece, words = WRONG[case]
    rank, norm = served(sizes[0]), {NORM: loaded(sizes[1])[NORM]}
    opened(rank, partial=True)
    rank.staging.answer(headers(norm))
    first, *others = pieces(norm, 100)
    rank.staging.answer(first)
    _refused(rank, piece, words)
    for other in others:
        rank.staging.answer(other)
    finished(rank)
    rank.staging.apply()
    assert torch.equal(rank.arena.tensors["norm"], norm[NORM])


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (PushedHeader("base.model.norm.weight", "F32", (64,)), "unknown tensors: base.model.norm"),
        (PushedHeader(NORM, "F32", (65,)), r"has shape \[65\], the model needs \[64\]"),
        (PushedHeader(NORM, "F32", (0,)), r"has shape \[0\], the model needs \[64\]"),
        (PushedHeader(NORM, "F32", ()), r"has shape \[\], the model needs \[64\]"),
        (PushedHeader(NORM, "I64", (64,)), f"{NORM} has dtype I64"),
        (PushedHeader(NORM, "F4", (64,)), f"{NORM} has dtype F4"),
        (PushedHeader(NORM, "F8_E8M0", (64,)), f"{NORM} has dtype F8_E8M0"),
        (PushedHeader(NORM, "BOOL", (64,)), f"{NORM} has dtype BOOL"),
        (PushedHeader(QUERY, "F8_E4M3", (64, 64)), f"missing tensors: {QUERY}_scale_inv"),
        (PushedHeader(NORM, "F64", (64,)), f"{NORM} is float64 and would be held as float32"),
        (PushedHeader(NORM, "F32", (64,), b"short"), "a digest is 16 bytes"),
    ],
    ids=lambda one: one.dtype if isinstance(one, PushedHeader) else one[:12],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_byte_comes(sizes, header, words):
    """Names, shapes, types, scales: from what is announced."""
    rank = served(sizes[0])
    opened(rank, partial=True)
    _refused(rank, StageHeaders((header,)), words)
    with pytest.raises(CheckpointError, match="announced twice"):
        rank.staging.answer(StageHeaders((PushedHeader(NORM, "F32", (64,)),) * 2))
    _push(rank, {NORM: loaded(sizes[1])[NORM]})  # and another one may still be announced


def test_narrowing_is_obeyed_where_it_was_asked_for(sizes):
    """And reported."""
    rank = served(sizes[0])
    opened(rank, partial=True, narrow=True)
    _push(rank, {NORM: loaded(sizes[1])[NORM].double()})
    staged = finished(rank)
    assert [(one.source, one.lossy) for one in staged.report.conversions] == [("float64", True)]


def test_digests_of_whole_tensors_are_held_to(sizes):
    """Right ones pass in order; wrong bytes are refused by name, and so is what follows."""
    rank, tensors = served(sizes[0]), loaded(sizes[1])
    opened(rank)
    _push(rank, tensors, 5000, digests=True)
    finished(rank)
    opened(rank, partial=True)
    norm = {NORM: tensors[NORM]}
    rank.staging.answer(headers(norm, digests=True))
    first, second, *_ = pieces(norm, 128)
    _refused(rank, second, f"{NORM} carries a digest.* byte 0 is next, not 128", tensor=NORM)
    rank.staging.answer(first)
    with pytest.raises(CheckpointError, match=f"{NORM} lacks 128 bytes"):
        finished(rank)
    _refused(rank, StagePiece(0, 128, bytes(128)), "other bytes than were announced", tensor=NORM)
    with pytest.raises(CheckpointError, match="other bytes than were announced"):
        finished(rank)


def test_a_router_keeps_every_bit_or_it_is_said(tmp_path):
    """Announced in bfloat16 it is reported as converted; in float32 it arrives as it is."""
    folder = make("mixtral", tmp_path).folder
    rank = served(folder, "bfloat16")
    name = "model.layers.0.block_sparse_moe.gate.weight"
    router = torch.full(rank.arena.tensors["layer.0.router"].shape, 1 + 2**-20)
    for pushed in (router, router.bfloat16()):
        opened(rank, partial=True)
        _push(rank, {name: pushed})
        report = finished(rank).report
        rank.staging.apply()
        assert torch.equal(rank.arena.tensors["layer.0.router"], pushed.float())
        said = [(one.source, one.target, one.example) for one in report.conversions]
        assert said == ([] if pushed is router else [("bfloat16", "float32", name)])


# Formats


@rounds
def test_int8_is_rounded_in_place_and_never_copied(sizes):
    """A float tensor in the buffer itself would be off by about all; there is no such way."""
    rank, tensors = served(sizes[0], weight_format="int8"), loaded(sizes[1])
    name, weight = (
        "model.layers.1.mlp.down_proj.weight",
        tensors["model.layers.1.mlp.down_proj.weight"],
    )
    naive = weight.to(torch.int8).float()
    assert float((naive - weight).norm() / weight.norm()) > 0.9
    opened(rank, partial=True)
    _refused(rank, headers({"layer.1.down": weight}), "unknown tensors: layer.1.down")
    _refused(rank, headers({name: weight.to(torch.int8)}), f"{name} has dtype I8")
    with pytest.raises(ArenaError, match="only its format can fill it"):
        Collector(rank.arena, {}, {})
    places = {one: tensor.data_ptr() for one, tensor in rank.arena.tensors.items()}
    _push(rank, {name: weight})
    finished(rank)
    rank.staging.apply()
    linear = rank.model.layers[1].down
    held = linear(torch.eye(weight.shape[1])).T
    assert float((held - weight).norm() / weight.norm()) < 0.01
    assert {one: tensor.data_ptr() for one, tensor in rank.arena.tensors.items()} == places


@pytest.mark.parametrize("source", [disk, push], ids=["disk", "push"])
def test_float8_blocks_are_kept(tmp_path, source):
    """Weights and their scales arrive together, as a fresh rank has them."""
    folders = [write_float8(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    rank, expected = (served(folder, weight_format="fp8") for folder in folders)
    opened(rank)
    source(rank, folders[1])
    finished(rank)
    rank.staging.apply()
    assert rank.arena.digested() == expected.arena.digested()
    assert tokens(rank) == tokens(expected)
