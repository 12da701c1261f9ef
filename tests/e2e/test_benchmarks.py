"""Every benchmark runs: a figure that nobody can measure again is worth nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def _run(name: str, *arguments: str, seconds: float = 120) -> dict[str, Any]:
    """Runs a benchmark as a smoke test and returns what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", *arguments],
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads(Path(done.stdout.split("written: ")[1].strip()).read_text())
    assert {"machine", "settings", "rows", "figures"} <= written.keys()
    return written


@pytest.mark.full
def test_relay_transports_runs() -> None:
    """The transports' benchmark moves its bytes by every method and writes its figures."""
    written = _run("relay_transports")
    assert {
        "shm_over_memcpy", "grpc_over_bare_grpc", "seed_cpu_seconds_per_gib_shm",
        "tcp_over_bare_sockets", "tcp_over_gloo",
    } <= written["figures"].keys()  # fmt: skip
    assert {row["method"] for row in written["rows"]} >= {
        "memcpy", "shm", "tcp_1", "tcp_4", "bare_sockets_4", "grpc", "gloo",
    }  # fmt: skip


@pytest.mark.full
def test_time_to_ready_runs() -> None:
    """Every way to become ready ends in the seed's tokens, and only a cold disk is read."""
    written = _run("time_to_ready")
    assert {
        "weights_phase_disk_cold_over_relay", "weights_phase_disk_warm_over_relay",
        "ready_disk_cold_over_relay", "relay_extra_bytes",
    } <= written["figures"].keys()  # fmt: skip
    rows = {row["path"]: row for row in written["rows"]}
    assert rows.keys() == {"disk_cold", "disk_warm", "relay", "relay_tcp"}
    assert rows["disk_cold"]["device_mib"] > rows["relay"]["device_mib"]
    assert rows["relay"]["transport"] == "shm"
    assert rows["relay_tcp"]["transport"] == "tcp"


@pytest.mark.full
def test_seed_impact_runs() -> None:
    """The seed streams under every load, and every load moves bytes."""
    written = _run("seed_impact")
    assert {"p99_capped_over_idle", "p99_uncapped_over_idle_shm"} <= written["figures"].keys()
    rates = {row["method"]: row["relay_mib_per_second"] for row in written["rows"]}
    assert rates.pop("idle") == 0
    assert len(rates) == 4
    assert all(rates.values())


@pytest.mark.full
def test_engine_throughput_runs() -> None:
    """Every engine generates in every case, and a prompt that was seen is answered sooner."""
    written = _run("engine_throughput")
    assert {
        "decode_over_transformers_b1", "decode_over_transformers_b8",
        "decode_over_bandwidth_limit_b1", "prefix_hit_first_token_over_fresh",
    } <= written["figures"].keys()  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in written["rows"])
    engines = {row["method"].split()[0] for row in written["rows"]}
    assert engines == {"seedrelay", "transformers"}


@pytest.mark.full
def test_health_latency_runs() -> None:
    """Both methods are answered in every condition, in every state of the start."""
    written = _run("health_latency")
    assert {
        "health_p99_seconds_idle", "health_p99_seconds_prefill", "health_p99_seconds_loading",
        "status_p99_seconds_loading",
    } <= written["figures"].keys()  # fmt: skip
    rows = {row["method"].split()[0]: row for row in written["rows"]}
    assert rows.keys() == {"loading", "structure", "idle", "prefill"}
    assert all(row["probes"] > 0 and row["health_max_seconds"] > 0 for row in rows.values())
    assert rows["loading"]["states"]["INSTANCE_STATE_LOADING"] > 0


def test_structure_cost_runs() -> None:
    """Answers with and without a schema are as long, one at a time and together."""
    written = _run("structure_cost")
    assert written["figures"].keys() == {"schema_over_plain_b1", "schema_over_plain_b8"}
    methods = {row["method"] for row in written["rows"]}
    assert methods == {"plain b1", "schema b1", "plain b8", "schema b8"}


def test_weight_formats_runs() -> None:
    """Every format that can serve here is measured at every size and batch."""
    written = _run("weight_formats")
    assert {"fp8_over_plain_96x64_b1", "int4_over_plain_64x160_b32"} <= written["figures"].keys()
    assert all(row["microseconds_b8"] > 0 for row in written["rows"])


def test_fleet_simulation_runs() -> None:
    """Targets of a small fleet are all filled, from a seed that gives about one copy."""
    written = _run("fleet_simulation")
    assert {row["targets"] for row in written["rows"]} == {1, 10}
    assert all(row["over_bound"] >= 1 and row["seed_copies"] >= 1 for row in written["rows"])


@pytest.mark.full
def test_fanout_runs() -> None:
    """A chain and a star are filled with the same weights; the star takes a copy for each."""
    written = _run("fanout")
    copies = {row["method"]: row["seed_copies"] for row in written["rows"]}
    assert copies == {"chain 1": 1, "star 1": 1, "chain 2": 1, "star 2": 2}


@pytest.mark.full
def test_loading_runs() -> None:
    """A format that is processed is loaded from disk, and pulled as the same bytes."""
    written = _run("loading", "--formats", "fp8")
    assert {"fp8_disk_over_relay", "peak_extra_layers"} <= written["figures"].keys()
    assert [row["method"] for row in written["rows"]] == [
        "fp8 disk, memory", "fp8 disk", "fp8 relay",
    ]  # fmt: skip
    assert all(row["seconds"] > 0 for row in written["rows"])


@pytest.mark.full
def test_update_pause_runs() -> None:
    """Each share of blocks is updated in each way, and a delta moves just what differs."""
    written = _run("update_pause")
    assert written["figures"]["delta_1pct_bytes_over_changed"] == 1
    assert len({row["method"] for row in written["rows"]}) == 12
    assert all(row["bytes_changed"] > 0 for row in written["rows"])


@pytest.mark.full
def test_expert_recovery_runs() -> None:
    """An instance comes back in every way, and gets no byte that it need not."""
    written = _run("expert_recovery", seconds=300)
    assert written["figures"]["bytes_over_minimum"] == 1
    assert written["figures"]["full_reload_over_recovery"] > 0
    rows = {row["method"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]) == 6
    assert sum(row["recovers"] for row in rows.values()) == 4
    assert all(0 < r["bytes_minimum"] <= r["bytes_pulled"] for r in rows.values())


@pytest.mark.full
def test_pause_modes_runs() -> None:
    """Every mode is measured under load, and has cost what it promises."""
    written = _run("pause_modes")
    mixed = {row["method"]: row["mixed"] for row in written["rows"]}
    assert (mixed["abort"], mixed["wait"]) == (0, 0)
    assert mixed["keep"] > 0
