"""A process beside the engine's that maps its arena as a relay does. Free of torch.

    python -m tests.gpu.lander land TARGET,TARGET BYTES SOURCE...
        lands a whole source for every line `INDEX THREADS` that it reads
    python -m tests.gpu.lander export SOCKET BYTES
        makes an arena of its own, sends its descriptors, and waits to be killed
    python -m tests.gpu.lander map TARGET,TARGET BYTES
        maps an arena for writing, or says why not

Every answer is a line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

from tests.gpu import stand_in

stand_in.install()

from relay_service.core.manifest import BLOCK_BYTES  # noqa: E402 - after the stand-in
from relay_service.errors import RelayError  # noqa: E402
from relay_service.memory import cuda, cuda_driver  # noqa: E402
from relay_service.memory.mapping import map_arena  # noqa: E402

PATTERN = b"what the exporter left"


def land(target: str, data_bytes: int, sources: list[str]) -> None:
    """Lands whole sources, one for each line read."""
    writer = map_arena(_descriptors(target), data_bytes, writable=True)
    writer.check_header()
    readers = [map_arena([int(fd)], data_bytes, writable=False) for fd in sources]
    _say(mapped=True, torch="torch" in sys.modules)
    for line in sys.stdin:
        index, threads = map(int, line.split())
        began = time.monotonic()
        _copy(readers[index], writer, data_bytes, threads)
        _say(seconds=time.monotonic() - began)
    writer.close()
    _say(closed=True)


def export(sock: str, data_bytes: int) -> None:
    """Makes an arena, hands its descriptors over, and waits for the end."""
    arena, descriptors = cuda.create(cuda_driver.load(), 0, "exporter", "exporter", data_bytes)
    arena.land(0, PATTERN)
    socket.send_fds(socket.socket(fileno=int(sock)), [b"!"], descriptors)
    sys.stdin.read()


def try_map(target: str, data_bytes: int) -> None:
    """Maps an arena for writing, or says why that is refused."""
    try:
        map_arena(_descriptors(target), data_bytes, writable=True).close()
    except RelayError as error:
        _say(refused=str(error))
    else:
        _say(refused="")


def _copy(reader, writer, data_bytes: int, threads: int) -> None:
    starts = list(range(0, data_bytes, BLOCK_BYTES))

    def some(first: int) -> None:
        for start in starts[first::threads]:
            nbytes = min(BLOCK_BYTES, data_bytes - start)
            writer.land(start, reader.view(start, nbytes))

    running = [threading.Thread(target=some, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _descriptors(text: str) -> list[int]:
    return [int(fd) for fd in text.split(",")]


def _say(**facts) -> None:
    print(json.dumps(facts), flush=True)


def main(arguments: list[str]) -> None:
    """Does what the arguments say."""
    what, where, size, *rest = arguments
    if what == "land":
        land(where, int(size), rest)
    elif what == "export":
        export(where, int(size))
    else:
        try_map(where, int(size))


if __name__ == "__main__":
    main(sys.argv[1:])
