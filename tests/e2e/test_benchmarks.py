"""Every benchmark runs: a figure that nobody can measure again is worth nothing."""

import json
import subprocess
import sys
from pathlib import Path


def test_relay_transports_runs() -> None:
    """The transports' benchmark moves its bytes by every method and writes its figures."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.relay_transports", "--quick"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads(Path(done.stdout.split("written: ")[1].strip()).read_text())
    assert {"machine", "settings", "rows", "figures"} <= written.keys()
    assert {"shm_over_memcpy", "grpc_over_bare_grpc", "seed_cpu_seconds_per_gib_shm"} <= written[
        "figures"
    ].keys()
    assert {row["method"] for row in written["rows"]} >= {"memcpy", "shm", "grpc", "gloo"}
