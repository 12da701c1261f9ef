"""Turns the weights of a Llama GGUF file into tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from engine_service.checkpoint.floats import encode_in_chunks
from engine_service.checkpoint.llama import LlamaShape
from engine_service.checkpoint.tensor_file import Tensor
from engine_service.errors import CheckpointError

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_fields(reader: GGUFReader) -> dict[str, Any]:
    """Returns all settings of the file by their name."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_shape(reader: GGUFReader, fields: dict[str, Any]) -> LlamaShape:
    """Reads the shape of the model out of the settings."""
    if fields["general.architecture"] != "llama":
        raise CheckpointError("the GGUF file holds no Llama model")
    return LlamaShape(
        hidden_size=fields["llama.embedding_length"],
        layers=fields["llama.block_count"],
        heads=fields["llama.attention.head_count"],
        kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        ffn_size=fields["llama.feed_forward_length"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        max_positions=fields["llama.context_length"],
        tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        rope_theta=fields["llama.rope.freq_base"],
        # Stored as float32: six digits give back the number that was meant.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    )


def read_tensors(reader: GGUFReader, shape: LlamaShape, dtype: str) -> list[Tensor]:
    """Returns all tensors; each is dequantized when it is written.

    Raises:
        CheckpointError: Names or shapes are not those of the model.
    """
    stored = {_name(tensor.name): tensor for tensor in reader.tensors}
    # GGUF lists the innermost dimension first.
    shapes = {name: tuple(map(int, reversed(t.shape))) for name, t in stored.items()}
    if shapes != shape.tensor_shapes:
        wrong = min(set(shapes.items()) ^ set(shape.tensor_shapes.items()))
        raise CheckpointError(f"the GGUF file does not fit its own settings at {wrong}")

    def tensor(name: str) -> Tensor:
        def chunks() -> Iterator[NDArray[Any]]:
            return encode_in_chunks(_values(stored[name], name, shape), dtype)

        return Tensor(name=name, dtype=dtype, shape=shapes[name], chunks=chunks)

    return [tensor(name) for name in shape.tensor_shapes]


def _name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(f"the GGUF file holds {name}, which no Llama model has")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _values(stored: Any, name: str, shape: LlamaShape) -> NDArray[np.float32]:
    """Dequantizes one tensor and puts the rows of queries and keys in their usual order."""
    values: NDArray[np.float32] = dequantize(stored.data, stored.tensor_type).astype(np.float32)
    if name.endswith("q_proj.weight"):
        return _split_halves(values, shape.heads)
    if name.endswith("k_proj.weight"):
        return _split_halves(values, shape.kv_heads)
    return values


def _split_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorders the rows of each head from rotary pairs to rotary halves.

    GGUF has the two rows that rotate together side by side; Hugging Face has the first
    of each pair in the head's upper half and the second in the lower.
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
