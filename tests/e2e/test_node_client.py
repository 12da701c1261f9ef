"""A client in another language needs nothing but the protos: Node, out of `clients/examples`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from stage import Stage, reach

from clients.engine import EngineClient
from seedrelay.v1 import engine_pb2

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "clients" / "examples" / "node"
SECONDS = 60
PROMPT = "What is a seed?"
TOKENS = 12

Generate = Callable[..., subprocess.CompletedProcess[str]]


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PROTOS": str(ROOT / "protos")}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """Installs the example in a folder of its own; its packages come from npm's registry."""
    if missing := [tool for tool in ("node", "npm") if not shutil.which(tool)]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "generate.mjs"):
        shutil.copy(EXAMPLE / name, folder)
    quick = ["--fetch-retries=0", "--fetch-timeout=10000", "--no-audit", "--no-fund"]
    done = _run(["npm", "install", "--ignore-scripts", "--no-package-lock", *quick], folder)
    if done.returncode:
        pytest.skip(f"npm cannot fetch the packages of the example: {done.stderr.strip()[:300]}")
    return lambda *arguments: _run(["node", "generate.mjs", *arguments], folder)


async def test_a_client_in_node(
    stage: Stage, make_model: Callable[..., Path], generate: Generate
) -> None:
    """It streams the text that our client does; a refusal reaches it with its words."""
    # Every token of so small a vocabulary has a text.
    engine = stage.engine(make_model("bytes", hidden_size=128, layers=4, vocab_size=259))
    await reach(engine)
    request = engine_pb2.GenerateRequest(text=PROMPT, sampling={"max_tokens": TOKENS})
    async with EngineClient(engine.address) as client:
        expected = "".join([message.text async for message in client.generate(request)])
    done = generate(engine.address, PROMPT, str(TOKENS))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected
    assert expected
    refused = generate(engine.address, PROMPT, "-1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "INVALID_ARGUMENT: sampling.max_tokens is -1, it must be from 1 to 1048576\n"
    )
