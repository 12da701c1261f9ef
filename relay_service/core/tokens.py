"""Who may do what: bearer tokens and their scopes, read from a file. Plain Python.

    # comment
    generate                a-token-of-16-characters-or-more
    control,relay           another-token

A token never stands in a message: errors name the file and the line.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from relay_service.core.security import Stamp, stamp_of
from relay_service.errors import ConfigError

SCOPES = frozenset({"generate", "control", "relay"})
MIN_TOKEN_CHARS = 16
MAX_FILE_BYTES = 1 << 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What RFC 6750 (2.1) lets a bearer token consist of."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """One line: a token and what it allows."""

    token: str
    scopes: frozenset[str]


class TokenFile:
    """A file of tokens, read again whenever it has changed.

    A changed file that is broken changes nothing: what was read before stays in force.
    """

    def __init__(self, path: str) -> None:
        """Reads the file. Raises `ConfigError` for one that cannot be used."""
        self._path = path
        self._stamp: Stamp = stamp_of(path)
        self._grants = read_tokens(path)

    def scopes_of(self, presented: str) -> frozenset[str] | None:
        """Returns what a presented token allows; none for an unknown one.

        Takes the same time whichever token it is: all are compared, as digests.
        """
        self._refresh()
        digest, found = _digest(presented), None
        for grant in self._grants:
            if hmac.compare_digest(digest, _digest(grant.token)):
                found = grant.scopes
        return found

    def own(self, scope: str = "") -> str:
        """Returns the first token, or the first one of a scope; empty where there is none."""
        self._refresh()
        return next((g.token for g in self._grants if scope in ("", *g.scopes)), "")

    def _refresh(self) -> None:
        now = stamp_of(self._path)
        if now == self._stamp:
            return
        self._stamp = now
        try:
            self._grants = read_tokens(self._path)
        except ConfigError as error:
            _log.error("%s; the tokens that were read before stay in force", error)
        else:
            _log.info("read %d tokens anew from %s", len(self._grants), self._path)


def read_tokens(path: str) -> tuple[Grant, ...]:
    """Reads a token file. Raises `ConfigError`, never with a token in it."""
    grants: dict[str, Grant] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        grant = _grant(f"{path}, line {number}", line.split())
        if grant.token in grants:
            raise _wrong(f"{path}, line {number}: the token stands there twice")
        grants[grant.token] = grant
    if not grants:
        raise _wrong(f"{path} holds no token")
    return tuple(grants.values())


def _grant(place: str, words: list[str]) -> Grant:
    if len(words) != 2:
        raise _wrong(f"{place}: a line is `scope[,scope] token`")
    scopes, token = frozenset(words[0].split(",")), words[1]
    if not scopes <= SCOPES:
        raise _wrong(f"{place}: scopes are {', '.join(sorted(SCOPES))}")
    if len(token) < MIN_TOKEN_CHARS:
        raise _wrong(f"{place}: the token has less than {MIN_TOKEN_CHARS} characters")
    if not _TOKEN.fullmatch(token):
        raise _wrong(f"{place}: the token has characters that no bearer token may have")
    return Grant(token, scopes)


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise _wrong(f"{path} is open to others than its owner", hint=f"chmod 600 {path}")
    if len(data) > MAX_FILE_BYTES or not data.isascii():
        raise _wrong(f"{path} is not a token file: at most {MAX_FILE_BYTES} bytes of ASCII")
    return data.decode("ascii")


def _wrong(message: str, **details: str) -> ConfigError:
    return ConfigError(message, field="token_file", **details)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
