"""Several ranks, experts that were moved, other devices: an update reaches all of each."""

import gc
import threading
import time
from operator import le
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeDriver
from fake_device import fake_device
from oracles import make
from rank_threads import Ranks
from safetensors.torch import load_file, save_file
from tiny_llama import serving_rank, start_message, write_checkpoint
from updating import (
    disk,
    finished,
    headers,
    lend,
    loaded,
    opened,
    pieces,
    push,
    tokens,
)

from engine_service.core.update_messages import ProveStaged, UpdateStaged
from engine_service.device import devices, parallel
from engine_service.device.rank import Rank
from engine_service.errors import CheckpointError, CollectiveFailed, WrongState

PROMPTS = ([3, 1, 4, 1, 5], [(7 * i) % 199 for i in range(20)])
LAYER = 1


def _other(folder, path, seed=3):
    """Writes a checkpoint of the same model with other random weights, in one file."""
    torch.manual_seed(seed)
    path.mkdir()
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    other = {name: one + 0.1 * torch.randn(one.shape) for name, one in tensors.items()}
    save_file(other, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Weights A and B with experts."""
    first = make("mixtral", tmp_path_factory.mktemp("a"), num_key_value_heads=4).folder
    return first, _other(first, tmp_path_factory.mktemp("b") / "b")


def _updated(ranks: Ranks, bring, **command) -> list:
    """Updates all ranks, proven together; returns what each has staged."""

    def work(rank: Rank):
        opened(rank)
        bring(rank)
        staged = finished(rank)
        rank.staging.answer(ProveStaged(**command))
        return staged

    staged = ranks.each(work)
    assert not any(isinstance(one, Exception) for one in staged), staged
    applied = ranks.each(lambda rank: rank.staging.apply())
    assert not any(isinstance(one, Exception) for one in applied), applied
    return staged


def test_a_tied_head_is_compared_by_each_rank(tmp_path):
    """With the part of the embedding that it holds: one rank that finds a difference says so."""
    first, second = (
        write_checkpoint(tmp_path / str(seed), seed, vocab_size=200, num_hidden_layers=1)
        for seed in (1, 2)
    )
    tensors = loaded(second)
    equal = tensors["model.embed_tokens.weight"].clone()
    differs = equal.clone()
    differs[150] += 1  # the second rank's
    with Ranks(first, 2) as ranks:
        for head, kinds in (
            (differs, [UpdateStaged, CheckpointError]),
            (equal, [UpdateStaged] * 2),
        ):
            pushed = {"lm_head.weight": head, **tensors}

            def stage(rank: Rank, pushed: dict = pushed):
                opened(rank)
                rank.staging.answer(headers(pushed))
                for piece in pieces(pushed, 3000):
                    rank.staging.answer(piece)
                return finished(rank)

            assert [type(one) for one in ranks.each(stage)] == kinds
        ranks.each(lambda rank: rank.staging.apply())
        with Ranks(second, 2) as expected:
            assert ranks.digests() == expected.digests()


@pytest.mark.parametrize(
    ("tp", "ep", "source"),
    [
        (2, 1, disk), (1, 2, push),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (
            (2, 1, push), (1, 2, disk), (2, 2, disk), (2, 2, push),
        )),
    ],
)  # fmt: skip
def test_all_ranks_follow(sparse, tp, ep, source):
    """Each takes its part; tokens and bytes are those of ranks that were started on B."""
    before, after = sparse
    with Ranks(after, tp, ep) as expected:
        wanted, digests = expected.tokens(PROMPTS), expected.digests()
        probe = expected.each(Rank.record_probe)[0].probe
    with Ranks(before, tp, ep) as ranks:
        assert ranks.tokens(PROMPTS) != wanted
        groups = len(parallel._joined)
        _updated(ranks, lambda rank: source(rank, after), probe=probe)
        assert ranks.digests() == digests
        assert ranks.tokens(PROMPTS) == wanted
        assert len(parallel._joined) == groups


def test_moved_experts_get_their_own_weights(sparse):
    """Every slot holds B's expert for the map of now, not for that of the start."""
    before, after = sparse
    slots = ((3, 1), (0, 2))
    with Ranks(after, 1, 2) as expected:
        expected.move(LAYER, slots)
        wanted, digests = expected.tokens(PROMPTS), expected.digests()
    with Ranks(before, 1, 2) as ranks:
        ranks.move(LAYER, slots)
        _updated(ranks, lambda rank: disk(rank, after))
        assert ranks.digests() == digests
        assert ranks.tokens(PROMPTS) == wanted


def test_experts_that_move_meanwhile_make_what_is_staged_useless(sparse):
    """It is refused between the steps, nothing has changed, and a new update goes through."""
    before, after = sparse
    with Ranks(before, 1, 2) as ranks:

        def stage(rank: Rank):
            opened(rank)
            disk(rank, after)
            return finished(rank)

        ranks.each(stage)
        ranks.move(LAYER, ((3, 1), (0, 2)))
        moved = ranks.digests()
        refused = ranks.each(lambda rank: rank.staging.apply())
        assert all(isinstance(one, WrongState) for one in refused), refused
        assert ranks.digests() == moved
        ranks.move(LAYER, ((0, 1), (2, 3)))
        _updated(ranks, lambda rank: disk(rank, after))
        with Ranks(after, 1, 2) as expected:
            assert ranks.digests() == expected.digests()


def test_steps_and_proofs_do_not_meet(tmp_path):
    """Both run at once on two ranks, each with collectives of its own; then nothing stays open."""
    first, second = (
        write_checkpoint(tmp_path / str(seed), seed, vocab_size=200, num_hidden_layers=2)
        for seed in (1, 2)
    )
    with Ranks(first, 2) as ranks:
        expected = ranks.tokens(PROMPTS)
        for rank in ranks.ranks:
            opened(rank)
            disk(rank, second)
            finished(rank)

        def proofs(rank: Rank, proven: list) -> None:
            proven += [rank.staging.answer(ProveStaged()) for _ in range(5)]

        def held() -> list[int]:
            gc.collect()
            return [len(list(Path("/proc/self", one).iterdir())) for one in ("fd", "task")]

        before: list[int] = []
        for number in range(3):
            proven: list[list] = [[], []]
            threads = [
                threading.Thread(target=proofs, args=pair)
                for pair in zip(ranks.ranks, proven, strict=True)
            ]
            for thread in threads:
                thread.start()
            assert ranks.tokens(PROMPTS) == expected
            for thread in threads:
                thread.join()
            assert len({one.probe for each in proven for one in each}) == 1
            before = held() if number < 2 else before
        deadline = time.monotonic() + 20
        while not all(map(le, held(), before)):  # a thread that was joined may be on its way out
            assert time.monotonic() < deadline, (before, held())
        assert ranks.tokens(PROMPTS) == expected


@pytest.mark.full
def test_a_rank_that_stays_away_ends_the_proof_alone(tmp_path):
    """After the collective timeout; the ranks go on serving, and the next proof is met."""
    folder = write_checkpoint(tmp_path / "a", vocab_size=200, num_hidden_layers=2)
    with Ranks(folder, 2, collective_timeout_seconds=3) as ranks:
        expected = ranks.tokens(PROMPTS)
        for rank in ranks.ranks:
            opened(rank)
            disk(rank, folder)
            finished(rank)
        with pytest.raises(CollectiveFailed, match="did not meet the others"):
            ranks.ranks[0].staging.answer(ProveStaged())
        with pytest.raises(CollectiveFailed):
            ranks.ranks[1].staging.answer(ProveStaged())
        assert ranks.tokens(PROMPTS) == expected
        proven = ranks.each(lambda rank: rank.staging.answer(ProveStaged()))
        assert len({one.probe for one in proven}) == 1


# On a device


@pytest.fixture
def on_device(monkeypatch):
    """Makes ranks on a device that is a fake."""
    driver = FakeDriver()
    monkeypatch.setattr(devices, "_open_cuda", lambda _: fake_device(driver))

    def serve(folder):
        rank = Rank(start_message(folder, device="cuda"))
        rank.load(folder, lambda _done, _total: None)
        rank.graphs.capture()
        return rank

    return serve


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("source", ["disk", "push", "relay"])
def test_a_device_is_updated_like_the_host(on_device, tied, tmp_path, source, in_place):
    """From a copy on the device, or in place; every copy is waited for."""
    after = write_checkpoint(tmp_path, 5)
    rank, expected = on_device(tied), serving_rank(after, capture=True)
    before = rank.arena.digested()
    opened(rank, in_place=in_place)
    if source == "relay":
        lend(rank, expected)
    else:
        {"disk": disk, "push": push}[source](rank, after)
    staged = finished(rank)
    rank.staging.answer(ProveStaged(probe=expected.record_probe().probe))
    assert in_place or rank.arena.digested() == before
    rank.staging.apply()
    assert staged.manifest == rank.arena.digested() == expected.arena.digested()
    assert tokens(rank) == tokens(expected)


def test_part_of_a_device_is_updated(on_device, tied, tmp_path):
    """The rest is what it was."""
    after = write_checkpoint(tmp_path, 5)
    rank = on_device(tied)
    name = "model.layers.1.self_attn.k_proj.weight"
    qkv = rank.arena.tensors["layer.1.qkv"].clone()
    opened(rank, partial=True)
    one = {name: loaded(after)[name]}
    rank.staging.answer(headers(one))
    for piece in pieces(one, 999):
        rank.staging.answer(piece)
    staged = finished(rank)
    rank.staging.apply()
    qkv[64:96] = one[name]
    assert torch.equal(rank.arena.tensors["layer.1.qkv"], qkv)
    assert staged.manifest == rank.arena.digested()
