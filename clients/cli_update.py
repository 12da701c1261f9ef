"""`seedrelay update` and `seedrelay versions`: new weights for an engine that serves."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from clients import report_update as report
from clients.cli_pause import FINISH_WITHIN, MODES, ON_DEADLINE, ClearCache, Mode
from clients.cli_run import Failure, run, say
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from clients.progress import UpdateProgressBar
from clients.safetensors_files import read_folder
from relay_service.core.rate import parse_rate
from seedrelay.v1 import engine_pb2

Engine = Annotated[str, typer.Option("--engine", help="Address of an engine, HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


class Staging(StrEnum):
    """Where weights wait for their commit."""

    host = "host"
    layerwise = "layerwise"


@with_credentials
def update(
    engine: Engine,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="disk:DIR on the engine's host, below its --model-root; relay:INSTANCE, another "
            "engine; or push:DIR, from here.",
        ),
    ],
    version: Annotated[str, typer.Option(help="What to call the new weights.")],
    *,
    mode: Annotated[Mode, typer.Option(help=MODES)] = Mode.RETRACT,
    partial: Annotated[
        bool, typer.Option("--partial", help="Some tensors come, the others stay.")
    ] = False,
    staging: Annotated[
        Staging,
        typer.Option(
            help="host: beside what serves; takes memory for what changes. layerwise: in place; "
            "takes that of a layer, pauses throughout, and a failure ends the engine."
        ),
    ] = Staging.host,
    base_digest: Annotated[str, typer.Option(help="Only if weights of this digest serve.")] = "",
    rate_limit: Annotated[str, typer.Option(help="Such as 64MiB/s, for disk and relay.")] = "",
    weights_digest: Annotated[
        str,
        typer.Option(help="Only weights of this digest; relay:MODEL takes them from any holder."),
    ] = "",
    finish_within: Annotated[float | None, typer.Option(help=FINISH_WITHIN, min=0)] = None,
    on_deadline: Annotated[Mode | None, typer.Option(help=ON_DEADLINE)] = None,
    clear_cache: ClearCache = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait while somebody else updates.", min=0)
    ] = 0,
    lease_wait: Annotated[
        float | None,
        typer.Option(
            help="Seconds to wait for readers of what it replaces. [default: the engine's]",
            min=0,
        ),
    ] = None,
    operator: Annotated[str, typer.Option(help="Who updates, for the history.")] = "",
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Give new weights to an engine that serves, in place. Until it is done the old ones serve."""
    asked = engine_pb2.WeightUpdate(
        weight_version=version, base_digest=base_digest,
        pause_mode=f"PAUSE_MODE_{mode.upper()}",
        staging=f"STAGING_{staging.upper()}",
        completeness="COMPLETENESS_PARTIAL" if partial else "COMPLETENESS_FULL",
        clear_cache=clear_cache,
    )  # fmt: skip
    if finish_within is not None:
        asked.pause_deadline.FromNanoseconds(int(finish_within * 1e9))
    if lease_wait is not None:
        asked.lease_wait.FromNanoseconds(int(lease_wait * 1e9))
    if on_deadline is not None:
        asked.MergeFrom(
            engine_pb2.WeightUpdate(on_pause_deadline=f"PAUSE_MODE_{on_deadline.upper()}")
        )
    folder = _name_source(asked.source, source, rate_limit)
    if weights_digest:
        if not asked.source.HasField("relay"):
            raise typer.BadParameter("goes with relay:INSTANCE", param_hint="--weights-digest")
        asked.source.relay.options.weights_digest = weights_digest

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            if folder is None:
                done = await _whole(client, asked, wait, operator)
            else:
                done = await _pushed(client, asked, folder, wait, operator)
        _show(done, as_json=json_)

    run(work(), as_json=json_)


@with_credentials
def versions(
    engine: Engine,
    *,
    set_: Annotated[str, typer.Option("--set", help="What to call the weights that serve.")] = "",
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """List the weights that an engine has had, and updates that failed; or rename what serves."""

    async def work() -> None:
        async with EngineClient(engine, credentials) as client:
            former = await client.set_version(set_) if set_ else ""
            records = [report.version_record(one) for one in await client.versions()]
        if json_:
            former_of = {"former_weight_version": former} if set_ else {}
            say(json.dumps({"versions": records, **former_of}))
            return
        for one in records:
            reason = f"  {one['reason']}" if one["reason"] else ""
            digest, epoch = one["weights_digest"] or "-", one["epoch"] or "-"
            say(f"{one['time'][:19]}Z  {one['result']:<8}{one['weight_version']}  "
                f"epoch {epoch}  {digest}  {one['source']}{reason}")  # fmt: skip

    run(work(), as_json=json_)


def _name_source(message: engine_pb2.WeightSource, text: str, rate_limit: str) -> Path | None:
    """Says where weights come from; returns the folder that is pushed, if one is."""
    kind, _, name = text.partition(":")
    try:
        rate = parse_rate(rate_limit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate-limit") from error
    if not name or kind not in ("disk", "relay", "push"):
        raise typer.BadParameter("write disk:DIR, relay:INSTANCE or push:DIR", param_hint="--from")
    if kind == "disk":
        message.disk.folder, message.disk.rate_limit_bytes_per_second = name, rate
    elif kind == "relay":
        message.relay.options.source_instance = name
        message.relay.options.rate_limit_bytes_per_second = rate
    else:
        message.push.SetInParent()
    return Path(name) if kind == "push" else None


async def _whole(
    client: EngineClient, asked: engine_pb2.WeightUpdate, wait: float, operator: str
) -> engine_pb2.UpdateReport:
    request = engine_pb2.UpdateWeightsRequest(update=asked, operator=operator)
    request.wait.FromNanoseconds(int(wait * 1e9))
    done = None
    with UpdateProgressBar() as bar:
        async for message in client.update(request):
            bar.show(message.progress)
            done = message.report if message.HasField("report") else None
    if done is None:
        raise Failure("the engine ended the update without a report")
    return done


async def _pushed(
    client: EngineClient, asked: engine_pb2.WeightUpdate, folder: Path, wait: float, operator: str
) -> engine_pb2.UpdateReport:
    try:
        tensors = read_folder(folder)
    except (OSError, ValueError) as error:
        raise Failure(f"{folder} cannot be read: {error}") from error
    request = engine_pb2.BeginWeightUpdateRequest(update=asked, operator=operator)
    request.wait.FromNanoseconds(int(wait * 1e9))
    begun = await client.begin_update(request)
    await client.push(begun.session, tensors)
    return await client.commit_update(begun.session)


def _show(done: engine_pb2.UpdateReport, *, as_json: bool) -> None:
    shown = report.update(done)
    if as_json:
        say(json.dumps(shown))
        return
    say(f"{shown['state']}: weights {shown['weight_version']} {shown['weights_digest']}, "
        f"epoch {shown['epoch']}")  # fmt: skip
    outcomes = ", ".join(f"{count} {name}" for name, count in shown["requests"].items() if count)
    say(f"  {shown['bytes_changed']} bytes changed, {shown['seconds_staged']:.2f} s to stage, "
        f"paused {shown['seconds_paused']:.3f} s ({outcomes or 'no requests'})")  # fmt: skip
    if shown["readers"]:
        say(f"  waited {shown['seconds_for_readers']:.2f} s for {shown['readers']} readers of the "
            f"former weights, ended {shown['leases_ended']} leases")  # fmt: skip
    for note in shown["notes"]:
        say(f"  {note}")
