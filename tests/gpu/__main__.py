"""Proves the CUDA path on a device: `python -m tests.gpu`, or `make test-gpu`.

Needs Python, torch with CUDA, numpy and xxhash; takes a minute or two and about 2 GiB of the
device. Without a device it says so and passes. Ends with 1 when a check failed.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu.place import Place

LIMIT_SECONDS = 290
REPORT = Path("build/test-gpu.json")


def main() -> int:
    """Runs all checks on the first device; returns the exit code."""
    try:
        import torch
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    if not torch.cuda.is_available():
        print(f"skipped: no CUDA device (torch {torch.__version__})")
        return 0
    from tests.gpu import stand_in

    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)  # a device that hangs
    without_msgspec = stand_in.install()
    from tests.gpu.checks import CHECKS
    from tests.gpu.place import on_cuda

    torch.set_num_threads(1)
    machine = {
        "device": torch.cuda.get_device_name(0), "devices": torch.cuda.device_count(),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "msgspec": "stand-in" if without_msgspec else "installed",
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    began = time.monotonic()
    try:
        place = on_cuda()
    except Exception:
        traceback.print_exc()
        print("failed  the place for the checks could not be set up")
        return 1
    rows = run(place, CHECKS)
    report = {
        "machine": machine, "rows": rows, "figures": place.figures,
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    _tell(report)
    return int(any(row["result"] == "failed" for row in rows))


def run(place: Place, checks: Sequence[Callable[[Place], str]]) -> list[dict[str, str]]:
    """Runs checks in their order, and prints what each saw; one that fails stops no other."""
    rows = []
    for check in checks:
        try:
            result, detail = "ok", check(place)
        except Exception as error:
            result, detail = "failed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if detail.startswith("skipped"):
            result = "skipped"
        name = check.__name__.replace("_", " ")
        rows.append({"check": name, "result": result, "detail": detail})
        print(f"{result:7}  {name}: {detail}", flush=True)
    return rows


def _tell(report: dict) -> None:
    """Prints the figures as a table, and all of it as JSON, which is also written to a file."""
    width = max(map(len, report["figures"]), default=0)
    for name, value in report["figures"].items():
        print(f"{name:{width}}  {value:8.2f}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
