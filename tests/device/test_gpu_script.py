"""The script for a device, as far as it goes without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeDriver
from fake_device import fake_device

from engine_service.device.config import ModelConfig
from tests.gpu import computing, memory
from tests.gpu.__main__ import run
from tests.gpu.place import Place

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_size": 96,
    "vocab_size": 8192, "tied": True, "norm_eps": 1e-5, "max_positions": 128,
}  # fmt: skip
SMALL = ModelConfig(**SIZES)
# What every process of the script finds here: a fake driver, whose allocations are memfds
# and so travel, and nothing installed but torch, numpy and xxhash.
SETTING = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT)!r}]
for name in ("msgspec", "grpc", "google", "safetensors", "tokenizers", "typer", "pytest"):
    sys.modules[name] = None
from tests.gpu import stand_in
assert stand_in.install()
import fake_cuda
from relay_service.memory import cuda_driver
cuda_driver.load = fake_cuda.FakeDriver
"""
LANDER = (
    SETTING
    + """
from tests.gpu import lander
lander.main(sys.argv[1:])
"""
)
SCRIPT = (
    SETTING
    + """
import json, fake_device
from engine_service.device.config import ModelConfig
from tests.gpu.__main__ import run
from tests.gpu import checks, computing
from tests.gpu.place import Place
driver, computing.REFILLS = fake_cuda.FakeDriver(), 4
model = ModelConfig(**json.loads(sys.argv[1]))
command = (sys.executable, "-c", sys.argv[2])
place = Place(fake_device.fake_device(driver), driver, model, "float32", command)
rows = run(place, checks.CHECKS)
assert place.figures["land_2_threads_gb_per_s"] > 0
sys.exit(any(row["result"] == "failed" for row in rows))
"""
)


def test_every_check_holds_on_a_fake_device():
    """All checks pass where everything works, with torch, numpy and xxhash alone.

    Those that need CUDA itself say so.
    """
    fields = json.dumps(SIZES)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fields, LANDER],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == [
        "skipped  nccl is captured: skipped: not on CUDA"
    ]
    assert len(lines) == 17


def test_what_is_broken_fails(monkeypatch):
    """A replay that does not follow the weights, and bytes that do not land, are found."""
    driver = FakeDriver()
    place = Place(
        fake_device(driver), driver, SMALL, "float32", lander=(sys.executable, "-c", LANDER)
    )
    place.graphs.capture()
    logits = torch.ones(1, SMALL.vocab_size)
    monkeypatch.setattr(place.graphs, "replay", lambda batch: logits.expand(len(batch[4]), -1))
    monkeypatch.setattr(computing.Lander, "land", lambda *_, **__: 1.0)
    broken = [
        computing.replay_equals_eager_before, memory.landing_from_another_process,
        computing.refills_leave_addresses_and_memory, computing.a_killed_relay_disturbs_nobody,
        computing.the_runner_serves,
    ]  # fmt: skip
    assert [row["result"] for row in run(place, broken)] == ["failed"] * len(broken)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_script_says_so_and_passes():
    """Nothing is claimed where nothing was checked."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("skipped: no CUDA device")
