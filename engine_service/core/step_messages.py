"""What a step is asked for, and what comes of it. Plain Python."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one request chooses its tokens."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 for all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    """Taken from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """Taken once for each time that a token is in the answer."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer."""
    logit_bias: dict[int, float] = {}
    """Added to logits, by token."""
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are wanted beside the chosen one's."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on the tokens so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step: its next tokens and where its KV lies."""

    tokens: tuple[int, ...]
    """Token ids to run: a chunk of a prompt (prefill) or the last token (decode)."""
    position: int
    """Position of the first of them in the sequence."""
    blocks: tuple[int, ...]
    """KV blocks of the sequence, in order; they cover every position of the row."""
    output_index: int
    """Index, in the answer, of the token to sample; with the seed it decides the draw."""
    sampling: Sampling
    samples: bool = True
    """Whether a token is wanted; not before the last chunk of a prompt."""
    prompt: tuple[int, ...] = ()
    """The whole prompt, where the choice looks back."""
    output: tuple[int, ...] = ()
    """The answer so far, where the choice looks back."""
    banned: tuple[int, ...] = ()
    """Tokens that may not come."""
    allowed: bytes = b""
    """Tokens that may come: bit `i % 8` of byte `i // 8`. Empty for all."""
    following: tuple[int, ...] = ()
    """Tokens after each one of the row, where log-probabilities of the prompt are wanted."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Runs one batch. Answered by `Sampled`."""

    rows: tuple[Row, ...]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, of what the model says before any sampling setting."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and theirs, the likeliest first."""


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """What a step sampled."""

    tokens: tuple[int, ...]
    """One per row; -1 where none was wanted."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By row, where they were wanted."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    """By row: of the tokens that follow those of the row."""
    page_kind: str = ""
    """Which pages back the arena by now, where they are others than were told."""
