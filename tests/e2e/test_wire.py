"""Wrong bytes on a real socket between two relays are found, named and never served."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from proxy import Change, Proxy
from stage import DUMMY, Stage, answer, reach, refusal, request, seedrelay, status_of

from clients.launch import Service

FLIP_EVERY = 1 << 20
MIN_PAYLOAD = 4096


class Flipper:
    """Flips one bit in each MiB, amid big HTTP/2 DATA frames (RFC 9113, section 4.1)."""

    def __init__(self, flips: int) -> None:
        self.left = flips
        self.flipped = 0
        self.since = 0

    def connection(self) -> Change:
        """Returns what to call with the bytes of one connection, in their order."""
        header = bytearray()
        frame = 0
        is_data = False

        def flip(data: bytearray) -> None:
            nonlocal frame, is_data
            at = 0
            while at < len(data):
                if not frame:
                    take = min(9 - len(header), len(data) - at)
                    header.extend(data[at : at + take])
                    if len(header) == 9:
                        frame = int.from_bytes(header[:3], "big")
                        is_data = header[3] == 0
                        header.clear()
                else:
                    take = min(frame, len(data) - at)
                    if is_data and take > MIN_PAYLOAD:
                        self._payload(data, at, take)
                    frame -= take
                at += take

        return flip

    def _payload(self, data: bytearray, at: int, size: int) -> None:
        self.since += size
        if self.left and self.since > FLIP_EVERY:
            data[at + size // 2] ^= 1
            self.since, self.left, self.flipped = 0, self.left - 1, self.flipped + 1


async def _two_hosts(
    stage: Stage, model: Path, flipper: Flipper
) -> tuple[Proxy, Service, Service, Service]:
    """Starts a seed whose relay is announced at a proxy, and a target at another relay.

    Returns the proxy, the seed, the target and the relay of the target.
    """
    directory = stage.relay()
    probe = stage.relay()  # takes a port that the seed's relay gets once it is free
    address = probe.address
    probe.stop()
    proxy = Proxy(address, flipper.connection)
    advertised = await proxy.start()
    seed_relay = stage.relay("--join", directory.address, "--advertise", advertised, listen=address)
    target_relay = stage.relay("--join", directory.address)
    seed = stage.engine(model, "--relay", seed_relay.address, "--instance-name", "seed")
    target = stage.engine(model, "--load-format", "dummy")
    await reach(seed)
    await reach(target, DUMMY)
    return proxy, seed, target, target_relay


async def test_flipped_bytes_are_named_and_never_served(stage: Stage, model: Path) -> None:
    """Bytes that stay wrong are named by rank, tensor and block; the target stays a dummy."""
    flipper = Flipper(1000)
    proxy, _, target, relay = await _two_hosts(stage, model, flipper)
    pulled = await asyncio.to_thread(
        seedrelay,
        "pull",
        "--engine",
        target.address,
        "--relay",
        relay.address,
        "--json",
        "--transport",
        "grpc",
    )
    proxy.close()
    assert flipper.flipped >= 3
    assert pulled.status == 1
    error = pulled.json()["error"]
    assert error["code"] == "DATA_LOSS"
    assert re.search(r"rank 0, tensor \S+, block \d+: bytes do not match", error["message"])
    assert {"rank", "tensor", "block"} <= error["details"].keys()
    assert (await status_of(target)).state == DUMMY
    assert (await refusal(target, request())).code == "UNAVAILABLE"


async def test_one_flipped_byte_is_read_again(stage: Stage, model: Path) -> None:
    """A single wrong block is read again and the target ends with the right weights."""
    flipper = Flipper(1)
    proxy, seed, target, relay = await _two_hosts(stage, model, flipper)
    pulled = await asyncio.to_thread(
        seedrelay,
        "pull",
        "--engine",
        target.address,
        "--relay",
        relay.address,
        "--json",
        "--transport",
        "grpc",
    )
    proxy.close()
    assert flipper.flipped == 1
    assert pulled.status == 0, pulled.err
    assert pulled.json()["bytes_reread"] > 0
    assert (await status_of(target)).weights_digest == (await status_of(seed)).weights_digest
    assert await answer(target) == await answer(seed)
