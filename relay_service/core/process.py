"""How a service process begins and ends: its one line on stdout, its signals. Plain Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal


def announce_listening(
    service: str, instance: str, address: str, metrics_address: str = ""
) -> None:
    """Prints the one line that a service says on stdout."""
    line = {"event": "listening", "service": service, "instance": instance,
            "address": address, "pid": os.getpid()}  # fmt: skip
    if metrics_address:
        line["metrics_address"] = metrics_address
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)  # noqa: T201


def stop_on_signals() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second one exits at once."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping
