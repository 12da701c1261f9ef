"""The `seedrelay` command: starts services, and talks to them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from clients import (
    cli_check,
    cli_compile,
    cli_experts,
    cli_model,
    cli_pause,
    cli_serve,
    cli_serve_relay,
    cli_show,
    cli_status,
    cli_update,
    report,
)
from clients.cli_run import Failure, run, say
from clients.cli_security import with_credentials
from clients.credentials import Credentials
from clients.engine import EngineClient
from clients.progress import PullProgressBar
from clients.relay import RelayClient
from relay_service.core.match import Target
from relay_service.core.rate import parse_rate
from relay_service.rpc.convert import format_from_proto, placement_from_proto
from seedrelay.v1 import engine_pb2, weights_pb2

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(value: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if value:
        say(f"seedrelay {version('seedrelay')}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version_: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Serve LLMs, bring up replicas from one that serves, and update their weights in place."""
    del version_  # its callback has shown it


SERVICES, REQUESTS, WEIGHTS = "Services", "Requests", "Weights"
"""Groups of commands, as `--help` shows them."""
MODELS = "Models"

app.command("engine", rich_help_panel=SERVICES)(cli_serve.engine)
app.command("relay", rich_help_panel=SERVICES)(cli_serve_relay.relay)
app.command("status", rich_help_panel=SERVICES)(cli_status.status)
for name, command in cli_pause.COMMANDS.items():
    app.command(name, rich_help_panel=REQUESTS)(command)
app.command("update", rich_help_panel=WEIGHTS)(cli_update.update)
app.command("versions", rich_help_panel=WEIGHTS)(cli_update.versions)
app.command("check", rich_help_panel=WEIGHTS)(cli_check.check)
cli_model.app.command("compile")(cli_compile.compile_model)
app.add_typer(cli_experts.app, name="experts", rich_help_panel=WEIGHTS)
app.add_typer(cli_model.app, name="model", rich_help_panel=MODELS)

EngineAddress = Annotated[str, typer.Option("--engine", help="Address of an engine, HOST:PORT.")]
RelayAddress = Annotated[str, typer.Option("--relay", help="Address of a relay, HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@app.command(rich_help_panel=REQUESTS)
@with_credentials
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue, or what to ask with --chat.")],
    engine: EngineAddress,
    *,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens to choose from.", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="Probability mass to choose from.", min=0, max=1)
    ] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least relative probability.", min=0, max=1)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", min=0)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    n: Annotated[int, typer.Option(help="Number of answers (with --json).", min=1)] = 1,
    json_schema: Annotated[
        str, typer.Option(help="JSON Schema that the answer fits, as text.")
    ] = "",
    logprobs: Annotated[
        int | None, typer.Option(help="Likeliest tokens to report (with --json).", min=0)
    ] = None,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Go on at the model's end tokens.")] = False,
    refuse_degraded: Annotated[
        bool, typer.Option("--refuse-degraded", help="Fail rather than go without lost experts.")
    ] = False,
    deadline: Annotated[float | None, typer.Option(help="Seconds until the call fails.")] = None,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Stream an answer."""
    sampling = engine_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed, ignore_eos=ignore_eos, stop=stop, n=n, logprobs=logprobs,
    )  # fmt: skip
    if json_schema:
        sampling.structure.json_schema = json_schema
    if n > 1 and not json_:
        raise typer.BadParameter("several answers are shown with --json only", param_hint="--n")
    request = engine_pb2.GenerateRequest(sampling=sampling, refuse_degraded=refuse_degraded)
    if chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt

    async def stream() -> None:
        degraded = False
        async with EngineClient(engine, credentials) as client:
            async for message in client.generate(request, deadline):
                degraded |= message.degraded
                if json_:
                    say(json.dumps(report.chunk(message)))
                else:
                    sys.stdout.write(message.text)
                    sys.stdout.flush()
        if not json_:
            say("")
            if degraded:
                cli_show.degraded()

    run(stream(), as_json=json_)


@app.command(rich_help_panel=WEIGHTS)
@with_credentials
def pull(
    engine: EngineAddress,
    relay: RelayAddress,
    *,
    source: Annotated[str, typer.Option("--from", help="Only instance to pull from.")] = "",
    weights_digest: Annotated[str, typer.Option(help="Only weights of this digest.")] = "",
    rate_limit: Annotated[str, typer.Option(help="Such as 64MiB/s; 0 for no limit.")] = "",
    transport: Annotated[str, typer.Option(help="auto, shm, tcp or grpc.")] = "auto",
    deadline: Annotated[float, typer.Option(help="Seconds until the pull fails.", min=0.001)] = 300,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Fill a dummy that was started without --relay."""
    options = weights_pb2.PullOptions(
        source_instance=source,
        transport="" if transport == "auto" else transport,
        rate_limit_bytes_per_second=_rate(rate_limit),
        weights_digest=weights_digest,
    )
    options.timeout.FromNanoseconds(int(deadline * 1e9))

    async def fill() -> None:
        done = None
        async with EngineClient(engine, credentials) as client:
            with PullProgressBar() as bar:
                async for message in client.pull(relay, options):
                    bar.show(message.progress)
                    done = message.report if message.HasField("report") else None
        if done is None:
            raise Failure("the engine ended the pull without a report")
        cli_show.pull(done, as_json=json_)

    run(fill(), as_json=json_)


@app.command(rich_help_panel=WEIGHTS)
@with_credentials
def sources(
    relay: RelayAddress,
    *,
    target: Annotated[str, typer.Option("--for", help="Address of the engine to fill.")] = "",
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """List who could fill a target, and why the others could not."""

    async def show() -> None:
        async with RelayClient(relay, credentials) as client:
            matches = await client.sources(await _target(target, credentials))
        cli_show.sources(matches, as_json=json_)

    run(show(), as_json=json_)


@app.command(rich_help_panel=WEIGHTS)
@with_credentials
def forget(
    instance: Annotated[str, typer.Argument(help="Name of an instance that has ended.")],
    relay: RelayAddress,
    *,
    json_: Json = False,
    credentials: Credentials,
) -> None:
    """Give back the memory that a relay keeps for an engine's next start (--keep-arena)."""

    async def end() -> None:
        async with RelayClient(relay, credentials) as client:
            await client.forget_arena(instance)
        cli_show.forgotten(instance, as_json=json_)

    run(end(), as_json=json_)


async def _target(address: str, credentials: Credentials) -> Target:
    if not address:
        return Target()
    async with EngineClient(address, credentials) as client:
        status = await client.status()
    if not status.HasField("format"):
        raise Failure(f"{address} has not allocated its arena yet")
    return Target(
        status.instance, format_from_proto(status.format), placement_from_proto(status.placement)
    )


def _rate(text: str) -> int:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
