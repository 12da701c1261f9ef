"""Compiles the decode layer of a model for this machine, as `seedrelay model compile` asks.

By torch's ahead-of-time compiler (docs.pytorch.org, AOTInductor), which needs g++ and half a
minute. One layer is enough: all of a kind share their graph, and weights are inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim, export

from engine_service.core.messages import Start
from engine_service.core.rank_config import RankConfig
from engine_service.device import precompiled
from engine_service.device.attention import decode_in_graph
from engine_service.device.config import parse_config
from engine_service.device.formats.operators import for_compiler
from engine_service.device.graphs import GraphRunner
from engine_service.device.rank import Rank
from engine_service.errors import CaptureError, EngineError

_IN_GRAPH = {torch.ops.seedrelay.paged_attention.default: decode_in_graph}
_SMALL_VOCABULARY = 256
_MOST_ROWS = 1 << 16


def compile_layer(rank: Rank) -> tuple[Path, bool]:
    """Compiles the layer of a captured rank, unless that is done.

    Returns where it lies, and whether it was compiled now. Raises `CaptureError`.
    """
    graphs = rank.graphs
    if not isinstance(graphs, GraphRunner):
        raise CaptureError("only a CPU's graphs are compiled: a device replays its own")
    place = graphs.compiled_place
    if place.is_file():
        return place, False
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        package = Path(scratch) / "layer.pt2"
        tempfile.tempdir = scratch  # where the compiler, imported only now, keeps what it leaves
        try:
            _compile(graphs, package)
        except Exception as error:
            raise CaptureError(f"the layer cannot be compiled: {error}") from error
        finally:
            tempfile.tempdir = None
        library = _unpacked(package, ".wrapper.so")
        operators = _unpacked(package, ".wrapper.json", '{"nodes": []}')
        operators.replace(precompiled.operators_of(place))
        digest = Path(scratch) / "digest"
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        digest.chmod(0o600)
        digest.replace(precompiled.digest_of(place))
        library.replace(place)  # last: what is there is complete
    return place, True


def _take_weights_as_inputs() -> None:
    """Lets the compiler call oneDNN's product with a matrix that is no constant of the graph."""
    # Imported here: the compiler takes a second.
    from torch._inductor import ir, lowering, mkldnn_ir, mkldnn_lowerings  # noqa: F401 - registers its own

    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - its only name
    calls: dict[Any, Any] = {
        product.default: mkldnn_ir.LinearUnary, product.binary: mkldnn_ir.LinearBinary,
    }  # fmt: skip
    for overload, call in calls.items():

        @lowering.register_lowering(overload, type_promotion_kind=None)
        def _(*operands: Any, create: Any = call.create) -> Any:
            return ir.TensorBox.create(create(*operands))


@torch.no_grad()
def _compile(graphs: GraphRunner, into: Path) -> None:
    weights, inputs = graphs.layer_example()
    rows = Dim("rows", min=precompiled.LEAST, max=_MOST_ROWS)
    width = Dim("width", min=precompiled.LEAST, max=_MOST_ROWS)
    blocks = Dim("blocks", min=precompiled.LEAST, max=1 << 40)
    fixed: list[dict[int, Any] | None] = [None] * len(weights)
    by_row, cached = {0: rows}, {0: blocks}
    places = [by_row, {0: rows, 1: width}, by_row]
    shapes = (*fixed, by_row, by_row, by_row, cached, cached, *places)
    # Inference tensors have no versions, which the exporter wants: all of these are copies.
    given = (*weights, *(tensor.clone() for tensor in inputs))
    _take_weights_as_inputs()
    program = export(_Layer(graphs.layer), given, dynamic_shapes=(shapes,))
    torch._inductor.aoti_compile_and_package(  # noqa: SLF001 - its documented name
        program,
        package_path=str(into),
        inductor_configs={
            # `make_batch` has checked every slot and block: once per step, not once per number.
            "assert_indirect_indexing": False,
            # Compiled once for many files; there are two, which take less than that.
            "aot_inductor.precompile_headers": False,
        },
    )


def _unpacked(package: Path, ending: str, otherwise: str = "") -> Path:
    """Takes one file out of a package, for nobody else to write; what it is where none is there."""
    with zipfile.ZipFile(package) as archive:
        contents = [archive.read(name) for name in archive.namelist() if name.endswith(ending)]
    found = package.with_suffix(ending)
    found.write_bytes(contents[0] if contents else otherwise.encode())
    found.chmod(0o600)
    return found


class _Layer(torch.nn.Module):
    """The captured graph, with what the compiler takes in the place of calls."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self._graph = fx.GraphModule(torch.nn.Module(), for_compiler(graph.graph, _IN_GRAPH))

    def forward(self, *inputs: Tensor) -> Any:
        """Computes the layer."""
        return self._graph(*inputs)


def _one_layer(config: bytes) -> bytes:
    """All that a layer does not depend on is made small. Raises `CaptureError`."""
    if parse_config(config).moe:
        raise CaptureError("layers with experts are not compiled")
    raw = json.loads(config)
    raw["num_hidden_layers"] = 1
    raw["vocab_size"] = min(raw["vocab_size"], _SMALL_VOCABULARY)
    return json.dumps(raw).encode()


def main() -> None:
    """Compiles as `argv` says; prints a line of JSON, or an error."""
    parser = argparse.ArgumentParser(prog="python -m engine_service.device.compiling")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--weight-format", default="auto")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-block-tokens", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = time.monotonic()
    try:
        files = {"config.json": _one_layer((options.model / "config.json").read_bytes())}
        settings = RankConfig(
            rank=0, world_size=1, generation="compiling", dtype=options.dtype, device="cpu",
            threads=options.threads, kv_block_tokens=options.kv_block_tokens, kv_blocks=4,
            weight_format=options.weight_format,
        )  # fmt: skip
        rank = Rank(Start(settings, files))
        rank.capture()
        place, fresh = compile_layer(rank)
    except (EngineError, OSError, ValueError, KeyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - begun
    print(json.dumps({"file": str(place), "compiled": fresh, "seconds": round(seconds, 1)}))  # noqa: T201 - its output
    sys.stdout.flush()
    os._exit(0)  # the compiler's pool of processes would be waited for


if __name__ == "__main__":
    main()
