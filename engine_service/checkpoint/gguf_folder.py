"""Writes all files of a model folder out of one GGUF file."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from engine_service.checkpoint.gguf_tokenizer import read_tokenizer
from engine_service.checkpoint.gguf_weights import read_fields, read_shape, read_tensors
from engine_service.checkpoint.tokenizer import write_tokenizer
from engine_service.checkpoint.weights import write_weights
from engine_service.checkpoint.writer import FolderWriter


def convert(gguf: Path, writer: FolderWriter, dtype: str, initializer_range: float) -> None:
    """Converts the model in `gguf`; its weights are dequantized to `dtype`.

    Args:
        gguf: A Llama model with the tokenizer of SmolLM.
        writer: The folder.
        dtype: `float32`, `bfloat16` or `float16`.
        initializer_range: Goes into the config as it is; GGUF does not keep it.
    """
    reader = GGUFReader(str(gguf))
    fields = read_fields(reader)
    shape = read_shape(reader, fields)
    chat = read_tokenizer(fields)
    writer.write_json("config.json", shape.config(dtype, chat.special_ids, initializer_range))
    write_tokenizer(writer, chat)
    write_weights(writer, read_tensors(reader, shape, dtype))
