"""`seedrelay experts`: shows where experts lie, moves them, brings them back, spreads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from clients import expert_table, report_experts
from clients.cli_run import Failure, refuse, run, say
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from clients.progress import ExpertProgressBar
from seedrelay.v1 import engine_pb2

app = typer.Typer(
    no_args_is_help=True,
    help="Show and change which rank holds which expert, and how many ranks there are.",
)

Engine = Annotated[str, typer.Argument(help="Address of an engine, HOST:PORT.")]
DEADLINE = "Seconds to wait; the engine goes on after it."
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@app.command()
@with_credentials
def show(
    engine: Engine,
    *,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer to show; may be repeated. All unless named.")
    ] = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Show the experts in the slots of each rank; with --json, a file for --expert-map."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            found = await client.expert_map(layer or ())
        if json_:
            say(json.dumps(report_experts.found_map(found)))
        else:
            expert_table.show(found.map, found.membership)
            if found.HasField("last_report"):
                say(f"last change: {report_experts.done_line(found.last_report)}")

    run(work(), as_json=json_)


@app.command("set")
@with_credentials
def set_(
    engine: Engine,
    map_: Annotated[Path, typer.Option("--map", help="JSON file: layers, as `show` prints them.")],
    *,
    deadline: Annotated[float | None, typer.Option(help=DEADLINE)] = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Move experts to where a file says, while the engine serves."""
    from engine_service.core.expert_map import read_map
    from engine_service.errors import ConfigError

    try:
        layers = read_map(map_)
    except ConfigError as error:
        refuse(error)
    asked = [
        engine_pb2.LayerExperts(
            layer=layer, groups=[engine_pb2.GroupExperts(experts=held) for held in slots]
        )
        for layer, slots in sorted(layers.items())
    ]

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            done = await client.set_expert_map(asked, deadline)
        if json_:
            say(json.dumps(report_experts.expert_moves(done)))
            return
        say(f"{done.experts_moved} experts moved in {done.layers_changed} layers, "
            f"{done.bytes_moved} bytes between ranks, {done.seconds_staged:.3f} s to fetch, "
            f"{done.seconds_paused:.3f} s paused")  # fmt: skip
        expert_table.show(done.map)

    run(work(), as_json=json_)


@app.command()
@with_credentials
def recover(
    engine: Engine,
    *,
    source: Annotated[
        str, typer.Option("--from", help="Only source: an instance of the fleet, or disk.")
    ] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Start ranks anew, also where slots of others suffice."),
    ] = False,
    deadline: Annotated[float | None, typer.Option(help=DEADLINE, min=0.001)] = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Bring back what lost ranks held: from ranks that live, other instances, or disk."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            asked = client.recover_experts(replace=replace, source=source, timeout=deadline)
            _show_done(await _followed(asked), as_json=json_)

    run(work(), as_json=json_)


@app.command()
@with_credentials
def scale(
    engine: Engine,
    ep: Annotated[int, typer.Option(help="Groups of --tp ranks that there shall be.", min=1)],
    *,
    deadline: Annotated[float | None, typer.Option(help=DEADLINE, min=0.001)] = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Spread the experts over more or fewer groups of ranks, while the engine serves."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            _show_done(await _followed(client.scale_experts(ep, deadline)), as_json=json_)

    run(work(), as_json=json_)


async def _followed(
    asked: AsyncIterator[engine_pb2.RecoverExpertsResponse | engine_pb2.ScaleExpertsResponse],
) -> engine_pb2.ExpertReport:
    """Shows how far it is until it is done."""
    done = None
    with ExpertProgressBar() as bar:
        async for message in asked:
            bar.show(message.progress)
            done = message.report if message.HasField("report") else None
    if done is None:
        raise Failure("the engine ended without a report")
    return done


def _show_done(done: engine_pb2.ExpertReport, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(report_experts.expert_report(done)))
        return
    say(report_experts.done_line(done))
    for one in done.pulled:
        say(f"  {one.unit} part {one.part}: {one.bytes} bytes from {one.source}")
    expert_table.show(done.map, done.membership)
