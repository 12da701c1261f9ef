"""Brings lost experts back, and spreads experts over other ranks. Plain Python."""

from __future__ import annotations

from engine_service.core.instance import Instance
from engine_service.core.membership import (
    ExpertProgress,
    ExpertReport,
    OnExpertProgress,
    RecoverOptions,
)


class Recovery:
    """The recoveries and scalings of one instance, one at a time."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.progress: ExpertProgress | None = None
        """How far it is; none while nothing is done."""

    async def recover(self, options: RecoverOptions, on_progress: OnExpertProgress) -> ExpertReport:
        """Brings back what lost ranks held; goes on when the caller leaves.

        Raises `WrongState`, `InvalidRequest`, `RecoveryFailed` or `RanksLost`.
        """
        raise NotImplementedError

    async def scale(self, groups: int, on_progress: OnExpertProgress) -> ExpertReport:
        """Spreads the experts over so many groups of ranks; goes on when the caller leaves.

        Raises `WrongState`, `InvalidRequest`, `RecoveryFailed` or `RanksLost`.
        """
        raise NotImplementedError
