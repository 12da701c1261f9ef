"""Weights of a model that serves are checked over real sockets: faults named, streams untouched."""

import asyncio
import contextlib
import dataclasses
import random

import msgspec
import pytest
from engines import tokens
from fakes import instance as announced
from oracles import make
from rank_threads import Ranks
from served_ranks import SETTINGS, served
from tiny_llama import write_checkpoint

from clients.errors import CallFailed
from engine_service.core.check_messages import DigestWeights
from engine_service.core.comparing import entries
from engine_service.core.step_messages import Step
from engine_service.device import checking
from relay_service.core.format import Format
from relay_service.core.instance import State, Weights
from relay_service.core.manifest import weights_digest
from seedrelay.v1 import engine_pb2

DIGEST, SNAPSHOT = engine_pb2.CHECK_MODE_DIGEST, engine_pb2.CHECK_MODE_SNAPSHOT
COMPARE, DIFF = engine_pb2.CHECK_MODE_COMPARE, engine_pb2.CHECK_MODE_DIFF
LAYER = 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model that one rank or two can hold."""
    return write_checkpoint(
        tmp_path_factory.mktemp("plain"), vocab_size=200, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A model of one dense layer and two of eight experts each."""
    return make("dots1", tmp_path_factory.mktemp("dots1"), num_key_value_heads=4).folder


@pytest.fixture
async def serve():
    """Serves ranks, which stay as they were made."""
    with contextlib.ExitStack() as held:
        started = []

        async def start(folder, tp=1, ep=1, name="one", **settings):
            ranks = held.enter_context(Ranks(folder, tp, ep, **SETTINGS, **settings))
            service = served(ranks, name)
            service.model = ranks
            await service.start()
            started.append(service)
            return service

        yield start
        for service in started:
            await service.stop()


@pytest.fixture
def by_blocks(monkeypatch):
    """Makes a piece as small as it can be."""
    monkeypatch.setattr(checking, "PIECE_SECONDS", -1.0)


async def _check(service, mode=DIGEST, **asked):
    return await service.client.check(engine_pb2.CheckWeightsRequest(mode=mode, **asked), 60)


def _arena(service, rank):
    return service.model.ranks[rank].arena


def _entry(service, rank, name):
    (found,) = [one for one in entries(_arena(service, rank).manifest) if one.name == name]
    return found


def _flip(service, rank, name, at=0):
    _arena(service, rank).view(_entry(service, rank, name).offset + at, 1)[0] ^= 0x10


def _named(found):
    assert found.equal == (not found.differences)
    assert found.difference_count == len(found.differences)
    return [(one.rank, one.tensor, one.what) for one in found.differences]


async def _tokens(service, count=12, prompt=(3, 1, 4)):
    chunks = await service.answer(**tokens(*prompt, max_tokens=count, ignore_eos=True))
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_byte_that_flipped_is_named(serve, plain, tp):
    """By rank, tensor and block; rotary tables are weights like any other."""
    service = await serve(plain, tp)
    whole = await _check(service, list_tensors=True)
    assert (whole.equal, whole.weight_version, whole.epoch) == (True, "v1", 1)
    assert [one.digest for one in whole.ranks] == [m.digest for m in service.model.loaded]
    assert whole.against == "the digests with which the weights came"
    for rank, found in enumerate(whole.ranks):
        manifest = service.model.loaded[rank]
        assert [(t.name, t.dtype, tuple(t.shape), t.kind, t.alias) for t in found.tensors] == [
            (e.name, e.dtype, e.shape, e.kind, e.alias) for e in entries(manifest)
        ]
        assert found.tensor_count == len(found.tensors)
        assert found.bytes_checked == manifest.weight_bytes
    for name in ("layer.1.gate_up", "rotary.cos", "rotary.sin"):
        rank, manifest = tp - 1, service.model.loaded[tp - 1]
        _flip(service, rank, name, at=5)
        found = await _check(service)
        entry = _entry(service, rank, name)
        blame, *copies = found.differences
        digests = {one.name: one.digest for one in whole.ranks[rank].tensors}
        assert (blame.rank, blame.tensor, blame.what) == (rank, name, "contents")
        assert blame.block in manifest.blocks_at(entry.offset, entry.nbytes)
        assert (blame.expected, blame.found == blame.expected) == (digests[name], False)
        assert (copies, list(found.ranks[rank].tensors)) == ([], [])
        assert found.ranks[rank].digest != manifest.digest
        _flip(service, rank, name, at=5)
    assert (await _check(service)).equal
    assert service.instance.last_check.equal


