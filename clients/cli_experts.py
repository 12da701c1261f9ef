"""`seedrelay experts`: shows where the experts of an engine lie, and moves them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from clients import report
from clients.cli_run import refuse, run, say
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from seedrelay.v1 import engine_pb2

app = typer.Typer(no_args_is_help=True, help="Show and change which rank holds which expert.")

Engine = Annotated[str, typer.Argument(help="Address of an engine, HOST:PORT.")]
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
            say(json.dumps({**report.expert_map(found.map), "epoch": found.epoch}))
        else:
            _table(found.map)

    run(work(), as_json=json_)


@app.command("set")
@with_credentials
def set_(
    engine: Engine,
    map_: Annotated[Path, typer.Option("--map", help="JSON file: layers, as `show` prints them.")],
    *,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds to wait; the engine goes on after it.")
    ] = None,
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
            say(json.dumps(report.expert_moves(done)))
            return
        say(f"{done.experts_moved} experts moved in {done.layers_changed} layers, "
            f"{done.bytes_moved} bytes between ranks, {done.seconds_staged:.3f} s to fetch, "
            f"{done.seconds_paused:.3f} s paused")  # fmt: skip
        _table(done.map)

    run(work(), as_json=json_)


def _table(shown: engine_pb2.ExpertMap) -> None:
    """Prints a line per layer and group of ranks."""
    parts = shown.placement.tensor_parallel_size
    say(f"{'layer':>5}  {'ranks':>7}  experts (* also elsewhere)")
    for layer in shown.layers:
        replicas = Counter(expert for group in layer.groups for expert in group.experts)
        for number, group in enumerate(layer.groups):
            first, last = number * parts, (number + 1) * parts - 1
            ranks = str(first) if first == last else f"{first}-{last}"
            held = " ".join(f"{e}{'*' if replicas[e] > 1 else ''}" for e in group.experts)
            say(f"{layer.layer:>5}  {ranks:>7}  {held}")
