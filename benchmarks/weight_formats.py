"""How long does a product with one matrix take in each format, beside plain bfloat16?

Matrices of two sizes, inputs of 1, 8 and 32 tokens, formats interleaved in rounds. A round
takes the fastest of its products, so that a neighbour's share of the cores is not measured.
The matrices are held as an arena holds them; input and products are bfloat16.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from benchmarks import table
from engine_service.device.formats.layouts import LAYOUTS, Layout, choose_layout
from engine_service.device.formats.linear import Linear
from engine_service.device.torch_dtypes import TORCH_DTYPES
from engine_service.errors import ConfigError
from relay_service.core.dtypes import DType

SIZES = ((3072, 576), (4096, 4096))
QUICK_SIZES = ((96, 64), (64, 160))
BATCHES = (1, 8, 32)
COLUMNS = {f"microseconds_b{batch}": f"us, batch {batch}" for batch in BATCHES} | {
    "bytes_per_weight": "bytes a weight"
}
MOST_PRODUCTS = 200


def main() -> None:
    """Measures and writes everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each case in a round")
    parser.add_argument("--quick", action="store_true", help="a smoke test of the program")
    options = parser.parse_args()
    sizes, rounds = (QUICK_SIZES, 1) if options.quick else (SIZES, options.rounds)
    torch.set_num_threads(options.threads)
    matrices = [_matrix(layout, *size) for size in sizes for layout in _served()]
    rows = [
        _measure(matrix, number, 0.0 if options.quick else options.seconds)
        for number in range(rounds)
        for matrix in matrices
    ]
    settings = {"threads": options.threads, "rounds": rounds, "sizes": sizes} | table.versions(
        "torch"
    )
    table.write("weight_formats", settings, rows, COLUMNS, _figures(rows, sizes), {})


def _served() -> list[Layout]:
    """Returns the formats that this processor can serve."""
    found = []
    for name in LAYOUTS:
        try:
            found.append(choose_layout(name, DType.BF16, "cpu"))
        except ConfigError as error:
            print(error)
    return found


def _matrix(layout: Layout, rows: int, columns: int) -> Linear:
    tensors = {
        "w" + one.suffix: torch.zeros(one.shape, dtype=TORCH_DTYPES[one.dtype])
        for one in layout.stored(DType.BF16, rows, columns)
    }
    matrix = Linear("w", layout, columns, tensors)
    matrix.fill(torch.randn(rows, columns).bfloat16())
    return matrix


@torch.inference_mode()
def _measure(matrix: Linear, number: int, seconds: float) -> table.Row:
    rows, columns = matrix.shape
    row: table.Row = {
        "method": _method(matrix.layout.name, (rows, columns)), "round": number,
        "bytes_per_weight": sum(tensor.nbytes for tensor in matrix.tensors) / (rows * columns),
    }  # fmt: skip
    for batch in BATCHES:
        hidden = torch.randn(batch, columns).bfloat16()
        matrix(hidden)
        taken, end = [], time.perf_counter() + seconds
        while not taken or (time.perf_counter() < end and len(taken) < MOST_PRODUCTS):
            start = time.perf_counter()
            matrix(hidden)
            taken.append(time.perf_counter() - start)
        row[f"microseconds_b{batch}"] = min(taken) * 1e6
    return row


def _figures(rows: list[table.Row], sizes: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Returns each format's time as a part of that of plain bfloat16."""
    return {
        f"{layout.name}_over_plain_{size[0]}x{size[1]}_b{batch}": table.median_ratio(
            rows, _method(layout.name, size), _method("plain", size), f"microseconds_b{batch}"
        )
        for size in sizes
        for layout in _served()
        for batch in BATCHES
        if layout.name != "plain"
    }


def _method(name: str, size: tuple[int, int]) -> str:
    return f"{name} {size[0]}x{size[1]}"


if __name__ == "__main__":
    main()
