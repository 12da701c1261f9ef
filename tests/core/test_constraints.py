"""Structures allow exactly the answers that they describe."""

import json

import pytest
from fakes import byte_level_tokenizer

from engine_service.core.constraints import Grammars
from engine_service.errors import EngineError, InvalidRequest, NotOffered

VOCAB, END = 300, 257
AMBIGUOUS = 'start: s\ns: {} | "a" | "b" | ""'
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


def follow(constraint, text: str) -> None:
    """Takes the bytes of a text, all of which must be allowed."""
    for token in text.encode():
        assert token in allowed(constraint)
        constraint.accept(token)


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
    "grammar",
    [
        AMBIGUOUS.format(" | ".join("s " * n for n in range(2, 12))),
        "start: " + " | ".join(f'"a{n:04}"' for n in range(2500)),
    ],
)
def test_what_turns_out_to_be_too_complex(grammars, grammar):
    """A grammar that would hold everybody up is refused, in few words, where it does so."""
    constraint = grammars.grammar(grammar)
    with pytest.raises(InvalidRequest) as caught:
        follow(constraint, "a" * 60)
    assert caught.value.details["field"] == "sampling.structure.grammar"
    assert len(str(caught.value)) < 300


def test_large_structures(grammars):
    """Thousands of texts, and hundreds of kinds of objects, may be chosen among."""
    texts = [f"text {number}" for number in range(5000)]
    assert fits(grammars.choice(texts), "text 4321")
    kinds = [
        {"type": "object", "properties": {"kind": {"const": f"k{n}"}}, "required": ["kind"]}
        for n in range(300)
    ]
    assert fits(grammars.json_schema(json.dumps({"anyOf": kinds})), '{"kind":"k7"}')


@pytest.mark.parametrize("tokenizer", ["{}", byte_level_tokenizer().to_str().replace("BPE", "?")])
def test_a_tokenizer_that_allows_none(tokenizer):
    """A model whose tokenizer the library cannot read offers no structures, and says why."""
    with pytest.raises(NotOffered, match="tokenizer"):
        Grammars(tokenizer, VOCAB, [END])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"), ("json_schema", '{"type": 3}'), ("json_schema", "[]"),
        ("regex", "("), ("grammar", "start: nothing"), ("choice", []), ("choice", ["a", ""]),
        ("grammar", AMBIGUOUS.format(" | ".join("s " * n for n in range(2, 60)))),
    ],
)  # fmt: skip
def test_what_makes_no_sense(grammars, kind, source):
    """It is refused by field, with the reason."""
    with pytest.raises(InvalidRequest) as caught:
        getattr(grammars, kind)(source)
    assert caught.value.details["field"] == f"sampling.structure.{kind}"
