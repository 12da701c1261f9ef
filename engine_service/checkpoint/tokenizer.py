"""Writes the files of a tokenizer; makes the byte-level one of random models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_service.checkpoint.writer import FolderWriter

BYTE_TOKENS = 256
BYTE_SPECIALS = {"bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}
"""They take the ids from 256 on."""

_BYTE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + '<|eos|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class ChatTokenizer:
    """A tokenizer with what surrounds it in a model folder."""

    tokenizer: Tokenizer
    special_ids: dict[str, int]
    """`bos_token_id` and its like: what `config.json` and `generation_config.json` say."""
    special_tokens: dict[str, str]
    """`bos_token` and its like."""
    chat_template: str
    max_tokens: int


def write_tokenizer(writer: FolderWriter, chat: ChatTokenizer) -> None:
    """Writes the three files of a tokenizer and the generation config."""
    writer.write_text("tokenizer.json", chat.tokenizer.to_str(pretty=False))
    writer.write_json("special_tokens_map.json", chat.special_tokens)
    writer.write_json("generation_config.json", chat.special_ids)
    tokenizer_config = {
        **chat.special_tokens,
        "add_prefix_space": False,
        "chat_template": chat.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": chat.max_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    writer.write_json("tokenizer_config.json", tokenizer_config)


def special_tokens(texts: list[str]) -> list[AddedToken]:
    """Returns tokens that are matched in the text as they are."""
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def byte_tokenizer(max_tokens: int) -> ChatTokenizer:
    """Makes a tokenizer whose ids 0 to 255 are the bytes; three special tokens follow."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens(list(BYTE_SPECIALS.values())))
    return ChatTokenizer(
        tokenizer=tokenizer,
        special_ids={f"{kind}_token_id": BYTE_TOKENS + i for i, kind in enumerate(BYTE_SPECIALS)},
        special_tokens={f"{kind}_token": text for kind, text in BYTE_SPECIALS.items()},
        chat_template=_BYTE_TEMPLATE,
        max_tokens=max_tokens,
    )


def _byte_characters() -> list[str]:
    """Returns the character that stands for each byte in a byte-level vocabulary.

    Bytes that print as a Latin-1 character stand for themselves, the others take the
    code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(BYTE_TOKENS)
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTE_TOKENS)]
