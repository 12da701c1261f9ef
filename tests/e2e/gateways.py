"""The real gateway (smg) as a process of its own, and the real client (openai) in front of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import openai
from stage import LIMIT_SECONDS, eventually

STOP_SECONDS = 10.0


class Gateway:
    """A gateway before some engines. Close it."""

    def __init__(self, log: Path, addresses: Sequence[str], *options: str) -> None:
        """Starts it; engines that do not listen yet are found later."""
        port, metrics_port = _free_ports(2)
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "smg", "launch",
                    "--worker-urls", *(f"grpc://{address}" for address in addresses),
                    "--host", "127.0.0.1", "--port", str(port),
                    "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
                    "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1",
                    *options,
                ],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"

    def client(self) -> openai.AsyncOpenAI:
        """Opens a client that does not try again by itself. Use it as an async context manager."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS
        )

    async def ready(self, model: str) -> None:
        """Waits until an answer comes: before, the gateway says 404 or 503, or does not listen."""

        async def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                await client.completions.create(model=model, prompt="a", max_tokens=1)
            except (openai.NotFoundError, openai.InternalServerError, openai.APIConnectionError):
                return False
            return True

        async with self.client() as client:
            await eventually(answers, LIMIT_SECONDS)

    def close(self) -> None:
        """Ends the process, by force when it does not end by itself."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on; the gateway cannot choose one by itself."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
