"""What an answer must look like: JSON Schema, regular expression, grammar, choice.

The work is llguidance's (github.com/guidance-ai/llguidance); it has no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine_service.errors import EngineError, InvalidRequest, NotOffered

_ANY_OBJECT = '{"type": "object"}'
# Everybody's step waits for every mask. Within the library's own limit (50,000) one ambiguous
# rule takes a second per token, within ours 0.05; a choice of 300 objects needs less than 1,000.
_LIMITS = LLParserLimits(step_max_items=5_000)


class Grammars:
    """Compiles constraints for one tokenizer. Compiling may take a second: not on a loop."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Reads a tokenizer. Raises `NotOffered` for one of which no structure can be made."""
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(end_ids)
            )
        except ValueError as error:
            raise NotOffered(
                f"the model's tokenizer allows no structure: {error}", field="sampling.structure"
            ) from error

    def json_schema(self, schema: str) -> Matcher:
        """Answers are JSON that fits a schema. Raises `InvalidRequest`."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise _refused("json_schema", str(error)) from error
        return self._compile("json_schema", grammar)

    def json_object(self) -> Matcher:
        """Answers are JSON objects."""
        return self._compile("json_object", LLMatcher.grammar_from_json_schema(_ANY_OBJECT))

    def regex(self, pattern: str) -> Matcher:
        """Answers match an expression from begin to end. Raises `InvalidRequest`."""
        return self._compile("regex", LLMatcher.grammar_from_regex(pattern))

    def grammar(self, text: str) -> Matcher:
        """Answers fit a grammar, in llguidance's Lark or in GBNF. Raises `InvalidRequest`."""
        try:
            lark = any_to_lark(text)
        except (GbnfToLarkError, ValueError, RecursionError) as error:
            raise _refused("grammar", str(error)) from error
        return self._compile("grammar", LLMatcher.grammar_from_lark(lark))

    def choice(self, options: Sequence[str]) -> Matcher:
        """Answers are one of some texts. Raises `InvalidRequest`."""
        if not options or not all(options):
            raise _refused("choice", "at least one option is needed, and none may be empty")
        # One terminal: alternatives of a rule would be followed one by one, 2,000 at most.
        texts = " | ".join(json.dumps(option) for option in options)
        grammar = f"start: OPTION\nOPTION: {texts}"
        return self._compile("choice", LLMatcher.grammar_from_lark(grammar))

    def _compile(self, kind: str, grammar: str) -> Matcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        made = Matcher(matcher, kind)
        made.allowed()  # the first mask takes longest, and may be too much: sooner than in a step
        return made


class Matcher:
    """Follows one answer; a `Constraint`."""

    def __init__(self, matcher: LLMatcher, kind: str) -> None:
        self._matcher = matcher
        self._kind = kind
        self._mask = b""
        self._unused = matcher.deep_copy()

    def fresh(self) -> Matcher:
        """Returns the same for another answer."""
        return Matcher(self._unused.deep_copy(), self._kind)

    def allowed(self) -> bytes:
        """Returns the tokens that may come next, one bit each.

        Raises `InvalidRequest` where the structure turns out to be too complex.
        """
        self._mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refused(self._kind, self._matcher.get_error())
        return self._mask

    def accept(self, token: int) -> bool:
        """Takes a token; returns whether the answer is complete and nothing follows.

        Raises `InvalidRequest` where the structure turns out to be too complex, and
        `EngineError` for a token that may not come.
        """
        if self._matcher.consume_token(token):
            return bool(self._matcher.is_stopped())
        if token < 8 * len(self._mask) and self._mask[token // 8] >> token % 8 & 1:
            raise _refused(self._kind, self._matcher.get_error())
        raise EngineError(f"token {token} does not keep to the answer's structure")


def _refused(kind: str, reason: str) -> InvalidRequest:
    reason = reason.partition("\n<state>")[0]  # the parser's own state follows, and the grammar
    return InvalidRequest(
        f"the structure cannot be used: {reason}", field=f"sampling.structure.{kind}"
    )
