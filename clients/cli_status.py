"""`seedrelay status`: how an engine is, or the fleet of a relay."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from clients import cli_debug, cli_show, fleet_table, report_relay
from clients.cli_run import Failure, run
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from clients.errors import CallFailed
from clients.relay import RelayClient
from seedrelay.v1 import engine_pb2


@with_credentials
def status(
    address: Annotated[str, typer.Argument(help="Address of an engine or a relay.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on: show it again whenever there is news.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="When something is wrong with an engine: add who pauses, updates and waits, the "
            "last check, the versions, and memory.",
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
    credentials: Credentials,
) -> None:
    """Show the state of an engine, or the fleet of a relay."""

    async def show() -> None:
        async with EngineClient(address, credentials) as client:
            try:
                current = await client.status(debug=debug)
            except CallFailed as error:
                if error.code != "UNIMPLEMENTED":
                    raise
            else:
                await _show_engine(client, current, watch=watch, as_json=json_)
                return
        if debug:
            raise Failure(f"--debug is for engines, {address} is a relay")
        await _show_relay(address, credentials, watch=watch, as_json=json_)

    run(show(), as_json=json_)


async def _show_engine(
    client: EngineClient, current: engine_pb2.EngineStatus, *, watch: bool, as_json: bool
) -> None:
    """Shows a status, and later ones that say as much."""
    debug = current.HasField("debug")
    _print(current, as_json=as_json)
    if watch:
        first = True
        async for news in client.watch():
            if not first:
                _print(await client.status(debug=True) if debug else news, as_json=as_json)
            first = False


def _print(current: engine_pb2.EngineStatus, *, as_json: bool) -> None:
    cli_show.engine(current, as_json=as_json)
    if current.HasField("debug") and not as_json:
        cli_debug.debug(current.debug)


async def _show_relay(
    address: str, credentials: Credentials, *, watch: bool, as_json: bool
) -> None:
    async with RelayClient(address, credentials) as client:
        if not watch:
            cli_show.relay(report_relay.status(await client.status()), as_json=as_json)
            return
        console = Console()
        live = Live(console=console, auto_refresh=False)
        with live if console.is_terminal and not as_json else contextlib.nullcontext() as table:
            last = None
            async for _ in client.watch_transfers():  # says when; who holds what is news, too
                shown = report_relay.status(await client.status())
                if table:
                    table.update(fleet_table.tables(shown), refresh=True)
                elif shown != last:
                    cli_show.relay(shown, as_json=as_json)
                last = shown
