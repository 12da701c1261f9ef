"""Captures the decode pass as CUDA graphs, one per size of a batch, and replays them.

A CUDA graph is the kernels of one pass with the addresses that they read. Weights and cache
stay where they are, so it follows an in-place copy; a batch is copied into the graph's own
inputs. Sizes are baked in: a batch goes into the smallest graph that holds its rows and
their blocks, and rows that stay idle write to a scratch block and are cut off the result.

Source: pytorch.org/docs/stable/notes/cuda.html, CUDA Graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_service.device.batch import Batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.errors import CaptureError

ROWS = (1, 2, 4, 8, 16, 32)
"""Rows of the graphs; a larger batch is replayed in parts."""
FIRST_WIDTH, WIDTH_FACTOR = 16, 4
"""Blocks per row of the narrowest graphs, and how much wider the next ones are."""
_WARM_UPS = 2


class Record(Protocol):
    """Captures a pass."""

    def __call__(self, forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Returns what replays the pass, and the tensor that then holds its result."""


class CudaGraphRunner:
    """Owns the captured graphs of one model."""

    proven = False
    compiled = False

    def __init__(self, model: Llama, cache: KVCache, record: Record | None = None) -> None:
        self._model = model
        self._cache = cache
        self._record = record or _CudaRecorder()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._widths: list[int] = []

    @property
    def captured(self) -> bool:
        """Whether `replay` may be called."""
        return bool(self._graphs)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and blocks per row of every graph."""
        return list(self._graphs)

    def capture(self) -> None:
        """Captures every size, whatever the weights are, even while they land.

        Raises `CaptureError`.
        """
        self._widths = _widths(self._cache)
        graphs = {}
        # The largest first: the others then find their memory in its pool.
        for rows, width in itertools.product(reversed(ROWS), reversed(self._widths)):
            try:
                graphs[rows, width] = self._capture(rows, width)
            except RuntimeError as error:
                raise CaptureError(
                    f"decoding {rows} rows of {width} blocks cannot be captured: {error}"
                ) from error
        self._graphs = graphs

    def replay(self, batch: Batch) -> Tensor:
        """Returns the logits of a decode batch of any size, `[rows, vocab_size]`.

        Raises `CaptureError` before `capture`, and for a context that no model position has.
        """
        if not self._graphs:
            raise CaptureError("no graph has been captured yet")
        count = len(batch.lengths)
        parts = [
            self._replay(Batch(*(field[start : start + ROWS[-1]] for field in batch)))
            for start in range(0, count, ROWS[-1])
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _replay(self, batch: Batch) -> Tensor:
        count, width = batch.tables.shape
        rows = next(size for size in ROWS if size >= count)
        wide = next((size for size in self._widths if size >= width), None)
        if wide is None:
            raise CaptureError(f"{width} blocks, the widest graph has {self._widths[-1]}")
        return self._graphs[rows, wide].run(batch)

    @torch.inference_mode()
    def _capture(self, rows: int, width: int) -> _Graph:
        idle = self._idle(rows, width)
        with torch.inference_mode(mode=False):
            inputs = Batch(*(field.clone() for field in idle))
        replay, logits = self._record(lambda: self._model.forward(inputs, self._cache))
        return _Graph(idle, inputs, replay, logits)

    def _idle(self, rows: int, width: int) -> Batch:
        """Returns a batch of rows that each write and read one slot of a scratch block."""
        cache = self._cache
        block = cache.scratch[-1][0]

        def full(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=cache.device)

        tables = torch.full((rows, width), cache.padding_block, device=cache.device)
        tables[:, 0] = block
        return Batch(full(0), full(0), full(block * cache.block_tokens), tables, full(1))


class _Graph:
    """One captured pass with the inputs and the output that it is bound to."""

    def __init__(
        self, idle: Batch, inputs: Batch, replay: Callable[[], None], logits: Tensor
    ) -> None:
        self._idle = idle
        self._inputs = inputs
        self._replay = replay
        self._logits = logits

    def run(self, batch: Batch) -> Tensor:
        count, width = batch.tables.shape
        for mine, idle, given in zip(self._inputs, self._idle, batch, strict=True):
            mine.copy_(idle)
            (mine[:count, :width] if mine.dim() == 2 else mine[:count]).copy_(given)
        self._replay()
        return self._logits[:count].clone()  # the next replay writes over it


class _CudaRecorder:
    """Captures with torch, all graphs in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._aside: Any = None

    def __call__(self, forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Libraries allocate and choose kernels when they first run, which no graph can hold.
        # Always on the same stream: each one costs the libraries a workspace of its own.
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            for _ in range(_WARM_UPS):
                forward()
        torch.cuda.current_stream().wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count: NCCL has a thread that asks the device all the time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()
        return graph.replay, logits


def _widths(cache: KVCache) -> list[int]:
    """Returns the blocks per row of the graphs, up to the longest context that can be."""
    most = min(-(-cache.max_positions // cache.block_tokens), cache.padding_block)
    widths = [FIRST_WIDTH]
    while widths[-1] < most:
        widths.append(widths[-1] * WIDTH_FACTOR)
    return [*(width for width in widths if width < most), most]
