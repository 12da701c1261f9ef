"""`seedrelay check`: compares the weights that an engine holds in memory with something."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from clients import report_check
from clients.cli_run import Failure, run, say, say_error
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from seedrelay.v1 import engine_pb2


@with_credentials
def check(
    engine: Annotated[str, typer.Option(help="Address of an engine, HOST:PORT.")],
    *,
    against: Annotated[str, typer.Option(help="Name of an instance to compare with.")] = "",
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Remember what is there, for --compare.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with the snapshot.")] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the digest of every tensor.")
    ] = False,
    deadline: Annotated[float | None, typer.Option(help="Seconds until the call fails.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
    credentials: Credentials,
) -> None:
    """Compare weights in memory with what came, was, or another has; exit with 1 if they differ."""
    if bool(against) + snapshot + compare > 1:
        raise typer.BadParameter("one of --against, --snapshot and --compare")
    mode = engine_pb2.CHECK_MODE_DIGEST
    if against:
        mode = engine_pb2.CHECK_MODE_DIFF
    elif snapshot or compare:
        mode = engine_pb2.CHECK_MODE_SNAPSHOT if snapshot else engine_pb2.CHECK_MODE_COMPARE
    request = engine_pb2.CheckWeightsRequest(mode=mode, against=against, list_tensors=tensors)

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            found = await client.check(request, deadline)
        if json_:
            say(json.dumps(report_check.check(found)))
        else:
            _table(found)
        if not found.equal:
            say_error(Failure(f"the weights differ: {found.difference_count} found"))
            raise typer.Exit(1)

    run(work(), as_json=json_)


def _table(found: engine_pb2.CheckWeightsResponse) -> None:
    for rank in found.ranks:
        say(f"rank {rank.rank}: {rank.digest}, {rank.tensor_count} tensors, "
            f"{rank.bytes_checked} bytes")  # fmt: skip
        for held in rank.tensors:
            alias = f", shares {held.alias}" if held.alias else ""
            say(f"  {held.digest} {held.name} {held.kind} {held.dtype} {list(held.shape)}{alias}")
    for one in found.differences:
        block = "" if one.block < 0 else f" block {one.block}"
        say(f"rank {one.rank}{block} {one.tensor or '-'}: {one.what}"
            f"{f', expected {one.expected}' * bool(one.expected)}"
            f"{f', found {one.found}' * bool(one.found)}")  # fmt: skip
    if (more := found.difference_count - len(found.differences)) > 0:
        say(f"and {more} more")
    say(f"{report_check.verdict(found)}: weights "
        f"{found.weight_version}, epoch {found.epoch}, checked in {found.seconds:.2f} s, "
        f"{found.seconds_paused:.2f} s of it without steps")  # fmt: skip
