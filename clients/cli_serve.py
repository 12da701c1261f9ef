"""`seedrelay engine` and `seedrelay relay`: run a service in the foreground."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from clients.cli_run import refuse, say_error
from clients.cli_security import with_security
from relay_service.core import logs
from relay_service.core.security import Security


class LogFormats(StrEnum):
    """What lines on stderr look like."""

    text = "text"
    json = "json"


T = TypeVar("T")
_TUNABLES = (
    # Copies of a block go past the cache, as that of a whole arena would anyway.
    "glibc.cpu.x86_non_temporal_threshold=0x80000:"
    # Messages of a stream reuse memory instead of faulting in new pages for each.
    "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
)

Listen = Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 picks a free one.")]
LogFormat = Annotated[LogFormats, typer.Option(help="Lines on stderr for people, or JSON.")]
Metrics = Annotated[
    str, typer.Option("--metrics-listen", help="HOST:PORT for Prometheus; none unless named.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond loopback also without TLS and tokens.")
]


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
            grace_seconds=grace, keep_arena_seconds=keep_arena,
            security=replace(security, insecure=insecure), metrics_listen=metrics_listen,
        )  # fmt: skip
    except (ConfigError, ValueError) as error:
        refuse(error)
    logs.set_up(log_format, config.name)
    if address := _serve(serve(config), EngineError):
        # A process image of its own, as fresh as after a start by hand; the pid stays.
        _execute(*sys.orig_argv[1:], "--listen", address)


@with_security
def relay(
    listen: Listen,
    *,
    data_listen: Annotated[
        str,
        typer.Option(help="HOST:PORT of the data port; by default a free one where it listens."),
    ] = "",
    data_connections: Annotated[
        int,
        typer.Option(help="Connections, 1 to 4, to read from a data port over; 0 to choose."),
    ] = 0,
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="Relay that is the directory, HOST:PORT; several by commas, or repeated."
        ),
    ] = None,
    advertise: Annotated[str, typer.Option(help="Address that other relays shall use.")] = "",
    egress_limit: Annotated[
        str, typer.Option(help="Such as 250MiB/s, for all readers; 0 for no limit.")
    ] = "",
    egress_limit_per_instance: Annotated[
        str, typer.Option(help="Such as 100MiB/s, for the readers of each instance; 0 for none.")
    ] = "",
    ingress_limit: Annotated[
        str, typer.Option(help="Such as 250MiB/s, for all that is filled here; 0 for no limit.")
    ] = "",
    nice: Annotated[
        int,
        typer.Option(help="How far engines come first where CPUs are short.", min=0, max=19),
    ] = 5,
    grace: Annotated[float, typer.Option(help="Seconds for running calls at SIGTERM.", min=0)] = 10,
    metrics_listen: Metrics = "",
    log_format: LogFormat = LogFormats.text,
    insecure: Insecure = False,
    security: Security,
) -> None:
    """Run a relay service: one per host."""
    _tune_libc()
    _yield_to_engines(nice)
    from relay_service.app import serve
    from relay_service.config import DATA_CONNECTIONS, RelayConfig
    from relay_service.core.rate import parse_rate
    from relay_service.errors import ConfigError, RelayError

    try:
        config = RelayConfig(
            listen=listen, data_listen=data_listen,
            data_connections=data_connections or DATA_CONNECTIONS,
            join=",".join(join or ()), advertise=advertise, grace_seconds=grace,
            egress_limit_bytes_per_second=parse_rate(egress_limit),
            egress_limit_per_instance_bytes_per_second=parse_rate(egress_limit_per_instance),
            ingress_limit_bytes_per_second=parse_rate(ingress_limit),
            security=replace(security, insecure=insecure), metrics_listen=metrics_listen,
        )  # fmt: skip
    except (ConfigError, ValueError) as error:
        refuse(error)
    logs.set_up(log_format)
    _serve(serve(config), RelayError)


def _tune_libc() -> None:
    """Starts this process anew with the C library's settings for moving blocks.

    glibc reads them at exec only; other C libraries ignore them. Whoever sets
    GLIBC_TUNABLES keeps the word.
    """
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = _TUNABLES
        _execute(*sys.orig_argv[1:])


def _yield_to_engines(nice: int) -> None:
    """Lets whoever generates go first; threads that begin later do the same.

    Who started this process with a still lower priority keeps the word.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(before, nice))


def _execute(*arguments: str) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606


def _serve(service: Coroutine[Any, Any, T], failures: type[Exception]) -> T:
    try:
        return asyncio.run(service)
    except failures as error:
        say_error(error)
        raise typer.Exit(1) from None
