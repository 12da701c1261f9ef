"""One order of what is missing: what has come of it, from whom, and why others gave nothing.

Plain Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine_service.core.membership import ExpertProgress, OnExpertProgress, PulledUnit
from engine_service.core.parcel import Parcel
from engine_service.errors import RecoveryFailed
from relay_service.core.together import in_thread

MAX_REASONS = 16


class Order:
    """What sources are asked for, one after another."""

    def __init__(
        self, parcels: Sequence[Parcel], on_progress: OnExpertProgress, timeout_seconds: float
    ) -> None:
        """`timeout_seconds` are what all sources have together."""
        self.parcels = parcels
        self.pulled: list[PulledUnit] = []
        self.reasons: dict[str, str] = {}
        """Why who was asked gave nothing, or not all."""
        self._on_progress = on_progress
        self._bytes_total = sum(parcel.manifest.weight_bytes for parcel in parcels)
        self._deadline = asyncio.get_running_loop().time() + timeout_seconds

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not any(parcel.missing for parcel in self.parcels)

    @property
    def fair_seconds(self) -> float:
        """Time that one source may take, so that others can be asked after it."""
        return max((self._deadline - asyncio.get_running_loop().time()) / 2, 0.1)

    def say(self, phase: str, source: str, bytes_done: int = 0) -> None:
        """Says how far a source is that gives what is missing now."""
        done = sum(one.nbytes for one in self.pulled) + bytes_done
        self._on_progress(
            ExpertProgress(
                phase=phase, bytes_done=done, bytes_total=self._bytes_total, source=source
            )
        )

    def refuse(self, who: str, reason: str) -> None:
        """Takes note of why somebody gave nothing."""
        self.reasons[who] = reason

    async def settle(self, source: str) -> int:
        """Looks what lies in the parcels by now; returns how many bytes came from a source."""
        before = len(self.pulled)
        for parcel in self.parcels:
            right = await in_thread(parcel.settle)
            self.pulled += [PulledUnit(u.name, parcel.part, u.nbytes, source) for u in right]
        return sum(one.nbytes for one in self.pulled[before:])

    def failed(self, why: str = "") -> RecoveryFailed:
        """Says what is missing still, and who was asked for it."""
        left = [name for parcel in self.parcels for name in parcel.missing]
        asked = [f"{who}: {reason}" for who, reason in self.reasons.items()]
        more = f"; and {len(asked) - MAX_REASONS} more" if len(asked) > MAX_REASONS else ""
        said = "; ".join(filter(None, [why, *asked[:MAX_REASONS]])) + more
        return RecoveryFailed(
            f"{len(left)} units did not come, of them {left[0]}: {said or 'nobody was asked'}",
            field="units", found=str(len(left)), hint="name another source, or start anew",
        )  # fmt: skip
