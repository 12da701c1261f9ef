"""The pulls that run on this relay. Plain Python."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from relay_service.core.holding import Holding
from relay_service.core.match import Target
from relay_service.core.ports import Fleet, Transport
from relay_service.core.pull import Puller
from relay_service.core.pull_report import PullOptions, PullReport


@dataclass
class Transfer:
    """One running pull."""

    transfer: str
    holding: Holding
    puller: Puller
    task: asyncio.Task[PullReport]


class Transfers:
    """Starts pulls, and ends them before their memory goes away."""

    def __init__(self, fleet: Fleet, transports: list[Transport]) -> None:
        self._fleet = fleet
        self._transports = transports
        self.running: list[Transfer] = []

    def start(self, holding: Holding, options: PullOptions) -> Transfer:
        """Starts to fill a holding. Raises `WrongState` or `ConfigError` before a byte moves."""
        target = Target(holding.name, holding.attach.format, holding.attach.placement)
        # Checked first: a refused pull must not leave the arenas mapped for writing.
        Puller(target, [], self._fleet, self._transports, options)
        receivers = holding.open_receivers()
        puller = Puller(target, receivers, self._fleet, self._transports, options)
        task = asyncio.get_running_loop().create_task(self._run(holding, puller))
        transfer = Transfer(secrets.token_hex(6), holding, puller, task)
        self.running.append(transfer)
        task.add_done_callback(lambda _: self._ended(transfer))
        return transfer

    async def end(self, holding: Holding) -> None:
        """Ends the pull into a holding, if there is one, and waits for it."""
        for transfer in [t for t in self.running if t.holding is holding]:
            transfer.task.cancel()
            await asyncio.wait([transfer.task])

    async def _run(self, holding: Holding, puller: Puller) -> PullReport:
        report = await puller.run()
        # The engine asks for them before it commits.
        holding.manifests = [receiver.manifest() for receiver in puller.receivers]
        return report

    def _ended(self, transfer: Transfer) -> None:
        self.running.remove(transfer)
        if transfer.task.cancelled() or transfer.task.exception():
            # Nothing writes any more; the engine may load from disk instead. Done here,
            # since a task that is cancelled before its first step runs none of its code.
            transfer.holding.return_mapping()