async def test_a_first_check_says_what_it_cannot_tell(serve, plain):
    """Digests of blocks alone blame a block; one that was seen whole blames the tensor."""
    service = await serve(plain)
    _flip(service, 0, "layer.1.qkv")
    found = _named(await _check(service))
    assert (0, "layer.1.qkv") in {one[:2] for one in found}
    assert len(found) > 1
    assert all("more in its block" in what for _, _, what in found)
    _flip(service, 0, "layer.1.qkv")
    assert (await _check(service)).equal
    _flip(service, 0, "layer.1.qkv")
    assert _named(await _check(service)) == [(0, "layer.1.qkv", "contents")]


async def test_scrambled_and_restored(serve, plain):
    """Everything that was scrambled is named, and nothing once it is back; so are its answers."""
    service = await serve(plain, 2)
    with pytest.raises(CallFailed, match="no snapshot was taken") as refused:
        await _check(service, COMPARE)
    assert refused.value.code == "FAILED_PRECONDITION"
    before = await _tokens(service)
    assert (await _check(service, SNAPSHOT)).equal
    kept = [
        bytes(_arena(service, r).view(0, _arena(service, r).manifest.data_bytes)) for r in (0, 1)
    ]
    for rank, data in enumerate(kept):
        noise = random.Random(rank).randbytes(len(data))  # noqa: S311
        _arena(service, rank).view(0, len(data))[:] = noise
    found = await _check(service, COMPARE)
    assert found.against == "the snapshot of v1, epoch 1"
    contents = {one[:2] for one in _named(found) if one[2] == "contents"}
    assert contents == {
        (rank, entry.name)
        for rank in (0, 1)
        for entry in entries(service.model.loaded[rank])
        if not entry.alias
    }
    for rank, data in enumerate(kept):
        _arena(service, rank).view(0, len(data))[:] = data
    for mode in (COMPARE, DIGEST):
        assert (await _check(service, mode)).equal
    assert await _tokens(service) == before


async def test_what_a_snapshot_says_of_a_tensor(serve, plain):
    """Another type or shape of the same bytes is a difference; so are two that were swapped."""
    service = await serve(plain)
    await _check(service, SNAPSHOT)
    first, second = (_entry(service, 0, f"layer.{n}.output") for n in (0, 2))
    arena = _arena(service, 0)
    views = [arena.view(one.offset, one.nbytes) for one in (first, second)]
    views[0][:], views[1][:] = bytes(views[1]), bytes(views[0])
    assert _named(await _check(service, COMPARE)) == [
        (0, one.name, "contents") for one in (first, second)
    ]
    views[0][:], views[1][:] = bytes(views[1]), bytes(views[0])
    checker = service.servicer._checker
    snapshot = checker._snapshot
    for changes, words in (
        ({"dtype": "bf16"}, "dtype f32, was bf16"),
        ({"shape": (1, 64, 64)}, "shape (64, 64), was (1, 64, 64)"),
    ):
        (now,) = snapshot.ranks
        units = tuple(
            msgspec.structs.replace(
                unit,
                tensors=tuple(
                    msgspec.structs.replace(one, **changes) if one.name == first.name else one
                    for one in unit.tensors
                ),
            )
            for unit in now.manifest.units
        )
        manifest = msgspec.structs.replace(now.manifest, units=units)
        doctored = msgspec.structs.replace(now, manifest=manifest)
        checker._snapshot = dataclasses.replace(snapshot, ranks=(doctored,))
        assert _named(await _check(service, COMPARE)) == [(0, first.name, words)]


async def test_a_stream_goes_on(serve, plain, by_blocks):
    """A step comes between two pieces, and the tokens are those that come without a check."""
    service = await serve(plain, 2)
    expected = await _tokens(service, 50)
    service.ranks.order.clear()
    service.ranks.stepping.clear()
    stream = asyncio.create_task(_tokens(service, 50))
    await service.ranks.stepping.wait()
    found = await _check(service)
    assert (found.equal, await stream) == (True, expected)
    order = service.ranks.order
    first, last = order.index(DigestWeights), len(order) - order[::-1].index(DigestWeights)
    pieces = order.count(DigestWeights)
    assert pieces > service.model.loaded[0].block_count
    assert order[first:last].count(Step) > pieces // 2
    assert 0 < found.seconds_paused <= found.seconds


async def test_replicas_of_an_expert(serve, sparse):
    """Are compared with each other, wherever they lie, and with what they should be."""
    service = await serve(sparse, 1, 2, redundant_experts=4)
    assert (await _check(service, SNAPSHOT)).equal
    groups = service.model.map.layers[LAYER]
    shared = next(e for e in groups[1] if e in groups[0])
    name = f"layer.{LAYER}.expert.{shared}.down"
    _flip(service, 1, name)
    replica = (1, name, f"replica of expert {shared} on rank 0")
    for mode in (DIGEST, COMPARE):
        assert _named(await _check(service, mode)) == [(1, name, "contents"), replica]
    # Bad weights that were loaded so: only the other replica tells.
    _flip(service, 0, name)
    service.instance.manifests = [service.model.ranks[n].arena.digested() for n in (0, 1)]
    _flip(service, 0, name)
    service.instance.manifests[0] = _arena(service, 0).digested()
    service.instance.engine.weights = Weights("v1", weights_digest(service.instance.manifests), 1)
    assert _named(await _check(service)) == [replica]


