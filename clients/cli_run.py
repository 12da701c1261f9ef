"""Runs one command: errors become a line and an exit code (DESIGN 8)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

import typer

from clients.errors import ClientError


class Failure(Exception):
    """Something that the command itself found wrong."""


def say(line: str) -> None:
    """Prints one line of result on stdout."""
    print(line, flush=True)  # noqa: T201


def say_error(error: Exception) -> None:
    """Prints what is wrong, and what would help, on stderr."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    if hint := getattr(error, "details", {}).get("hint"):
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201


def refuse(error: Exception) -> NoReturn:
    """Ends a command that was called with what cannot work."""
    say_error(error)
    raise typer.Exit(2) from None


def run(work: Coroutine[Any, Any, None], *, as_json: bool) -> None:
    """Runs a command's work; exits with 1, 3 or 4 when it fails."""
    try:
        asyncio.run(work)
    except ClientError as error:
        _fail(error.message, error.code, error.details, error.exit_code, as_json=as_json)
    except Failure as error:
        _fail(str(error), "FAILED", {}, 1, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone; say nothing more
        raise typer.Exit(1) from None


def _fail(
    message: str, code: str, details: dict[str, str], exit_code: int, *, as_json: bool
) -> None:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    if hint := details.get("hint"):
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201
    if as_json:
        say(json.dumps({"error": {"code": code, "message": message, "details": details}}))
    raise typer.Exit(exit_code)
