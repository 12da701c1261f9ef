"""`seedrelay model compile`: makes the decode layer that engines on this machine then find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

_MOST_SECONDS = 1800


def compile_model(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", file_okay=False)],
    *,
    dtype: Annotated[str, typer.Option(help="As of the engine.")] = "auto",
    weight_format: Annotated[str, typer.Option(help="As of the engine.")] = "auto",
    threads: Annotated[int, typer.Option(help="As of the engine; 0 to choose.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compile a model's decode layer for this machine; it takes half a minute, and g++.

    Engines that start with the same model, dtype, weight format and threads then use it,
    whatever the weights are.
    """
    from engine_service.config import EngineConfig
    from engine_service.core.model_files import read_folder, stated_dtype
    from engine_service.errors import EngineError

    try:
        config = EngineConfig(
            model=str(model), listen="127.0.0.1:0", dtype=dtype, weight_format=weight_format,
            threads=threads,
        )  # fmt: skip
        served = stated_dtype(read_folder(model)) if dtype == "auto" else dtype
    except EngineError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"compiling for {config.threads_per_rank} threads, {served} ...", err=True)
    done = subprocess.run(
        [
            sys.executable, "-m", "engine_service.device.compiling", str(model),
            "--dtype", served, "--weight-format", weight_format,
            "--threads", str(config.threads_per_rank),
            "--kv-block-tokens", str(config.kv_block_tokens),
        ],
        capture_output=True, text=True, timeout=_MOST_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        *_, reason = ["it ended early", *done.stderr.strip().splitlines()]
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(1)
    result = json.loads(done.stdout.splitlines()[-1])
    if as_json:
        typer.echo(json.dumps(result))
    else:
        how = f"compiled in {result['seconds']} s" if result["compiled"] else "was there, unchanged"
        typer.echo(f"{result['file']}  ({how})")