async def test_experts_that_move_meanwhile(serve, sparse, by_blocks):
    """It begins anew, and never compares a mixture; one that never comes to an end says so."""
    service = await serve(sparse, 1, 2)
    first = service.model.map.layers[LAYER]
    new = (first[1], first[0])

    async def move(slots):
        groups = [engine_pb2.GroupExperts(experts=held) for held in slots]
        await service.client.set_expert_map([engine_pb2.LayerExperts(layer=LAYER, groups=groups)])

    async def move_once(pieces):
        if pieces == 3:
            await move(new)

    await _check(service, SNAPSHOT)
    service.ranks.order.clear()
    service.ranks.before_piece = move_once
    found = await _check(service)
    assert (found.equal, found.epoch) == (True, 2)
    assert [one.digest for one in found.ranks] == [m.digest for m in service.instance.manifests]
    assert service.ranks.order.count(DigestWeights) > service.model.loaded[0].block_count + 3
    service.ranks.before_piece = None
    moved = await _check(service, COMPARE)
    gone = {one.tensor for one in moved.differences if (one.rank, one.what) == (0, "gone")}
    assert gone == {f"layer.{LAYER}.expert.{e}.{p}" for e in first[0] for p in ("gate_up", "down")}

    async def move_often(pieces):
        if pieces % 4 == 3:
            await move(first if service.model.map.layers[LAYER] == new else new)

    service.ranks.before_piece = move_often
    with pytest.raises(CallFailed, match="5 times in a row") as failed:
        await _check(service)
    assert (failed.value.code, failed.value.retry_seconds) == ("UNAVAILABLE", 1)


class OtherLink:
    """A relay that knows one other instance."""

    address = "127.0.0.1:1"

    def __init__(self, service, **changes):
        instance = service.instance
        self._manifests = instance.manifests
        self.offer = announced(
            instance.identity.name, format=Format(service.model.ranks[0].facts),
            placement=instance.placement, weights=instance.engine.weights, **changes,
        )  # fmt: skip

    async def offers(self):
        """Lists it."""
        return [self.offer]

    async def manifests_of(self, instance):
        """Returns what it holds."""
        assert instance is self.offer
        return self._manifests


async def test_another_instance(serve, sparse, by_blocks):
    """Is compared by unit, so experts may lie elsewhere there, and in other groups of ranks."""
    here = await serve(sparse, 1, 2, redundant_experts=2)
    whole = await serve(sparse, name="whole")
    here.instance.link = OtherLink(whole)
    found = await _check(here, DIFF, against="whole")
    assert (found.equal, found.against) == (True, "whole: v1, epoch 1")
    whole.instance.link = OtherLink(here)
    assert (await _check(whole, DIFF, against="one")).equal
    held = here.model.map.layers[LAYER][1]
    name = (
        f"layer.{LAYER}.expert.{next(e for e in held if e not in here.model.map.layers[LAYER][0])}"
    )
    _flip(here, 1, f"{name}.down")
    assert {one[:2] for one in _named(await _check(here, DIFF, against="whole"))} == {
        (1, f"{name}.gate_up"), (1, f"{name}.down"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": Format((("kernel_format", "other"),))}, "kernel_format: seed other, target"),
        ({"tp": 2}, "tensor_parallel_size: seed 2, target 1"),
        ({"state": State.LANDING}, "two is LANDING"),
        ({"name": "three"}, "two is not in the fleet"),
    ],
)
async def test_an_instance_that_cannot_be_compared_with(serve, plain, changes, words):
    """Is refused with the first difference, before anything is digested."""
    service = await serve(plain)
    with pytest.raises(CallFailed, match="found through a relay"):
        await _check(service, DIFF, against="two")
    link = service.instance.link = OtherLink(service)
    fields = {"instance": changes.get("name", "two"), "state": changes.get("state", State.READY)}
    if "format" in changes:
        fields["format"] = changes["format"]
    if "tp" in changes:
        fields["placement"] = msgspec.structs.replace(
            service.instance.placement, tensor_parallel_size=2
        )
    link.offer = msgspec.structs.replace(link.offer, **fields)
    with pytest.raises(CallFailed, match=words) as refused:
        await _check(service, DIFF, against="two")
    assert refused.value.code == "FAILED_PRECONDITION"
    assert DigestWeights not in service.ranks.order
