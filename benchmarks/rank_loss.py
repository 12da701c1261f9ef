"""Kills a rank of an engine under a stream, and says when what came back. For `expert_recovery`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import table
from clients.engine import EngineClient
from clients.errors import ClientError
from clients.launch import LaunchError, Service
from seedrelay.v1 import engine_pb2, weights_pb2

VICTIM = 1
COLUMNS = {
    "seconds_lost": "found", "seconds_regrouped": "regrouped", "seconds_pulled": "pulled",
    "seconds_staged": "staged", "seconds_committed": "committed",
}  # fmt: skip
"""From the kill on, by the engine's own log: the loss is found, the others have met, what is
missing has come, every rank has what it shall hold, all serve again."""
_PHASES = {
    "lost": "seconds_lost", "regrouped": "seconds_regrouped", "staging": "seconds_pulled",
    "committing": "seconds_staged", "done": "seconds_committed",
}  # fmt: skip
STREAM_TOKENS, NEW_TOKENS, TOKENS_BEFORE = 48, 8, 8
_STREAMED, _NEW = "Why is the sea salty?", "How deep is it, and who lives there?"
LIMIT_SECONDS = 180.0
AGAIN_SECONDS = 0.05
QUIET_SECONDS, QUIET_SHARE = 0.5, 0.1


@dataclass(frozen=True)
class Loss:
    """What followed the death of a rank."""

    killed_at: float
    """Seconds of the clock on the wall."""
    seconds: float
    """To the first token of a request that was sent then."""
    seconds_stream: float
    """To the next token of what ran; `seconds` where that ended."""
    stream_went_on: bool


async def lose(engine: Service, victim: int) -> Loss:
    """Kills a rank while an answer streams; raises `SystemExit` for a token that is wrong."""
    async with EngineClient(engine.address) as client:
        streamed, _ = await _read(client, _STREAMED, STREAM_TOKENS)
        new, _ = await _read(client, _NEW, NEW_TOKENS)
        await client.flush()
        pid = (await client.status()).ranks[victim].pid
        running = asyncio.Event()
        stream = asyncio.create_task(_read(client, _STREAMED, STREAM_TOKENS, running))
        await running.wait()
        os.kill(pid, signal.SIGKILL)
        killed, killed_at = time.monotonic(), time.time()
        tokens, times = await _ask(engine.address, _NEW, NEW_TOKENS)
        _check(tokens, new)
        seconds = seconds_stream = times[0] - killed
        try:
            tokens, times = await stream
        except ClientError:
            return Loss(killed_at, seconds, seconds_stream, stream_went_on=False)
        _check(tokens, streamed)
        gaps = [(late - early, late) for early, late in itertools.pairwise(times)]
        seconds_stream = max(gap for gap in gaps if gap[1] > killed)[1] - killed
        return Loss(killed_at, seconds, seconds_stream, stream_went_on=True)


async def whole(engine: Service) -> None:
    """Waits until an engine is ready, with as many groups as its experts shall have."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with suppress(ClientError):
                async with EngineClient(engine.address) as client:
                    status = await client.status()
                if status.state == weights_pb2.INSTANCE_STATE_FAILED:
                    raise LaunchError(f"an engine failed: {status.reason}")
                held = engine_pb2.MEMBERSHIP_STATE_HELD
                changes = status.membership.state == held or status.membership.HasField("progress")
                if status.state == weights_pb2.INSTANCE_STATE_READY and not changes:
                    return
            await asyncio.sleep(AGAIN_SECONDS)


async def quiet(pids: Callable[[], Sequence[int]], count: int) -> None:
    """Waits until there are so many processes, and they have nothing to do: all have imported."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with suppress(FileNotFoundError):
                known = pids()
                before = table.cpu_seconds(known)
                await asyncio.sleep(QUIET_SECONDS)
                used = table.cpu_seconds(known) - before
                if len(known) == count and used < QUIET_SHARE * QUIET_SECONDS:
                    return


def phases(log: Path, since: float) -> dict[str, float]:
    """Reads seconds from a moment on, and the bytes that were pulled, out of an engine's log."""
    found: dict[str, float] = {}
    for line in log.read_text("utf-8").splitlines():
        try:
            said = json.loads(line)
            at = datetime.fromisoformat(said["time"]).timestamp()
        except (ValueError, KeyError, TypeError):
            continue  # a rank's own words
        if at >= since - 0.001:  # the log rounds to milliseconds
            if name := _PHASES.get(said.get("phase", "")):
                found.setdefault(name, at - since)
            if "bytes_pulled" in said:
                found["bytes_pulled"] = said["bytes_pulled"]
    return found


async def _ask(address: str, text: str, count: int) -> tuple[list[int], list[float]]:
    """Asks until an answer comes."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                async with EngineClient(address) as client:
                    return await _read(client, text, count)
            except ClientError:
                await asyncio.sleep(AGAIN_SECONDS)


async def _read(
    client: EngineClient, text: str, count: int, running: asyncio.Event | None = None
) -> tuple[list[int], list[float]]:
    """Returns the greedy tokens of an answer, and when each message of it came."""
    request = engine_pb2.GenerateRequest(text=text)
    request.sampling.max_tokens, request.sampling.ignore_eos = count, True
    tokens: list[int] = []
    times: list[float] = []
    async for message in client.generate(request, LIMIT_SECONDS):
        tokens += message.token_ids
        times.append(time.monotonic())
        if running and len(tokens) >= TOKENS_BEFORE:
            running.set()
    return tokens, times


def _check(tokens: list[int], expected: list[int]) -> None:
    if tokens != expected:
        raise SystemExit(f"other tokens than before the loss: {tokens}, before: {expected}")
