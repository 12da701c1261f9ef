"""The pulls that run on this relay. Plain Python."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial

from relay_service.core.holding import Holding
from relay_service.core.lent import Lent
from relay_service.core.logs import fields, transfer_id
from relay_service.core.match import Target
from relay_service.core.offer import Offer
from relay_service.core.ports import Fleet, Transport
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PathStep, PullOptions, PullReport
from relay_service.core.rate import TokenBucket
from relay_service.core.tally import Tally
from relay_service.core.transfer_state import (
    MAX_REASON_CHARS,
    RateMeter,
    TransferState,
    last_steps,
)
from relay_service.errors import InvalidRequest

ENDED_SECONDS = 60.0
MAX_ENDED = 16
"""Pulls that have ended are shown for a minute, so many at most."""
_log = logging.getLogger(__name__)


@dataclass
class Transfer:
    """One running pull."""

    transfer: str
    holding: Holding
    puller: Puller
    task: asyncio.Task[PullReport]
    began_at: float
    meter: RateMeter = field(default_factory=RateMeter)
    ended_at: float = math.inf

    @property
    def outcome(self) -> str:
        """`complete`, `ended` by somebody, or the kind of error that ended it."""
        if self.task.cancelled():
            return "ended"
        error = self.task.exception()
        return type(error).__name__ if error else "complete"

    def state(self, address: str) -> TransferState:
        """Describes it as it is now, into an instance of the relay at `address`."""
        puller, report, running = self.puller, self.puller.report, not self.task.done()
        step = report.path[-1] if report.path else PathStep("", "")
        seconds = min(time.monotonic(), self.ended_at) - self.began_at
        moving = max(seconds - report.seconds_matching, 1e-3)
        rate = self.meter.rate(puller.bytes_moved) if running else 0
        return TransferState(
            transfer=self.transfer, instance=self.holding.name, address=address,
            phase=report.phase, source_instance=step.source_instance, transport=step.transport,
            note=(report.note if running else self._error or report.note)[:MAX_REASON_CHARS],
            bytes_verified=puller.bytes_verified,
            bytes_total=sum(receiver.total_bytes for receiver in puller.receivers),
            bytes_moved=puller.bytes_moved, bytes_reread=puller.bytes_reread,
            blocks_verified=puller.blocks_verified,
            blocks_total=sum(receiver.layout.block_count for receiver in puller.receivers),
            blocks_failed=puller.blocks_failed,
            bytes_per_second=int(rate), average_bytes_per_second=int(puller.bytes_moved / moving),
            age_seconds=seconds, path=last_steps(report.path),
            outcome="" if running else self.outcome,
        )  # fmt: skip

    @property
    def _error(self) -> str:
        """What ended it, in words; empty where it is complete or somebody ended it."""
        return "" if self.task.cancelled() else str(self.task.exception() or "")

    def summary(self) -> dict[str, object]:
        """Returns what its last line in the log says."""
        path = self.puller.report.path
        return {
            "instance": self.holding.name,
            "transfer": self.transfer,
            "bytes": self.puller.bytes_moved,
            "bytes_verified": self.puller.bytes_verified,
            "seconds": round(time.monotonic() - self.began_at, 3),
            "transport": path[-1].transport if path else "",
            "path": self.puller.story(),
        }


class Transfers:
    """Starts pulls, and ends them before their memory goes away."""

    def __init__(
        self, fleet: Fleet, transports: list[Transport], ingress: TokenBucket | None = None
    ) -> None:
        """Pulls over the first of `transports` that reaches, all together within `ingress`."""
        self._fleet = fleet
        self._ingress = ingress
        self._transports = transports
        self.running: list[Transfer] = []
        self._ended_states: deque[tuple[float, TransferState]] = deque(maxlen=MAX_ENDED)
        self._ended_tally = Tally()

    def start(self, holding: Holding, options: PullOptions) -> Transfer:
        """Starts to fill a holding, or the memory that it has lent.

        Raises `WrongState`, `InvalidRequest` or `ConfigError` before a byte moves.
        """
        if options.source_instance == holding.name != holding.model:
            raise InvalidRequest(f"{holding.name} cannot be its own source", field="from")
        target = Target(holding.name, holding.attach.format, holding.placement)
        # Checked first: a refused pull must not leave the arenas mapped for writing.
        Puller(target, [], self._fleet, self._transports, options)
        space = holding.lent or holding
        receivers = space.open_receivers()
        offer = partial(self._offer, holding) if space is holding else None
        puller = Puller(
            target, receivers, self._fleet, self._transports, options, space.landed, offer,
            self._ingress,
        )  # fmt: skip
        name, context = secrets.token_hex(6), copy_context()
        context.run(transfer_id.set, name)
        running = self._run(space, puller)
        task = asyncio.get_running_loop().create_task(running, context=context)
        transfer = Transfer(name, holding, puller, task, time.monotonic())
        self.running.append(transfer)
        task.add_done_callback(lambda _: self._ended(transfer))
        said = fields(
            instance=holding.name, transfer=name, source=options.source_instance,
            staged=space is holding.lent,
            bytes_total=sum(receiver.total_bytes for receiver in receivers),
            rate_limit_bytes_per_second=options.rate_limit_bytes_per_second,
        )  # fmt: skip
        _log.info("transfer started", extra=said)
        return transfer

    def announce_soon(self) -> None:
        """Lets the fleet know of what has changed here, before the next interval."""
        self._fleet.announce_soon()

    def states(self) -> list[TransferState]:
        """Describes the pulls that run, and those that ended within the last minute."""
        since = time.monotonic() - ENDED_SECONDS
        running = [transfer.state(self._fleet.address) for transfer in self.running]
        return [*running, *(state for ended, state in self._ended_states if ended > since)]

    def tally(self) -> Tally:
        """Sums up every pull so far, those that run included."""
        return self._ended_tally.with_running([t.puller for t in self.running])

    async def end(self, holding: Holding) -> None:
        """Ends the pull into a holding, if there is one, and waits for it."""
        for transfer in [t for t in self.running if t.holding is holding]:
            if not transfer.task.cancelling():  # a second time would cut its cleaning up short
                transfer.task.cancel()
            await asyncio.wait([transfer.task])

    def _offer(self, holding: Holding, offer: Offer | None) -> None:
        if offer:
            holding.offer(offer)
        else:
            holding.offered.withdraw()
        self.announce_soon()

    async def _run(self, space: Holding | Lent, puller: Puller) -> PullReport:
        report = await puller.run()
        space.keep([receiver.manifest() for receiver in puller.receivers])
        return report

    def _ended(self, transfer: Transfer) -> None:
        self.running.remove(transfer)
        if transfer.task.cancelled() or transfer.task.exception():
            # Nothing writes any more; the engine may take other weights instead. Done here,
            # since a task that is cancelled before its first step runs none of its code.
            transfer.holding.return_mapping()
            transfer.holding.offered.withdraw()
        outcome = transfer.outcome
        transfer.ended_at = time.monotonic()
        state = transfer.state(self._fleet.address)
        self._ended_states.append((transfer.ended_at, state))
        self.announce_soon()
        self._ended_tally.end(transfer.puller, outcome)
        level = logging.INFO if outcome == "complete" else logging.WARNING
        _log.log(level, "transfer ended: %s", outcome, extra=fields(**transfer.summary()))
