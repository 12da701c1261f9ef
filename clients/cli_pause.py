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
ClearCache = Annotated[
    bool | None, typer.Option(help="Empty the prefix cache. Unset means yes, except in mode keep.")
]
Deadline = Annotated[float | None, typer.Option(help="Seconds until the call fails.", min=0.001)]


MODES = (
    "What becomes of running requests: abort ends them with what they have, wait lets them "
    "finish, keep freezes them, retract sends them back to the queue."
)
FINISH_WITHIN = "With mode wait: seconds for running requests to finish; unset for no limit."
ON_DEADLINE = (
    "What becomes of those that still run then: abort, keep or retract. Unset to give up, with "
    "everything as before."
)


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
    mode: Annotated[Mode, typer.Option(help=MODES)] = Mode.KEEP,
    clear_cache: ClearCache = None,
    finish_within: Annotated[float | None, typer.Option(help=FINISH_WITHIN, min=0)] = None,
    on_deadline: Annotated[Mode | None, typer.Option(help=ON_DEADLINE)] = None,
    drain_delay: Annotated[
        float,
        typer.Option(
            help="Seconds in which health says NOT_SERVING already, so that balancers turn away, "
            "and requests still run.",
            min=0,
        ),
    ] = 0.0,
    operator: Annotated[str, typer.Option(help="Who pauses, for others to see.")] = "",
    deadline: Deadline = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Hold requests back until `continue`: new ones wait at the gate."""
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
        bool,
        typer.Option(
            "--keep-reserved-memory",
            help="Leave devices the memory that they do not use; else it goes back once after an "
            "update.",
        ),
    ] = False,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """End a pause, whoever began it: what waits and what is frozen goes on."""

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
    """Empty the prefix cache. It frees memory; new weights never need it."""

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
    update: Annotated[
        str,
        typer.Option(help="Session of an update to end instead; `status --debug` shows its name."),
    ] = "",
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """End requests with what they have, named ones or all; or an update that is not applied yet."""
    if bool(requests) + all_ + bool(update) != 1:
        raise typer.BadParameter("name requests, or --all, or --update", param_hint="REQUESTS")

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            if update:
                aborted = int(await client.abort_update(update))
            else:
                aborted = await (client.abort_all() if all_ else client.abort(requests or ()))
        what = "updates" if update else "answers"
        say(json.dumps({"aborted": aborted}) if json_ else f"{aborted} {what} ended")

    run(work(), as_json=json_)


COMMANDS = {"pause": pause, "continue": continue_, "flush": flush, "abort": abort}


def _to_proto(mode: Mode) -> engine_pb2.PauseMode:
    value: engine_pb2.PauseMode = getattr(engine_pb2, f"PAUSE_MODE_{mode.name}")
    return value


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no requests"
