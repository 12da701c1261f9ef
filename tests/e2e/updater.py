"""A process that updates an engine, to be killed at any step.

Its arguments are ADDRESS, REQUEST (in hexadecimal), FOLDER, and SECONDS in which all must be
staged. With a FOLDER it pushes half of its tensors, and waits for a line. Once all is staged it
waits for one before it commits. It prints the version that serves, or the code of its error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from clients.engine import EngineClient
from clients.engine_updates import _header, _messages
from clients.errors import ClientError
from clients.safetensors_files import read_folder
from seedrelay.v1 import engine_pb2


async def _line() -> None:
    await asyncio.to_thread(sys.stdin.readline)


async def _half(session: str, folder: Path) -> AsyncIterator[engine_pb2.PushWeightsRequest]:
    tensors = read_folder(folder)
    messages = list(_messages(_header(session, tensors), tensors))
    for number, message in enumerate(messages):
        if number == len(messages) // 2:
            await _line()
        yield message


async def _update(address: str, request: bytes, folder: str, seconds: float) -> str:
    async with EngineClient(address) as client:
        begin = engine_pb2.BeginWeightUpdateRequest.FromString(request)
        session = (await client.begin_update(begin)).session
        if folder:
            await client._answer(client._stub.PushWeights(_half(session, Path(folder))))
        else:
            async for _ in client.stage(session, seconds):
                pass
        await _line()
        return (await client.commit_update(session)).weight_version


def main() -> None:
    """Updates."""
    address, request, folder, seconds = sys.argv[1:]
    try:
        work = _update(address, bytes.fromhex(request), folder, float(seconds))
        sys.stdout.write(asyncio.run(work))
    except ClientError as error:
        sys.stdout.write(error.code)


if __name__ == "__main__":
    main()
