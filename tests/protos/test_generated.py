"""The committed code is what the protos say."""

import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
BUF = Path(sys.executable).with_name("buf")


def test_generated_code_is_fresh(tmp_path):
    """Generating again gives the committed files byte for byte, and no others."""
    sources = sorted(str(path) for path in PROTOS.glob("seedrelay/v1/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    # As the command does it: the well-known types lie beside the compiler.
    include = Path(protoc.__file__).with_name("_proto")
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{include}", *outputs, *sources]) == 0
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "seedrelay/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in PROTOS.glob("seedrelay/v1/*.py*")}
    assert sorted(fresh) == sorted(committed)
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert stale == [], "run make proto"


@pytest.mark.parametrize("command", [["lint"], ["format", "--diff", "--exit-code"]])
def test_buf_is_content(command):
    """Every element is commented and named by the rules, and the files are formatted."""
    done = subprocess.run(
        [BUF, *command], cwd=PROTOS, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
