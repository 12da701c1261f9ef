"""The byte-level tokenizer of random models."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine_service.checkpoint.random_llama import RandomLlama, make
from engine_service.checkpoint.random_shape import SMALLEST_VOCAB, ShapeWish


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model."""
    shape = ShapeWish(hidden_size=32, layers=1, vocab_size=SMALLEST_VOCAB).shape("float32")
    return make(RandomLlama(shape=shape), tmp_path_factory.mktemp("tokenizer") / "m").path


@pytest.fixture(scope="module")
def tokenizer(folder):
    """Its tokenizer, as the engine reads it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_the_bytes(tokenizer, text):
    """Any text becomes its UTF-8 bytes, and these become the text again."""
    ids = tokenizer.encode(text).ids
    if "<|" not in text:
        assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_follow(tokenizer):
    """The three special tokens are matched in the text and close the vocabulary."""
    assert tokenizer.encode("<|bos|>a<|eos|><|pad|>").ids == [256, 97, 257, 258]
    assert tokenizer.get_vocab_size() == SMALLEST_VOCAB


def test_transformers_renders_the_chat_template(folder):
    """The chat template renders, and the folder's special tokens are known."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "[user] hi<|eos|>[assistant] "
    assert tokenizer.eos_token_id == 257
    assert tokenizer("héllo").input_ids == list("héllo".encode())
