"""Text and chats → token ids and back, from the files of a model folder.

No torch. Templates are run in a sandbox: they come with the model, not from us.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine_service.core.constraints import Grammars
from engine_service.core.detokenizer import Detokenizer
from engine_service.errors import InvalidRequest, ModelError


class TextCodec:
    """Tokenizer, chat template and end tokens of one model."""

    def __init__(self, files: dict[str, bytes]) -> None:
        """Reads `tokenizer.json` and its companions. Raises `ModelError`."""
        if "tokenizer.json" not in files:
            raise ModelError("the model has no tokenizer.json", field="tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self.config = read_json(files, "config.json")
        settings = read_json(files, "tokenizer_config.json")
        self._special = {k: _text_of(settings.get(k)) for k in ("bos_token", "eos_token")}
        self._template = _compile(files, settings)
        size = self.config.get("vocab_size", self._tokenizer.get_vocab_size())
        self.vocab_size = _whole_number("config.json", "vocab_size", size)
        self.end_ids = self._end_ids(read_json(files, "generation_config.json"))

    @property
    def token_count(self) -> int:
        """Tokens that the tokenizer knows; a vocabulary may have room for more."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of plain text."""
        return self._encode(text)

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Returns the token ids of a conversation. Raises `InvalidRequest`."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template", field="chat", hint="send text")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is a program and can fail in any way
            raise InvalidRequest(
                f"the chat template refuses this: {error}", field="chat"
            ) from error
        return self._encode(text, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Returns a fresh detokenizer for one answer."""
        return Detokenizer(self._tokenizer.decode)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles what answers must look like. Raises `NotOffered`.

        Made when it is first asked for: a quarter of a second for a vocabulary of 49,000, in
        which nobody is answered. Made at the start, every instance is ready 0.3 s later.
        """
        return Grammars(self._tokenizer.to_str(), self.vocab_size, sorted(self.end_ids))

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        # Of a batch the library lets go of the interpreter: a long text alone holds it for
        # seconds, and with it whoever is served from another thread.
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return tuple(encoded.ids)

    def _end_ids(self, generation: dict[str, Any]) -> frozenset[int]:
        """Every end-of-sequence token that any of the three files names."""
        named = {
            "config.json": self.config.get("eos_token_id"),
            "generation_config.json": generation.get("eos_token_id"),
            "tokenizer_config.json": self._tokenizer.token_to_id(self._special["eos_token"]),
        }
        return frozenset(
            _whole_number(name, "eos_token_id", one)
            for name, value in named.items()
            for one in (value if isinstance(value, list) else [value])
            if one is not None
        )


def read_json(files: dict[str, bytes], name: str) -> dict[str, Any]:
    """Returns a JSON object of the model, empty when the file is absent. Raises `ModelError`."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not JSON: {error}", field=name) from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object", field=name)
    return value


def _compile(files: dict[str, bytes], settings: dict[str, Any]) -> jinja2.Template | None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    try:
        source = settings.get("chat_template")
        if "chat_template.jinja" in files:
            source = files["chat_template.jinja"].decode()
        return environment.from_string(source) if isinstance(source, str) else None
    except (jinja2.TemplateError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"the chat template cannot be read: {error}") from error


def _whole_number(file: str, field: str, value: object) -> int:
    if type(value) is not int:
        raise ModelError(f"{file}: {field} is {value!r:.64}, not a whole number", field=field)
    return value


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text_of(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
