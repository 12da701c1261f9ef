"""Text, chats and end tokens from the files of a model folder."""

import json

import pytest
from fakes import byte_level_tokenizer

from engine_service.core.tokenizer import TextCodec
from engine_service.errors import InvalidRequest, ModelError

TOKENIZER = byte_level_tokenizer().to_str().encode()
CHAT = [{"role": "user", "content": "hi"}]


def codec(config=None, generation=None, settings=None, **files: bytes) -> TextCodec:
    """Returns the codec of a folder with the given files."""
    described = {
        "config.json": config, "generation_config.json": generation,
        "tokenizer_config.json": settings,
    }  # fmt: skip
    folder = {n: json.dumps(value).encode() for n, value in described.items() if value is not None}
    folder |= {"tokenizer.json": TOKENIZER}
    return TextCodec(folder | {name.replace("__", "."): data for name, data in files.items()})


def with_template(template: str) -> TextCodec:
    """Returns a codec with a chat template."""
    return codec(settings={"chat_template": template, "bos_token": "B", "eos_token": "<|end|>"})


@pytest.mark.parametrize(
    ("config", "generation", "settings", "expected"),
    [
        ({"eos_token_id": 5}, None, None, {5}),
        ({"eos_token_id": [5, 9]}, None, None, {5, 9}),
        (None, {"eos_token_id": [5, 9]}, {"eos_token": "<|end|>"}, {5, 9, 257}),
        (
            {"eos_token_id": 3},
            {"eos_token_id": 4},
            {"eos_token": {"content": "<|end|>"}},
            {3, 4, 257},
        ),
        ({"eos_token_id": None}, {"eos_token_id": None}, {"eos_token": None}, set()),
        ({"eos_token_id": []}, {}, {"eos_token": "unheard of"}, set()),
        (None, None, None, set()),
        ({"eos_token_id": 0}, None, None, {0}),
    ],
)
def test_end_tokens_of_all_three_files(config, generation, settings, expected):
    """Every end token that a file names counts: one, a list, none, and the tokenizer's own."""
    assert codec(config, generation, settings).end_ids == expected


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer__json": b""}, "tokenizer.json cannot be read"),
        ({"tokenizer__json": b"{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer__json": b"\xff\xfe"}, "tokenizer.json cannot be read"),
        ({"config__json": b"{"}, "config.json is not JSON"),
        ({"config__json": b"\xff"}, "config.json is not JSON"),
        ({"config__json": b"[" * 100_000}, "config.json is not JSON"),
        ({"config__json": b"[]"}, "config.json is not a JSON object"),
        ({"config__json": b'{"vocab_size": "many"}'}, "vocab_size is 'many', not a whole number"),
        ({"config__json": b'{"vocab_size": null}'}, "vocab_size is None"),
        ({"config__json": b'{"eos_token_id": "five"}'}, "eos_token_id is 'five'"),
        ({"config__json": b'{"eos_token_id": [5, [6]]}'}, r"eos_token_id is \[6\]"),
        ({"generation_config__json": b'{"eos_token_id": 1.5}'}, "generation_config.json: eos"),
        ({"generation_config__json": b"nope"}, "generation_config.json is not JSON"),
        ({"tokenizer_config__json": b'"text"'}, "tokenizer_config.json is not a JSON object"),
        ({"chat_template__jinja": b"{% if %}"}, "the chat template cannot be read"),
        ({"chat_template__jinja": b"\xff"}, "the chat template cannot be read"),
        ({"chat_template__jinja": b"{{" + b"(" * 50_000}, "the chat template cannot be read"),
    ],
)
def test_broken_files(files, words):
    """A file that cannot be understood is refused by its name, whatever is wrong with it."""
    with pytest.raises(ModelError, match=words):
        codec(**files)


def test_a_folder_without_a_tokenizer():
    """A model without tokenizer.json is refused."""
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        TextCodec({"config.json": b"{}"})


def test_the_vocabulary_is_the_models():
    """Ids go as far as the model's embedding; without a word of it, as far as the tokenizer."""
    assert codec(config={"vocab_size": 320}).vocab_size == 320
    assert codec().vocab_size == byte_level_tokenizer().get_vocab_size()


def test_a_chat_is_rendered_and_encoded():
    """The template sees the messages and special tokens, and asks for an answer."""
    chatty = with_template(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    assert chatty.encode_chat(CHAT) == chatty.encode("Buser:hi;A")


def test_the_template_file_comes_first():
    """A template file beside the tokenizer replaces the one in its settings."""
    both = codec(settings={"chat_template": "old"}, chat_template__jinja=b"new")
    assert both.encode_chat(CHAT) == both.encode("new")


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": None}, {"chat_template": [1]}])
def test_a_model_without_a_template(settings):
    """A chat for a model that knows no chats is refused; text is taken."""
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        codec(settings=settings).encode_chat(CHAT)
    assert refused.value.details["field"] == "chat"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined.attribute }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_is_kept_in_its_sandbox(template):
    """A template that reaches out, fails or does not end is an invalid request, never more."""
    with pytest.raises(InvalidRequest, match="the chat template refuses this") as refused:
        with_template(template).encode_chat(CHAT)
    assert refused.value.details["field"] == "chat"


def test_text_round_trips():
    """What is encoded is decoded to the same text."""
    one = codec()
    detokenizer = one.detokenizer()
    text = "the é 삼겹살"
    assert "".join([*map(detokenizer.push, one.encode(text)), detokenizer.flush()]) == text
