"""The architectures that can be served, each by what tells it from the others.

One decoder computes them all (`llama.py`), from one layout (`llama_format.py`). What stands
here in quotes is the name of a setting in `config.json` that decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Switch = bool | str
"""What an architecture fixes, or the setting that switches it."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How an architecture chooses among experts, and what its checkpoints call them."""

    scoring: str = "softmax"
    """What turns the router's logits into scores: `softmax` or `sigmoid`."""
    normalized: Switch = "norm_topk_prob"
    """Whether the weights of the chosen experts add up to one."""
    corrected: bool = False
    """Whether a bias per expert takes part in the choice, but not in the weights."""
    group_best: int = 1
    """How many of its best scores a group of experts is judged by."""
    ffn_size: str = "moe_intermediate_size"
    shared: str = ""
    """Name of the experts that every token goes through; empty without any."""
    shared_gate: bool = False
    """Whether their part is weighted by a gate of its own."""
    block: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What tells an architecture from a plain decoder of RMSNorm, RoPE, GQA and SwiGLU."""

    qkv_bias: Switch = False
    output_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Switch = False
    """Whether each head of query and key is normalised before it is rotated."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is obeyed."""
    activation: str = "silu"
    norm_offset: float = 0.0
    """What is added to the weights of a norm."""
    scaled_embedding: bool = False
    """Whether rows of the embedding are multiplied by the root of their size."""
    window: str = ""
    """The setting from whose value on layers attend to a window; `all` for every layer."""
    unread_layers: int = 0
    """How many layers that predict further tokens a checkpoint may hold behind the last one."""
    experts: Experts | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What settings are where `config.json` leaves them out."""


_BIAS = "attention_bias"
_SHARED = Experts(shared="shared_experts")
_CORRECTED = Experts(shared="shared_experts", scoring="sigmoid", corrected=True, group_best=2)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=_BIAS, output_bias=_BIAS, mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        window="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Family(
        qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "GemmaForCausalLM": Family(
        qkv_bias=_BIAS, output_bias=_BIAS, activation="gelu_pytorch_tanh", norm_offset=1.0,
        scaled_embedding=True,
        defaults={
            "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "MixtralForCausalLM": Family(
        window="all",
        experts=Experts(
            normalized=True, ffn_size="intermediate_size", block="block_sparse_moe",
            matrices=("w1", "w3", "w2"),
        ),
        defaults={
            "num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias",
        experts=Experts(shared="shared_expert", shared_gate=True),
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=True, experts=Experts(),
        defaults={"num_key_value_heads": 4},
    ),
    "DeepseekForCausalLM": Family(qkv_bias=_BIAS, output_bias=_BIAS, experts=_SHARED),
    "Dots1ForCausalLM": Family(
        qkv_bias=_BIAS, output_bias=_BIAS, qk_norm=True, experts=_CORRECTED,
        window="max_window_layers", defaults={"sliding_window": 4096, "max_window_layers": 62},
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias=_BIAS, qk_norm="use_qk_norm", partial_rotary=True, unread_layers=1,
        experts=_CORRECTED,
        defaults={
            "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
    ),
}  # fmt: skip

REFUSED: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "its multi-head latent attention",
    "DeepseekV3ForCausalLM": "its multi-head latent attention",
}
"""What is missing to serve an architecture whose other parts are there."""
