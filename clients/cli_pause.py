"""`seedrelay pause`, `continue`, `flush` and `abort`: control of what an engine serves."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from clients import report_pause
from clients.cli_run import run, say
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from seedrelay.v1 import engine_pb2

EngineAddress = Annotated[str, typer.Option("--engine", help="Address of an engine, HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Deadline = Annotated[float | None, typer.Option(help="Seconds until the call fails.", min=0.001)]


class Mode(StrEnum):
    """What becomes of running requests."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
    RETRACT = "retract"


@with_credentials
def pause(
    engine: EngineAddress,
    *,
    mode: Annotated[Mode, typer.Option(help="What becomes of running requests.")] = Mode.KEEP,
    clear_cache: Annotated[
        bool | None,
        typer.Option(help="Empty the prefix cache; unset means yes, except to keep requests."),
    ] = None,
    finish_within: Annotated[
        float | None, typer.Option(help="Seconds for running requests to finish.", min=0)
    ] = None,
    on_deadline: Annotated[
        Mode | None, typer.Option(help="What becomes of those that still run then.")
    ] = None,
    drain_delay: Annotated[
        float, typer.Option(help="Seconds in which health says so before the gate closes.", min=0)
    ] = 0.0,
    operator: Annotated[str, typer.Option(help="Who pauses, for others to see.")] = "",
    deadline: Deadline = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Let no new request run, and let go of what runs, until `continue`."""
    request = engine_pb2.PauseGenerationRequest(
        mode=_to_proto(mode), clear_cache=clear_cache, operator=operator,
        on_deadline=_to_proto(on_deadline) if on_deadline else None,
    )  # fmt: skip
    request.drain_delay.FromNanoseconds(int(drain_delay * 1e9))
    if finish_within is not None:
        request.deadline.FromNanoseconds(int(finish_within * 1e9))

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            shown = report_pause.pause(await client.pause(request, deadline))
        if json_:
            say(json.dumps(shown))
        else:
            say(f"{shown['state']} after {shown['seconds']:.3f} s: {_counts(shown['requests'])}; "
                f"{shown['flushed_blocks']} KV blocks freed")  # fmt: skip

    run(work(), as_json=json_)


@with_credentials
def continue_(
    engine: EngineAddress,
    *,
    keep_reserved_memory: Annotated[
        bool, typer.Option(help="Do not give back what a device's allocator does not use.")
    ] = False,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Let requests run again."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            done = await client.resume(keep_reserved_memory=keep_reserved_memory)
            shown = report_pause.resume(done)
        if json_:
            say(json.dumps(shown))
        elif not shown["was_paused"]:
            say("was not paused")
        else:
            say(f"goes on: {_counts(shown['requests'])}")

    run(work(), as_json=json_)


@with_credentials
def flush(engine: EngineAddress, *, json_: Json = False, credentials: Credentials) -> None:
    """Free the KV blocks that only the prefix cache holds."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            done = await client.flush()
        if json_:
            shown = {"flushed_blocks": done.flushed_blocks, "blocks_in_use": done.blocks_in_use}
            say(json.dumps(shown))
        else:
            say(f"{done.flushed_blocks} KV blocks freed, {done.blocks_in_use} in use")

    run(work(), as_json=json_)


@with_credentials
def abort(
    engine: EngineAddress,
    requests: Annotated[list[str] | None, typer.Argument(help="Names of requests.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Every request.")] = False,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """End requests with what they have: those that are named, or all."""
    if bool(requests) == all_:
        raise typer.BadParameter("name requests, or give --all", param_hint="REQUESTS")

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            aborted = await (client.abort_all() if all_ else client.abort(requests or ()))
        say(json.dumps({"aborted": aborted}) if json_ else f"{aborted} answers ended")

    run(work(), as_json=json_)


COMMANDS = {"pause": pause, "continue": continue_, "flush": flush, "abort": abort}


def _to_proto(mode: Mode) -> engine_pb2.PauseMode:
    value: engine_pb2.PauseMode = getattr(engine_pb2, f"PAUSE_MODE_{mode.name}")
    return value


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no requests"
