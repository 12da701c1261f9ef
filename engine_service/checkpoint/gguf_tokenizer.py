"""Turns the tokenizer of a SmolLM GGUF file into that of a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.checkpoint.tokenizer import ChatTokenizer, special_tokens
from engine_service.errors import CheckpointError

_CONTROL = 3
"""GGUF's token type of a special token."""

_ID_FIELDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def read_tokenizer(fields: dict[str, Any]) -> ChatTokenizer:
    """Builds byte-level BPE that splits digits one by one, as SmolLM does, before it merges.

    Raises:
        CheckpointError: The file asks for another way of splitting.
    """
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise CheckpointError(f"cannot split text as {fields['tokenizer.ggml.pre']} does")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(special_tokens(control))
    return _with_specials(tokenizer, tokens, fields)


def _with_specials(
    tokenizer: Tokenizer, tokens: list[str], fields: dict[str, Any]
) -> ChatTokenizer:
    """Adds the roles of the special tokens and the chat template."""
    ids = {
        kind: int(fields[f"tokenizer.ggml.{name}_token_id"]) for kind, name in _ID_FIELDS.items()
    }
    return ChatTokenizer(
        tokenizer=tokenizer,
        special_ids={f"{kind}_token_id": i for kind, i in ids.items() if kind != "unk"},
        special_tokens={f"{kind}_token": tokens[i] for kind, i in ids.items()},
        chat_template=fields["tokenizer.chat_template"],
        max_tokens=fields["llama.context_length"],
    )
