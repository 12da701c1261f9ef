"""Streamed text equals text, and never ends within a character."""

import pytest
from fakes import byte_level_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine_service.core.detokenizer import Detokenizer

STORY = "é 삼겹살 👩‍👩‍👧 end"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SILENT = 5000
"""A token without a text, like those beyond a vocabulary."""


def byte_fallback() -> Tokenizer:
    """One token per byte where no other fits, as in Llama 2 and Mistral; 256 is ` the`."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback()}


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Streams tokens and returns what each one says, and the rest."""
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.lists(st.one_of(st.integers(0, 256), st.just(SILENT)), max_size=120))
@example([0xC9, *[SILENT] * 40, 0xAC])
@example([0xC3, 0xA9] * 40)
@example([0xFF] * 100)
@example([0xF0, 0x9F, 0x91] * 40 + [0xA9])
@example([0x80] * 33 + list("é".encode()))
@example([0xE2, 0x82, 256, 0xAC])
@example([0xEF, 0xBF, 0xBD] * 30)
def test_pieces_join_to_the_whole(tokens):
    """Whatever bytes come, the pieces joined are the decoding of all tokens at once."""
    tokenizer = TOKENIZERS["byte level"]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("count", [1, 28, 29, 40, 100])
@pytest.mark.parametrize("begin", [[0xF0], [0xE2, 0x82], [0xFF, 0xFF], list(b"a\xc3"), []])
def test_tokens_without_a_text(begin, count):
    """Bytes that no character came of are told, however many silent tokens follow."""
    tokenizer = TOKENIZERS["byte level"]
    tokens = [*begin, *[SILENT] * count, *b"end"]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(st.lists(st.one_of(st.text(max_size=12), st.none()), max_size=12))
@example(["👩‍👩‍👧"] * 8)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_splits_a_character(name, parts):
    """Text that comes byte by byte, between whole words, is never shown half."""
    tokenizer = TOKENIZERS[name]
    parts = [part if part is None else part.replace(REPLACEMENT, "") for part in parts]
    tokens = [t for part in parts for t in ([256] if part is None else part.encode())]
    streamed = pieces(tokenizer, tokens)
    assert "".join(streamed) == tokenizer.decode(tokens)
    assert not any(REPLACEMENT in piece for piece in streamed)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_accents_hangul_and_joined_emoji(name):
    """Accents, Hangul and joined emoji, one byte per token, come out whole and in time."""
    streamed = pieces(TOKENIZERS[name], list(STORY.encode()))
    assert "".join(streamed) == STORY
    assert not any(REPLACEMENT in piece for piece in streamed)
    assert streamed[-1] == ""
    assert [piece for piece in streamed if piece] == list(STORY)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("cut", range(1, len(STORY.encode())))
def test_an_answer_that_is_cut_anywhere(name, cut):
    """An answer that ends within a character ends cleanly, with what one decoding would show."""
    tokens = list(STORY.encode())[:cut]
    *streamed, rest = pieces(TOKENIZERS[name], tokens)
    assert not any(REPLACEMENT in piece for piece in streamed)
    if REPLACEMENT not in rest:
        assert "".join([*streamed, rest]) == TOKENIZERS[name].decode(tokens)
    assert len(rest) <= 3


def test_invalid_bytes_still_come_out():
    """Bytes that are no text are shown as such, some tokens later or at the end."""
    tokenizer = TOKENIZERS["byte level"]
    streamed = pieces(tokenizer, [0x61, 0xFF, 0xFF, 0x62, 0xFF])
    assert streamed == ["a", "", "", f"{REPLACEMENT * 2}b", "", REPLACEMENT]
    endless = pieces(tokenizer, [0xFF] * 50)
    assert sum(map(len, endless[:-1])) == 47


def test_special_tokens_say_nothing():
    """A special token adds no text and does not disturb the characters around it."""
    tokens = [*"é".encode(), 257, *"é".encode(), 257]
    assert "".join(pieces(TOKENIZERS["byte level"], tokens)) == "éé"


def test_a_leading_space_is_trimmed_once():
    """Decoders that trim a text's start do not trim each piece's."""
    assert "".join(pieces(TOKENIZERS["byte fallback"], [256] * 50)) == " ".join(["the"] * 50)


def test_a_long_answer_is_decoded_in_short_windows():
    """The work for a token does not grow with the length of the answer."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return TOKENIZERS["byte level"].decode(tokens)

    detokenizer = Detokenizer(decode)
    for token in [*b"text" * 500, *[0xFF] * 500, *STORY.encode() * 20]:
        detokenizer.push(token)
    assert longest <= 64
