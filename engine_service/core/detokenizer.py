"""Tokens → text, piece by piece, never splitting a character. Plain Python."""

from __future__ import annotations

from collections.abc import Callable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_OPEN_BYTES = 3
"""UTF-8 has at most 4 bytes, so that many may wait for their last one (RFC 3629)."""
_WINDOW_TOKENS = 32
_KEPT_TOKENS = 12


class Detokenizer:
    """Text of one answer. The pieces joined equal the decoding of all tokens at once.

    A piece is the decoding of a short window of tokens less what the window said
    before, so decoders that trim a text's start do so on both sides. The window
    begins where the text was whole, so it never cuts a character.

    A text that ends in U+FFFD may be waiting for bytes. Byte-level decoders show one
    U+FFFD for an open character; byte-fallback decoders one for each of its bytes, and
    for those of the characters before it too. So nothing is said while a character can
    be open. After more tokens these are bytes that no text has; all but the last few
    U+FFFD are final then.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Takes the tokenizer's `decode`."""
        self._decode = decode
        self._window: list[int] = []
        self._whole = 0
        """Tokens of the window that were there when the text was last whole."""
        self._said = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that it completes, possibly none."""
        if len(self._window) > self._whole and self._is_silent(token):
            return ""  # an open character may be completed behind any number of them
        self._window.append(token)
        text = self._decode(self._window)
        if self._is_open(text):
            return ""
        final, piece = _final(text), ""
        if final.startswith(self._said):
            piece, self._said = final[len(self._said) :], final
        if final == text:
            self._begin_window_at(self._whole)
            self._whole = len(self._window)
        elif len(self._window) >= _WINDOW_TOKENS:
            self._begin_window_at(len(self._window) - _KEPT_TOKENS)
            self._whole = 0
        return piece

    def flush(self) -> str:
        """Returns what was held back; call once at the end."""
        text = self._decode(self._window)
        if self._is_open(text):
            return self._decode(self._window[self._whole :])
        return text[len(self._said) :]

    def _is_silent(self, token: int) -> bool:
        """Returns whether a token has no text; twice, since decoders may trim the first space."""
        return not self._decode([token, token])

    def _is_open(self, text: str) -> bool:
        """Returns whether the window may end within a character."""
        return text.endswith(_REPLACEMENT) and len(self._window) - self._whole <= _OPEN_BYTES

    def _begin_window_at(self, token: int) -> None:
        del self._window[:token]
        self._said = _final(self._decode(self._window))


def _final(text: str) -> str:
    """Returns a text without the U+FFFD at its end that bytes to come may change."""
    bare = text.rstrip(_REPLACEMENT)
    return text[: max(len(bare), len(text) - _OPEN_BYTES)]
