"""`seedrelay relay`: runs a relay service in the foreground."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Annotated

import typer

from clients import serving
from clients.cli_run import refuse
from clients.cli_security import with_security
from clients.serving import Insecure, Listen, LogFormat, LogFormats, Metrics
from relay_service.core import logs
from relay_service.core.security import Security

_TUNABLES = (
    # Copies of a block go past the cache, as that of a whole arena would anyway.
    "glibc.cpu.x86_non_temporal_threshold=0x80000:"
    # Messages of a stream reuse memory instead of faulting in new pages for each.
    "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
)


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
    serving.serve(serve(config), RelayError)


def _tune_libc() -> None:
    """Starts this process anew with the C library's settings for moving blocks.

    glibc reads them at exec only; other C libraries ignore them. Whoever sets
    GLIBC_TUNABLES keeps the word.
    """
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = _TUNABLES
        serving.execute(*sys.orig_argv[1:])


def _yield_to_engines(nice: int) -> None:
    """Lets whoever generates go first; threads that begin later do the same.

    Who started this process with a still lower priority keeps the word.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(before, nice))
