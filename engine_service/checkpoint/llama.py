"""The shape of a Llama checkpoint: its config and the names and shapes of its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """All numbers that decide what a Llama checkpoint holds."""

    hidden_size: int
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    head_dim: int
    ffn_size: int
    """Width of the feed-forward part."""
    vocab_size: int
    max_positions: int
    tied: bool
    """Whether the embedding also serves as the head."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its name, in the order of the model."""
        hidden, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(self.layers):
            for name, shape in self.layer_shapes.items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (vocab, hidden)
        return shapes

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of one layer by its name within the layer."""
        hidden, ffn = self.hidden_size, self.ffn_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }

    @property
    def layer_items(self) -> int:
        """Number of values in one layer."""
        return sum(math.prod(shape) for shape in self.layer_shapes.values())

    @property
    def other_items(self) -> int:
        """Number of values outside the layers."""
        matrices = 1 if self.tied else 2
        return self.hidden_size * (matrices * self.vocab_size + 1)

    def config(self, dtype: str, special_ids: dict[str, int], spread: float) -> dict[str, object]:
        """Returns `config.json`.

        Args:
            dtype: The dtype of the weights.
            special_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`.
            spread: Standard deviation that training started from; nothing here reads it.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": spread,
            "intermediate_size": self.ffn_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **special_ids,
        }
