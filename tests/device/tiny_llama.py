"""Makes tiny random Llama checkpoints, and ranks and sequences that serve them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_service.core.messages import RankConfig, Start
from engine_service.core.step_messages import Row, Sampling
from engine_service.device.checkpoint import read_file
from engine_service.device.config import ModelConfig, parse_config
from engine_service.device.dtypes import served_dtype
from engine_service.device.formats.layouts import choose_layout
from engine_service.device.intake import processed_matrices
from engine_service.device.loading import load
from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.models import llama_format
from engine_service.device.models.llama import Layer, Llama
from engine_service.device.parts import parts_of
from engine_service.device.rank import Rank
from engine_service.device.sharding import Shard, rank_config
from engine_service.device.torch_dtypes import MANIFEST_DTYPES
from relay_service.core.layout import lay_out

torch.set_num_threads(1)

BLOCK_TOKENS = 8
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 199,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_weights(config: ModelConfig, seed: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Returns seeded random contents of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1)
            + (len(shape) == 1)
        ).to(dtype)
        for name, shape in llama_format.checkpoint_shapes(config).items()
    }


def write_checkpoint(folder: Path, seed: int = 1, dtype=torch.float32, **changes) -> Path:
    """Writes a checkpoint folder of a tiny model; `changes` are of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(TINY | changes).encode()
    (folder / "config.json").write_bytes(raw)
    weights = random_weights(parse_config(raw), seed, dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start_message(folder: Path, dtype: str = "float32", **changes) -> Start:
    """Returns the command that starts a rank for a folder's model."""
    settings = {
        "rank": 0, "world_size": 1, "generation": "tests", "dtype": dtype, "device": "cpu",
        "threads": 1, "weight_format": "plain", "kv_block_tokens": BLOCK_TOKENS, "kv_blocks": 64,
    } | changes  # fmt: skip
    files = {"config.json": (folder / "config.json").read_bytes()}
    return Start(RankConfig(**settings), files)


def serving_rank(folder: Path, dtype: str = "float32", *, capture: bool = False) -> Rank:
    """Returns a rank with a folder's weights."""
    rank = Rank(start_message(folder, dtype))
    rank.load(folder, lambda _done, _total: None)
    if capture:
        rank.capture()
    return rank


def rank_layer(folder: Path, name: str, dtype: torch.dtype, shard: Shard) -> Layer:
    """Returns the first layer of one rank's part, loaded in a format."""
    return rank_part(folder, name, dtype, shard)[1].layers[0]


def rank_part(
    folder: Path, name: str, dtype: torch.dtype, shard: Shard
) -> tuple[MemfdArena, Llama]:
    """Loads one rank's part in a format; the model cannot meet other ranks."""
    config, served = parse_config((folder / "config.json").read_bytes()), MANIFEST_DTYPES[dtype]
    layout = choose_layout(name, served, "cpu")
    units = llama_format.unit_specs(config, served, shard, layout)
    arena = MemfdArena(lay_out(shard.rank, units), "tests")
    model = Llama(rank_config(config, shard), arena.tensors, layout=layout)
    slices = llama_format.checkpoint_slices(config, shard, layout)
    computed = llama_format.computed_tensors(config)
    load(arena, folder, slices, computed, model.matrices())
    return arena, model


class Filling:
    """What a checkpoint folder fills, for one rank, in one format."""

    def __init__(
        self, folder: Path, name: str, dtype: str, rank: int = 0, *, ranks: int = 1
    ) -> None:
        self.folder, self.file = folder, folder / "model.safetensors"
        self._config = parse_config((folder / "config.json").read_bytes())
        self._shard, self._served = Shard(rank, ranks), served_dtype(dtype)
        self._layout = choose_layout(name, self._served, "cpu")
        self._slices = llama_format.checkpoint_slices(self._config, self._shard)

    @functools.cached_property
    def expected(self):
        """The manifest that a load in order makes."""
        arena, matrices = self._empty()
        computed = llama_format.computed_tensors(self._config)
        return load(arena, self.folder, self._slices, computed, matrices).manifest

    def fresh(self):
        """Returns an arena of zeros, and what a collector needs to fill it."""
        arena, matrices = self._empty()
        headers = read_file(self.file)
        return (
            arena, parts_of(headers, self._slices),
            processed_matrices(headers, self._slices, matrices),
            llama_format.computed_tensors(self._config),
        )  # fmt: skip

    def _empty(self):
        units = llama_format.unit_specs(self._config, self._served, self._shard, self._layout)
        arena = MemfdArena(lay_out(self._shard.rank, units), "tests")
        arena.close()  # it stays mapped; nobody shares it, and there are many
        own = rank_config(self._config, self._shard)
        return arena, list(Llama(own, arena.tensors, layout=self._layout).matrices())


class Sequence:
    """One request as the scheduler sees it: its tokens, and blocks of its own."""

    def __init__(self, prompt, first_block: int = 0, sampling: Sampling | None = None) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.blocks = tuple(range(first_block, first_block + 8))
        self.sampling = sampling or Sampling()
        self.done = 0

    def row(self) -> Row:
        """Returns the next row: all tokens that have no KV yet."""
        fresh = tuple(self.tokens[self.done :])
        index = len(self.tokens) - self.prompt_length
        return Row(fresh, self.done, self.blocks, index, self.sampling)

    def take(self, token: int) -> None:
        """Appends a sampled token."""
        self.done = len(self.tokens)
        self.tokens.append(token)

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[self.prompt_length :]


def run(step: Callable, sequences: list[Sequence], count: int) -> None:
    """Runs sequences together for a number of steps."""
    for _ in range(count):
        rows = tuple(sequence.row() for sequence in sequences)
        for sequence, token in zip(sequences, step(rows).tokens, strict=True):
            sequence.take(token)
