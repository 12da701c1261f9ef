"""`seedrelay engine`: runs an engine service in the foreground."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from clients import serving
from clients.cli_run import refuse
from clients.cli_security import with_security
from clients.serving import Insecure, Listen, LogFormat, LogFormats, Metrics
from relay_service.core import logs
from relay_service.core.security import Security


@with_security
def engine(
    model: Annotated[str, typer.Option(help="Model folder; a dummy's needs no weights.")],
    listen: Listen,
    *,
    load_format: Annotated[str, typer.Option(help="disk or dummy.")] = "disk",
    relay: Annotated[str, typer.Option(help="Relay of this host, HOST:PORT.")] = "",
    source: Annotated[
        str, typer.Option("--from", help="Instance or model to be filled from.")
    ] = "",
    weight_version: Annotated[str, typer.Option(help="Name of the weights on disk.")] = "v0",
    instance_name: Annotated[str, typer.Option(help="Name in the fleet.")] = "",
    advertise: Annotated[str, typer.Option(help="Address that others shall use.")] = "",
    tp: Annotated[int, typer.Option(help="Ranks that split every matrix.", min=1)] = 1,
    collective_timeout: Annotated[
        float, typer.Option(help="Seconds in which all ranks must come to a collective.")
    ] = 30,
    lease_wait: Annotated[
        float,
        typer.Option(help="Seconds that an update waits for instances that read what it replaces."),
    ] = 5,
    ep: Annotated[
        int, typer.Option(help="Groups of --tp ranks over which experts are spread.", min=1)
    ] = 1,
    redundant_experts: Annotated[
        int, typer.Option(help="Replicas in each layer, beyond one of each expert.", min=0)
    ] = 0,
    expert_map: Annotated[
        Path | None,
        typer.Option(help="JSON file: experts by layer, group and slot; in a row unless named."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    weight_format: Annotated[
        str, typer.Option(help="auto, plain, packed, int8, fp8, fp8-ue8m0 or int4.")
    ] = "auto",
    compiled: Annotated[
        str, typer.Option(help="auto, require or off: layer of `seedrelay model compile`.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Compute threads per rank; 0 to choose.", min=0)] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds in which a dummy must be filled.")] = 300,
    fallback: Annotated[str, typer.Option(help="disk or none, when no source is left.")] = "none",
    transport: Annotated[str, typer.Option(help="auto, shm, tcp or grpc.")] = "auto",
    rate_limit: Annotated[
        str, typer.Option(help="Such as 64MiB/s, for being filled; 0 for no limit.")
    ] = "",
    model_root: Annotated[
        str, typer.Option(help="Folder below which updates may read; that of --model unless named.")
    ] = "",
    model_key: Annotated[
        str, typer.Option(help="Ed25519 public key, PEM, that must have signed what updates read.")
    ] = "",
    read_rate_limit: Annotated[
        str, typer.Option(help="Such as 64MiB/s, for reading weights, per rank; 0 for no limit.")
    ] = "",
    max_context_tokens: Annotated[int, typer.Option(help="Most tokens of one request.")] = 8192,
    kv_cache_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 16384,
    max_running: Annotated[int, typer.Option(help="Most requests that run at once.")] = 32,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait.")] = 256,
    prefill_chunk_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens that one step computes.")
    ] = 512,
    on_rank_loss: Annotated[
        str, typer.Option(help="fail, degrade or recover, when --ep loses ranks and others live.")
    ] = "fail",
    lost_experts: Annotated[
        str, typer.Option(help="hold or route: requests while no rank holds some experts.")
    ] = "hold",
    recovery_deadline: Annotated[
        float, typer.Option(help="Seconds in which lost experts must be back.")
    ] = 120,
    spare_ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that stand ready in the place of lost ranks.",
            min=0,
            show_default="those of a group with --on-rank-loss recover, else none",
        ),
    ] = None,
    on_rank_death: Annotated[
        str, typer.Option(help="exit or restart, when a rank dies that has served.")
    ] = "exit",
    keep_arena: Annotated[
        float,
        typer.Option(help="Seconds for which the relay keeps the weights for the next start."),
    ] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds for running requests at SIGTERM.", min=0)
    ] = 30,
    metrics_listen: Metrics = "",
    log_format: LogFormat = LogFormats.text,
    insecure: Insecure = False,
    security: Security,
) -> None:
    """Run an engine service: one model behind gRPC."""
    from engine_service.config import EngineConfig
    from engine_service.core.expert_map import read_map
    from engine_service.errors import ConfigError, EngineError
    from engine_service.start import serve
    from relay_service.core.rate import parse_rate

    try:
        config = EngineConfig(
            model=model, listen=listen, load_format=load_format, relay=relay, source=source,
            weight_version=weight_version, instance_name=instance_name, advertise=advertise,
            tensor_parallel_size=tp, collective_timeout_seconds=collective_timeout,
            lease_wait_seconds=lease_wait,
            expert_parallel_size=ep, redundant_experts=redundant_experts,
            expert_map=read_map(expert_map) if expert_map else {}, dtype=dtype,
            weight_format=weight_format, compiled=compiled, device=device,
            threads=threads, deadline_seconds=deadline, fallback=fallback, transport=transport,
            rate_limit_bytes_per_second=parse_rate(rate_limit),
            model_root=model_root, model_key=model_key,
            read_limit_bytes_per_second=parse_rate(read_rate_limit),
            max_context_tokens=max_context_tokens, kv_cache_tokens=kv_cache_tokens,
            max_running=max_running, max_waiting=max_waiting,
            prefill_chunk_tokens=prefill_chunk_tokens, on_rank_death=on_rank_death,
            on_rank_loss=on_rank_loss, lost_experts=lost_experts,
            recovery_deadline_seconds=recovery_deadline, spare_ranks=spare_ranks,
            grace_seconds=grace, keep_arena_seconds=keep_arena,
            security=replace(security, insecure=insecure), metrics_listen=metrics_listen,
        )  # fmt: skip
    except (ConfigError, ValueError) as error:
        refuse(error)
    logs.set_up(log_format, config.name)
    if address := serving.serve(serve(config), EngineError):
        # A process image of its own, as fresh as after a start by hand; the pid stays.
        serving.execute(*sys.orig_argv[1:], "--listen", address)
