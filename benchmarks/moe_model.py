"""A random model with experts in each layer, made like random Llamas are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine_service.checkpoint import random_llama
from engine_service.checkpoint.dtypes import ITEM_BYTES
from engine_service.checkpoint.llama import LlamaShape


@dataclass(frozen=True, kw_only=True)
class MoeShape(LlamaShape):
    """All numbers that decide what a `Qwen3MoeForCausalLM` holds; `ffn_size` is an expert's."""

    experts: int
    top_k: int

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of one layer by its name within the layer."""
        shapes = {k: v for k, v in super().layer_shapes.items() if not k.startswith("mlp.")}
        shapes |= {f"self_attn.{name}_norm": (self.head_dim,) for name in "qk"}
        shapes["mlp.gate"] = (self.experts, self.hidden_size)
        for expert in range(self.experts):
            for name, shape in self.expert_shapes.items():
                shapes[f"mlp.experts.{expert}.{name}"] = shape
        return shapes

    @property
    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of one expert by its name within the expert."""
        wide = (self.ffn_size, self.hidden_size)
        return {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}

    def config(self, dtype: str, special_ids: dict[str, int], spread: float) -> dict[str, object]:
        """Returns `config.json`."""
        return {
            **super().config(dtype, special_ids, spread),
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "num_experts": self.experts, "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.ffn_size, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip


@dataclass(frozen=True)
class MoeModel:
    """A checkpoint folder, and what is known of it without asking an engine."""

    folder: Path
    shape: MoeShape
    dtype: str = "float32"

    @property
    def files(self) -> list[Path]:
        """Files of the folder."""
        return [path for path in self.folder.iterdir() if path.is_file()]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer."""
        items = sum(map(math.prod, self.shape.expert_shapes.values()))
        return items * ITEM_BYTES[self.dtype]


def make(shape: MoeShape, out: Path | None = None) -> MoeModel:
    """Makes or finds a model in float32; in the user's cache unless `out` says where."""
    wanted = random_llama.RandomLlama(shape=shape)
    return MoeModel(random_llama.make(wanted, out).path, shape, wanted.dtype)
