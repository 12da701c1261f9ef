"""A process that is brought a checkpoint in pieces out of order, and says what memory it took.

`python shuffled_load.py FOLDER FORMAT MOST`: `MOST` bytes may wait in memory; `-` for the default.
"""

import json
import os
import random
import sys
import threading
from pathlib import Path

from tiny_llama import Filling

from engine_service.device.checkpoint import read_file
from engine_service.device.collector import Collector

PIECE_ELEMENTS = 1 << 15


def _own_bytes() -> int:
    """Counts resident memory that is no file and not shared: the arena is both."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def _watch(peak: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.001):
        peak[0] = max(peak[0], _own_bytes())


def _pieces(file: Path) -> list[tuple[str, int, int, int]]:
    """Returns name, first element, offset in the file and bytes of each piece, shuffled."""
    found = []
    for name, lies in read_file(file).items():
        for offset in range(0, lies.nbytes, 2 * PIECE_ELEMENTS):
            nbytes = min(2 * PIECE_ELEMENTS, lies.nbytes - offset)
            found.append((name, offset // 2, lies.offset + offset, nbytes))
    random.Random(1).shuffle(found)  # noqa: S311 - no secret
    return found


def main() -> None:
    """Loads bfloat16 pieces and prints what it took as JSON."""
    filling = Filling(Path(sys.argv[1]), sys.argv[2], "bfloat16")
    most = None if sys.argv[3] == "-" else int(sys.argv[3])
    arena, parts, processed, computed = filling.fresh()
    pieces = _pieces(filling.file)
    before, stop = _own_bytes(), threading.Event()
    peak = [before]
    watching = threading.Thread(target=_watch, args=(peak, stop))
    watching.start()
    with (
        filling.file.open("rb") as file,
        Collector(arena, parts, processed, most_bytes_waiting=most) as collector,
    ):
        for name, first, offset, nbytes in pieces:
            collector.add(name, first, os.pread(file.fileno(), nbytes, offset))
        digest = collector.finish(computed).digest
    stop.set()
    watching.join()
    room = collector.room
    sys.stdout.write(json.dumps({
        "digest": digest, "extra": peak[0] - before, "held": room.bytes_held_most,
        "spilled": room.bytes_spilled,
    }))  # fmt: skip


main()
