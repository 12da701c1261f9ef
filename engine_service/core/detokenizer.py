"""Tokens → text, piece by piece, never splitting a character. Plain Python."""

from __future__ import annotations

from collections.abc import Callable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16
_KEPT_TOKENS = 4
"""UTF-8 needs at most 4 bytes, so a character spans at most 4 tokens (RFC 3629)."""


class Detokenizer:
    """Text of one answer. The pieces joined equal the decoding of all tokens at once.

    A piece is the decoding of a short window of tokens less what the window said
    before, so decoders that trim a text's start do so on both sides. Of a text that
    ends in U+FFFD only that last character can still change: whatever bytes are
    missing there, those before it cannot be repaired any more.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Takes the tokenizer's `decode`."""
        self._decode = decode
        self._window: list[int] = []
        self._said = 0

    def push(self, token: int) -> str:
        """Takes a token; returns the text that it completes, possibly none."""
        self._window.append(token)
        stable = self._stable()
        piece = stable[self._said :]
        self._said = len(stable)
        if len(self._window) >= _WINDOW_TOKENS:
            self._window = self._window[-_KEPT_TOKENS:]
            self._said = len(self._stable())
        return piece

    def flush(self) -> str:
        """Returns what was held back; call once at the end."""
        return self._decode(self._window)[self._said :]

    def _stable(self) -> str:
        return self._decode(self._window).removesuffix(_REPLACEMENT)
