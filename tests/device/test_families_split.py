"""Every family, cut over two ranks, computes what it computes alone: eager and replayed.

The ranks are threads here, joined by gloo as processes would be; `test_ranks_together`
shows real ones.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from oracles import FAMILIES, make
from tiny_llama import BLOCK_TOKENS, Sequence, start_message

from engine_service.core.messages import RankConfig
from engine_service.device import meeting, parallel
from engine_service.device.audit import audit
from engine_service.device.batch import make_batch
from engine_service.device.graphs import GraphRunner
from engine_service.device.kv_cache import KVCache
from engine_service.device.loading import load
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Llama
from engine_service.device.plan import Plan, plan
from engine_service.device.runner import Runner
from engine_service.device.sharding import rank_config

RANKS = 2
PROMPTS = ([1, 2, 3], [(7 * i) % 199 for i in range(40)])
LIMIT = 1e-4


@pytest.fixture
def groups():
    """Two ranks of one process group in one process."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=60))
    names = [f"thread {rank}" for rank in range(RANKS)]

    def meet(rank: int) -> parallel.Group:
        settings = RankConfig(
            rank=rank, world_size=RANKS, generation="tests", dtype="float32", device="cpu",
            threads=1, kv_block_tokens=BLOCK_TOKENS, kv_blocks=64, collective_timeout_seconds=60,
        )  # fmt: skip
        parallel._joined[names[rank]] = meeting.meet_over_gloo(store, settings), rank
        return parallel.Group(rank, RANKS, names[rank])

    with ThreadPoolExecutor(RANKS) as threads:
        yield list(threads.map(meet, range(RANKS)))
    for name in names:
        del parallel._joined[name]


class Part:
    """What one rank holds, without a process of its own."""

    def __init__(self, folder, group: parallel.Group) -> None:
        settings = start_message(folder, rank=group.rank, world_size=RANKS)
        self.plan: Plan = plan(settings)
        config = self.plan.config
        self.arena = MemfdArena(self.plan.manifest, "tests", self.plan.memory)
        load(
            self.arena, folder, llama_format.checkpoint_slices(config, self.plan.shard),
            llama_format.computed_tensors(config),
        )  # fmt: skip
        own = rank_config(config, self.plan.shard)
        self.model = Llama(own, self.arena.tensors, parallel.Groups(group, group))
        self.cache = KVCache(own, self.plan.dtype, 64, BLOCK_TOKENS)
        self.graphs = GraphRunner(self.model, self.cache)

    @torch.inference_mode()
    def compute(self) -> list[torch.Tensor]:
        """Returns logits of each prompt, and of both decoded together, eager and replayed."""
        audit(self.model, self.arena, self.cache)
        self.graphs.capture()
        runner = Runner(self.model, self.cache, self.graphs)
        sequences = [Sequence(p, first_block=8 * i) for i, p in enumerate(PROMPTS)]
        found = [runner.prefill(sequence.row())[0] for sequence in sequences]
        for sequence, logits in zip(sequences, found, strict=True):
            sequence.take(int(logits.argmax()))
        batch = make_batch([s.row() for s in sequences], self.cache, self.plan.config.vocab_size)
        return [*found, *self.model.forward(batch, self.cache), *self.graphs.replay(batch)]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_what_transformers_does(name, groups, tmp_path):
    """Both get the same logits, bit for bit, and they are the oracle's."""
    oracle = make(name, tmp_path)
    parts = [Part(oracle.folder, group) for group in groups]
    assert parts[0].plan.facts == parts[1].plan.facts
    with ThreadPoolExecutor(RANKS) as threads:
        first, second = threads.map(Part.compute, parts)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    longer = [[*p, int(logits.argmax())] for p, logits in zip(PROMPTS, first, strict=False)]
    expected = [oracle.logits(list(tokens))[-1] for tokens in (*PROMPTS, *longer, *longer)]
    for wanted, found in zip(expected, first, strict=True):
        assert float((wanted - found).abs().max()) < LIMIT * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["llama, biased", "qwen3", "mixtral", "qwen2-moe", "dots1"])
def test_the_parts_of_both_ranks_are_the_whole(name, tmp_path):
    """Every tensor is cut where its kind says, or held by both."""
    folder = make(name, tmp_path).folder
    alone = llama_format.checkpoint_slices(plan(start_message(folder)).config)
    halves = [plan(start_message(folder, rank=rank, world_size=RANKS)) for rank in range(RANKS)]
    slices = [llama_format.checkpoint_slices(half.config, half.shard) for half in halves]
    for tensor, whole in alone.items():
        mine = [one[tensor] for one in slices]
        kind = tensor.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        columns = tensor.endswith(".weight") and kind in ("o_proj", "down_proj", "w2")
        rows = kind in (
            "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens",
            "lm_head",
        )  # fmt: skip
        axis = "columns" if columns else "rows"
        first, second = (getattr(piece, axis) for piece in mine)
        if columns or rows:
            assert (first[0], second) == (0, (first[1], getattr(whole, axis)[1] - first[1]))
        else:
            assert mine == [whole, whole]
