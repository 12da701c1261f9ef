"""Makes folders of seeded random Llama checkpoints, for tests and benchmarks."""

from __future__ import annotations

import hashlib
import json
import math
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_service.checkpoint.checksums import Recipe
from engine_service.checkpoint.folder import ModelFolder, cache_folder, no_progress, provide
from engine_service.checkpoint.llama import LlamaShape
from engine_service.checkpoint.random_tensor import RandomTensors
from engine_service.checkpoint.tensor_file import Tensor
from engine_service.checkpoint.tokenizer import byte_tokenizer, write_tokenizer
from engine_service.checkpoint.weights import write_weights
from engine_service.checkpoint.writer import FolderWriter, Progress

_NORM_DEVIATION = 0.1
"""Norm weights spread around 1, so that a norm that is left out shows."""


@dataclass(frozen=True, kw_only=True)
class RandomLlama:
    """All that decides a random checkpoint: equal ones are equal byte for byte."""

    shape: LlamaShape
    dtype: str = "float32"
    seed: int = 0
    shard_bytes: int = 1 << 30
    """Weights beyond this go into several files."""

    @property
    def recipe(self) -> Recipe:
        """What the folder's checksums say that it was made from."""
        numbers = {"dtype": self.dtype, "seed": self.seed, "shard_bytes": self.shard_bytes}
        return {"source": "random_llama", **numbers, **asdict(self.shape)}

    @property
    def folder_name(self) -> str:
        """A name that no other parameters share."""
        key = hashlib.sha256(json.dumps(self.recipe, sort_keys=True).encode()).hexdigest()
        size = f"h{self.shape.hidden_size}-l{self.shape.layers}"
        return f"random-{self.dtype}-{size}-seed{self.seed}-{key[:8]}"


def make(
    model: RandomLlama, out: Path | None = None, progress: Progress = no_progress
) -> ModelFolder:
    """Returns the checkpoint's folder; makes it unless it is there.

    Args:
        model: What to make.
        out: Where the folder belongs; None for the user's cache.
        progress: Learns of the phase `write weights`.

    Raises:
        CheckpointError: Something else lies there, or it cannot be written.
    """

    def fill(writer: FolderWriter) -> None:
        chat = byte_tokenizer(model.shape.max_positions)
        deviation = 1 / math.sqrt(model.shape.hidden_size)
        writer.write_json(
            "config.json", model.shape.config(model.dtype, chat.special_ids, deviation)
        )
        write_tokenizer(writer, chat)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            write_weights(writer, _tensors(model, pool), model.shard_bytes)

    return provide(out or cache_folder(model.folder_name), model.recipe, fill, progress)


def _tensors(model: RandomLlama, pool: Executor) -> list[Tensor]:
    """Scales each matrix by its inputs, so that activations keep their size.

    What adds to the residual stream is smaller still, by the number of additions.
    """
    draw = RandomTensors(model.seed, model.dtype, pool)
    additions = 2 * model.shape.layers

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return draw.normal(name, shape, 1.0, _NORM_DEVIATION)
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        inputs = shape[1] * (additions if adds else 1)
        return draw.normal(name, shape, 0.0, 1 / math.sqrt(inputs))

    return [tensor(name, shape) for name, shape in model.shape.tensor_shapes.items()]
