"""What every benchmark needs: processes of its own, a readable table, `build/bench/NAME.json`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "build" / "bench"
Row = dict[str, Any]
_spawn = get_context("spawn")


@contextlib.contextmanager
def peer(role: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Connection, Any]]:
    """Runs `role(pipe, *arguments)` in a process of its own, until the context is left.

    Returns its pid, our end of the pipe, and the first thing that it sent.
    """
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=_run, args=(role, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process.pid or 0, ours, ours.recv()
    finally:
        ours.close()
        process.join(10)
        process.kill()


def answer(pipe: Connection, commands: Mapping[str, Callable[[], Any]]) -> None:
    """Runs the commands that come through a pipe and sends back what they return."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(commands[pipe.recv()]())


def _run(role: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    # Ctrl-C reaches the whole group; the main process alone ends its peers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role(pipe, *arguments)


def machine() -> Row:
    """Describes what the figures hold for."""
    info = Path("/proc/cpuinfo").read_text(encoding="ascii")
    models = [
        line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Returns the installed version of each package."""
    return {name: metadata.version(name) for name in packages}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Sums user and system time of processes (proc(5), fields 14 and 15 of stat)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def alone(pid: int, pids: Sequence[int]) -> Iterator[None]:
    """Stops all of some process trees but one; lets them go on when the context is left."""
    others = [other for other in pids if other != pid]
    for other in others:
        signal_tree(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            signal_tree(other, signal.SIGCONT)


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, number)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text("ascii").split():
                signal_tree(int(child), number)


def median(rows: Sequence[Row], method: str, field: str) -> float:
    """Returns the median of a field over the rounds of a method."""
    return statistics.median(row[field] for row in rows if row["method"] == method)


def median_ratio(rows: Sequence[Row], method: str, base: str, field: str) -> float:
    """Returns the median over the rounds of a method's field to the base's in the same round."""
    bases = {row["round"]: row[field] for row in rows if row["method"] == base}
    return statistics.median(
        row[field] / bases[row["round"]] for row in rows if row["method"] == method
    )


def _show(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Prints a line per method: the median of each column, and the span of the first one."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = max(len(method) for method in methods)
    first = next(iter(columns))
    print(" ".join([f"{'method':{width}}", *columns.values(), "min - max".rjust(15)]))
    for method in methods:
        cells = [
            f"{median(rows, method, field):{len(heading)}.3f}" for field, heading in columns.items()
        ]
        span = [row[first] for row in rows if row["method"] == method]
        print(
            " ".join([f"{method:{width}}", *cells, f"{min(span):.2f} - {max(span):.2f}".rjust(15)])
        )


def write(
    name: str,
    settings: Row,
    rows: Sequence[Row],
    columns: Mapping[str, str],
    figures: Mapping[str, float],
    goals: Mapping[str, str],
) -> None:
    """Prints the table and the figures beside their goals; writes everything as JSON.

    `columns` maps the fields of a row that the table shows to their headings.
    """
    _show(rows, columns)
    width = max(len(figure) for figure in figures)
    print()
    for figure, value in figures.items():
        goal = f"   goal {goals[figure]}" if figure in goals else ""
        print(f"{figure:{width}} {value:8.3f}{goal}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    content = {"machine": machine(), "settings": settings, "rows": rows, "figures": figures}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
