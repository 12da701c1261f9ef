"""Makes tensors of seeded normal values, a chunk at a time on all cores."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_service.checkpoint.floats import CHUNK_ITEMS, encode
from engine_service.checkpoint.tensor_file import Tensor

_CHUNKS_AHEAD = 32
"""Chunks made before they are written: enough for every core, and little memory."""


class RandomTensors:
    """Makes tensors whose values depend on the seed and their name alone.

    The dtype only rounds them; order, shards and the number of threads play no part.
    """

    def __init__(self, seed: int, dtype: str, pool: Executor) -> None:
        self._seed = seed
        self._dtype = dtype
        self._pool = pool

    def normal(self, name: str, shape: tuple[int, ...], mean: float, deviation: float) -> Tensor:
        """Returns a tensor of normal values that are drawn when it is written."""
        digest = hashlib.sha256(name.encode()).digest()
        key = [self._seed, int.from_bytes(digest[:16], "little")]
        items = math.prod(shape)

        def draw(start: int) -> NDArray[Any]:
            random = np.random.Generator(np.random.SFC64([*key, start // CHUNK_ITEMS]))
            count = min(CHUNK_ITEMS, items - start)
            values = random.standard_normal(count, dtype=np.float32)
            values *= np.float32(deviation)
            values += np.float32(mean)
            return encode(values, self._dtype)

        def chunks() -> Iterator[NDArray[Any]]:
            pending: deque[Future[NDArray[Any]]] = deque()
            for start in range(0, items, CHUNK_ITEMS):
                pending.append(self._pool.submit(draw, start))
                if len(pending) > _CHUNKS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

        return Tensor(name=name, dtype=self._dtype, shape=shape, chunks=chunks)
