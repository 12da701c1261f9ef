"""Starts an engine: its ranks first, since what they import takes longest.

Free of gRPC until the worker processes run: they import torch while this one imports the
front.
"""

from __future__ import annotations

from engine_service.config import EngineConfig
from engine_service.core.ranks import RankGroup


async def serve(config: EngineConfig) -> str:
    """Runs an engine until SIGTERM or SIGINT.

    Returns the address at which to start again, if it shall. Raises `EngineError` when it
    cannot listen, or can never be ready.
    """
    ranks = await RankGroup.spawn(config.ranks, config.threads_per_rank, outlives=config.outlives)
    try:
        from engine_service import app

        return await app.serve(config, ranks)
    finally:
        await ranks.stop()  # again, when it came to serving
