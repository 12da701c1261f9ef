"""What the commands that run a service share: options, and how a service is run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

from clients.cli_run import say_error


class LogFormats(StrEnum):
    """What lines on stderr look like."""

    text = "text"
    json = "json"


T = TypeVar("T")
Listen = Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 picks a free one.")]
LogFormat = Annotated[LogFormats, typer.Option(help="Lines on stderr for people, or JSON.")]
Metrics = Annotated[
    str, typer.Option("--metrics-listen", help="HOST:PORT for Prometheus; none unless named.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond loopback also without TLS and tokens.")
]


def execute(*arguments: str) -> None:
    """Starts `seedrelay` anew in this process, with other arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606


def serve(service: Coroutine[Any, Any, T], failures: type[Exception]) -> T:
    """Runs a service to its end; one of the failures becomes a line and exit code 1."""
    try:
        return asyncio.run(service)
    except failures as error:
        say_error(error)
        raise typer.Exit(1) from None
