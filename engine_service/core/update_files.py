"""The small files that travel with an update, and whether they fit what serves. Plain Python."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from engine_service.core.hashing import check_sum
from engine_service.core.tokenizer import TextCodec, read_json
from engine_service.errors import CheckpointError, InvalidRequest
from relay_service.core.attachment import ARTIFACT_NAMES

_GROUPS = (
    ("config.json", ("config.json", "generation_config.json")),
    (
        "tokenizer.json",
        (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        ),
    ),
)
"""Files that belong together, by the one without which the others mean nothing."""


def check_names(files: Mapping[str, bytes]) -> None:
    """Raises `InvalidRequest` for a file that does not travel."""
    for name in files:
        if name not in ARTIFACT_NAMES:
            raise InvalidRequest(
                f"{name!r} is no file that travels with weights", field="files", found=name,
                expected=" | ".join(sorted(ARTIFACT_NAMES)),
            )  # fmt: skip


def check_sums(files: Mapping[str, bytes], sums: Mapping[str, str], *, all_of_them: bool) -> None:
    """Holds files to their SHA-256. Raises `CheckpointError`."""
    for name, data in files.items():
        if name in sums:
            check_sum(name, hashlib.sha256(data).hexdigest(), sums)
        elif all_of_them:
            raise CheckpointError(f"{name} is not among the files that are signed", file=name)


def joined(serves: Mapping[str, bytes], brought: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files of new weights.

    A folder that has a `tokenizer.json` of its own has all of its companions that it needs,
    and one that has a `config.json` likewise: none of what served before stays beside them.
    """
    kept = dict(serves)
    for head, group in _GROUPS:
        if head in brought:
            for name in group:
                kept.pop(name, None)
    return {**kept, **brought}


def new_codec(serves: TextCodec, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> TextCodec:
    """Returns what makes tokens of text with new files.

    Takes a while. Raises `InvalidRequest` for files of a model of another format or
    vocabulary, and `ModelError` for such as cannot be read.
    """
    if new.get("config.json") != old.get("config.json"):
        _check_config(old, new)
    codec = TextCodec(dict(new))
    for what, was, found in (
        ("vocab_size", serves.vocab_size, codec.vocab_size),
        ("tokens of tokenizer.json", serves.token_count, codec.token_count),
    ):
        if was != found:
            raise _differs(what, was, found)
    return codec


def _check_config(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> None:
    """The numbers in memory must mean the same."""
    from engine_service.device.config import parse_config  # the way to READY does without

    # Said first and by its own name: it is what a wrong folder differs in most often.
    was, found = (read_json(dict(files), "config.json") for files in (old, new))
    if was.get("vocab_size") != found.get("vocab_size"):
        raise _differs("vocab_size", was.get("vocab_size"), found.get("vocab_size"))
    before, after = (parse_config(files["config.json"]) for files in (old, new))
    for name in before.__struct_fields__:
        if getattr(before, name) != getattr(after, name):
            raise _differs(name, getattr(before, name), getattr(after, name))


def _differs(name: str, was: object, found: object) -> InvalidRequest:
    was, found = (
        msgspec.to_builtins(one) if isinstance(one, msgspec.Struct) else one for one in (was, found)
    )
    return InvalidRequest(
        f"{name} is {was} here and {found} there: that is another format, and takes a restart",
        field=name, expected=str(was), found=str(found),
    )  # fmt: skip
