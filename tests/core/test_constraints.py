"""Structures allow exactly the answers that they describe."""

import json

import pytest
from fakes import byte_level_tokenizer

from engine_service.core.constraints import Grammars
from engine_service.errors import EngineError, InvalidRequest

VOCAB, END = 300, 257
SCHEMA = json.dumps(
    {
        "type": "object", "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"], "additionalProperties": False,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Grammars over a tokenizer with one token per byte."""
    return Grammars(byte_level_tokenizer().to_str(), VOCAB, [END])


def allowed(constraint) -> set[int]:
    """Returns the tokens that may come next."""
    mask = constraint.allowed()
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}


def fits(constraint, text: str) -> bool:
    """Whether every byte of a text may come, and the end after it."""
    for token in [*text.encode(), END]:
        if token not in allowed(constraint):
            return False
        complete = constraint.accept(token)
    return complete


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", SCHEMA, ['{"a":"x"}', '{"a": "y"}'], ['{"a":"z"}', "{}", "[]", '{"b"']),
        ("regex", "(ab|cd)+[0-9]", ["ab1", "cdab0"], ["a1", "ab", "ab12"]),
        ("choice", ["yes", "no", 'a "b"\n'], ["yes", "no", 'a "b"\n'], ["y", "maybe", "yesno"]),
        ("grammar", 'start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "xx", "()"]),
    ],
)
def test_what_fits(grammars, kind, source, good, bad):
    """Every text that is described may come, whole; no other may."""
    constraint = getattr(grammars, kind)(source)
    for text in good:
        assert fits(constraint.fresh(), text), text
    for text in bad:
        assert not fits(constraint.fresh(), text), text


def test_any_object(grammars):
    """An object may come, and nothing else."""
    assert fits(grammars.json_object(), '{"k": [1, null, {"m": "n"}]}')
    assert not fits(grammars.json_object(), "[1]")


def test_a_token_that_may_not_come(grammars):
    """Taking one is an error of the engine, never silence."""
    constraint = grammars.choice(["yes"])
    with pytest.raises(EngineError, match="does not keep"):
        constraint.accept(ord("n"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"), ("json_schema", '{"type": 3}'), ("json_schema", "[]"),
        ("regex", "("), ("grammar", "start: nothing"), ("choice", []), ("choice", ["a", ""]),
    ],
)  # fmt: skip
def test_what_makes_no_sense(grammars, kind, source):
    """It is refused by field, with the reason."""
    with pytest.raises(InvalidRequest) as caught:
        getattr(grammars, kind)(source)
    assert caught.value.details["field"] == f"sampling.structure.{kind}"
