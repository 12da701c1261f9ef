"""Checks of what is computed: graphs, replay and eager, before and after weights land."""

from __future__ import annotations

import tempfile
import time

import torch

from engine_service.core.messages import RankConfig
from engine_service.core.step_messages import Row, Sampling
from engine_service.device.meeting import meet_over_nccl
from engine_service.device.models.llama import Llama
from engine_service.device.parallel import _joined
from engine_service.device.tolerance import relative_difference, tolerance
from tests.gpu.place import Lander, Place

REFILLS = 50
FLAT_FREE_BYTES = 64 << 20
"""How much of the device others may take while we look."""
UNUSED_BYTES = 256 << 20
PROMPTS = ([5], list(range(10, 30)), list(range(100, 103)))
STEPS = 8


def capture(place: Place) -> str:
    """Graphs are captured over an arena that holds no weights yet."""
    began = time.monotonic()
    place.graphs.capture()
    place.figures["capture_seconds"] = time.monotonic() - began
    return f"{len(place.graphs.sizes)} sizes in {place.figures['capture_seconds']:.1f} s"


def replay_equals_eager_before(place: Place) -> str:
    """With weights that torch wrote itself, replay computes what eager does."""
    for name, tensor in place.arena.tensors.items():
        tensor.copy_(place.sources[1].tensors[name])
    return _replay_equals_eager(place)


def replay_equals_eager_after(place: Place) -> str:
    """With the weights that landed, replay computes what eager does."""
    return _replay_equals_eager(place)


def landed_weights_are_fresh_weights(place: Place) -> str:
    """Another model on ordinary tensors with the source's weights computes the same logits."""
    source = place.sources[0].tensors
    tensors = {name: tensor.to(place.device.torch) for name, tensor in source.items()}
    here, place.llama = place.llama, Llama(place.model, tensors)
    try:
        expected = place.logits(_rows(3), replay=False)
    finally:
        place.llama = here
    found = place.logits(_rows(3), replay=False)
    difference = _compare(expected, found, place)
    return f"largest difference {difference:.2g}" if difference else "bit for bit"


def the_runner_serves(place: Place) -> str:
    """Prefill, batched decode and sampling give tokens; the greedy ones are eager's best."""
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=7)
    assert _generate(place, sampling) == _generate(place, sampling), "a draw was not repeated"
    served = _generate(place, Sampling())
    for prompt, output in zip(PROMPTS, served, strict=True):
        for count, token in enumerate(output):
            _is_best(place, [*prompt, *output[:count]], token)
    return f"greedy {served[0]}"


def refills_leave_addresses_and_memory(place: Place) -> str:
    """After many refills nothing has moved, nothing has grown, and replay still equals eager."""
    addresses = {name: tensor.data_ptr() for name, tensor in place.arena.tensors.items()}
    seen, before = {}, {}
    with Lander(place) as lander:
        for turn in range(REFILLS):
            lander.land(turn % 2, threads=2)
            logits = place.logits(_rows(2), replay=True)
            kept = seen.setdefault(turn % 2, logits)
            assert torch.equal(kept, logits), f"refill {turn} computes something else"
            _compare(place.logits(_rows(2), replay=False), logits, place)
            if turn == 1:  # by now both sides have all their buffers
                before = place.used()
        after = place.used()
        lander.leave()
    assert not torch.equal(seen[0], seen[1]), "both sources compute the same"
    moved = [name for name, t in place.arena.tensors.items() if t.data_ptr() != addresses[name]]
    assert not moved, f"moved: {moved[:3]}"
    grown = after.get("reserved_bytes", 0) - before.get("reserved_bytes", 0)
    lost = before.get("free_bytes", 0) - after.get("free_bytes", 0)
    assert grown == 0, f"torch reserved {grown} bytes more"
    assert lost < FLAT_FREE_BYTES, f"the device has {lost} bytes less"
    return f"{REFILLS} refills, reserved {grown:+d} bytes, free {-lost:+d} bytes"


def a_killed_relay_disturbs_nobody(place: Place) -> str:
    """When a process that maps the arena is killed, the weights are there and compute."""
    with Lander(place) as lander:
        lander.land(0)
    assert place.arena.digested().digest == place.manifests[0].digest, "the weights have changed"
    return _replay_equals_eager(place)


def unused_memory_is_given_back(place: Place) -> str:
    """A device takes back what torch keeps and does not use; graphs go on with what they use."""
    device = place.device.torch
    spare = torch.empty(UNUSED_BYTES, dtype=torch.uint8, device=device)
    del spare
    before, after = place.device.trim()
    if device.type == "cuda":
        assert before - after >= UNUSED_BYTES, (before, after)
    _replay_equals_eager(place)
    return f"{before >> 20} MiB reserved before, {after >> 20} MiB after"


def nccl_is_captured(place: Place) -> str:
    """The collectives over NCCL run, in a graph too; one device makes a group of one."""
    if place.device.torch.type != "cuda":
        return "skipped: not on CUDA"
    settings = RankConfig(
        rank=0, world_size=1, generation="nccl", dtype="float32", device="cuda", threads=1,
        kv_block_tokens=16, kv_blocks=1,
    )  # fmt: skip
    with tempfile.NamedTemporaryFile() as file:
        _joined["nccl"] = meet_over_nccl(torch.distributed.FileStore(file.name, 1), settings), 0
        part = torch.ones(3, 4, device=place.device.torch)

        def both() -> torch.Tensor:
            total = torch.ops.seedrelay.all_reduce.default(part, "nccl")
            return torch.ops.seedrelay.gather.default(total, "nccl", 1)

        replay, found = place.graphs._record(both)
        part.fill_(5)
        replay()
        assert (found == 5).all(), found
        del replay, found  # a communicator waits for the graphs that hold it
        torch.cuda.synchronize()
        del _joined["nccl"]
    return "all-reduce and gather"


def _rows(count: int) -> list[Row]:
    return [Row((3 + i,), 0, (i,), 0, Sampling()) for i in range(count)]


def _replay_equals_eager(place: Place) -> str:
    worst = 0.0
    for count in (1, 2, 3, 8, 33):
        eager = place.logits(_rows(count), replay=False)
        worst = max(worst, _compare(eager, place.logits(_rows(count), replay=True), place))
    return f"largest difference {worst:.2g} of the largest logit"


def _compare(eager: torch.Tensor, replayed: torch.Tensor, place: Place) -> float:
    assert eager.isfinite().all(), "logits are not finite"
    assert eager.any(), "all logits are zero"
    difference = relative_difference(eager, replayed)
    limit = tolerance(place.cache.keys.dtype)
    assert difference <= limit, f"they differ by {difference}, at most {limit} is allowed"
    return difference


def _generate(place: Place, sampling: Sampling) -> list[list[int]]:
    """Runs sequences of different lengths together, as the scheduler does."""
    blocks = [tuple(range(8 * i, 8 * i + 8)) for i in range(len(PROMPTS))]
    tokens, done = [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS)
    for step in range(STEPS):
        rows = [
            Row(tuple(one[at:]), at, own, step, sampling)
            for one, at, own in zip(tokens, done, blocks, strict=True)
        ]
        done = [len(one) for one in tokens]
        for one, token in zip(tokens, place.runner.step(rows).tokens, strict=True):
            one.append(token)
    return [one[len(prompt) :] for one, prompt in zip(tokens, PROMPTS, strict=True)]


@torch.inference_mode()
def _is_best(place: Place, tokens: list[int], token: int) -> None:
    """Checks that eager, over the whole text at once, likes no other token clearly better."""
    logits = place.runner.prefill(Row(tuple(tokens), 0, tuple(range(64, 72)), 0, Sampling()))[0]
    behind = float((logits.max() - logits[token]) / logits.abs().max())
    limit = 2 * tolerance(place.cache.keys.dtype)
    assert behind <= limit, f"token {token} is {behind:.2g} behind eager's best"
