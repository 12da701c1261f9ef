"""The source's end of one admitted connection: sends blocks straight out of the arena.

Plain Python and sockets. Runs on a thread of its own, since it waits for the peer; the bytes
go from the mapped arena into the socket, and no lock of Python's is held meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relay_service.core.grants import Grant
from relay_service.core.holding import Holding
from relay_service.core.holdings import Holdings
from relay_service.core.instance import FILLING_EPOCH
from relay_service.core.leases import Lease
from relay_service.core.rate import Limits, TokenBucket
from relay_service.errors import InvalidRequest, RelayError
from relay_service.transports.tcp_wire import (
    REASON_BYTES,
    RUN_BLOCKS,
    STEP_SECONDS,
    Kind,
    Wire,
    pack,
)

IDLE_SECONDS = 30.0
"""Time that a reader may take until it asks again; its lease lasts as long."""
BOOK_BYTES = 32 << 20
FEW_BLOCKS = 4
"""Of a run while nobody knows how long it takes, and of those that many may wait for."""
QUICK_SECONDS = 0.01
"""A run that goes out sooner may be followed by a longer one."""
STALL_SECONDS = 10.0
"""Time that a reader may take for one block."""


class Feeder:
    """Answers what one reader asks for under its grant."""

    def __init__(
        self,
        wire: Wire,
        grant: Grant,
        holdings: Holdings,
        egress: TokenBucket,
        book: Callable[[Lease, int], None],
        arrive: Callable[[str, int, int], None],
        closing: threading.Event,
    ) -> None:
        """Serves one connection.

        `book` takes note of bytes that went out, `arrive` waits for a block as
        `Holdings.arrival` does; `closing` ends waits of our own.
        """
        self._wire = wire
        self._grant = grant
        self._holdings = holdings
        self._egress = egress
        self._book = book
        self._arrive = arrive
        self._closing = closing
        self._unsaid = b""
        """Frames that go out with what comes next."""
        self._within_data = False
        self._run_blocks = FEW_BLOCKS
        self._sent: tuple[Lease, int] | None = None
        """Bytes that were sent and not booked yet, and the lease that they went out under."""

    def run(self) -> None:
        """Serves until the reader is done. Raises `OSError` when it leaves before."""
        self._wire.send(pack(Kind.WELCOME))
        try:
            while (asked := self._asked()) is not None:
                while asked:
                    asked = asked[self._feed(asked) :]
                self._settle()
                self._flush()
        except RelayError as error:
            self._refuse(error)
        finally:
            self._settle()

    def _asked(self) -> range | None:
        """Returns what the reader asks for next; None when it is done."""
        self._wire.patience_seconds = IDLE_SECONDS
        kind, first, count = self._wire.receive_frame()
        self._wire.patience_seconds = STALL_SECONDS
        if kind == Kind.DONE:
            return None
        if kind != Kind.READ or not self._grant.covers(first, count):
            raise InvalidRequest("something was asked for that was not granted")
        return range(first, first + count)

    def _feed(self, asked: range) -> int:
        """Sends the first of the blocks that are asked for; returns how many."""
        grant, first = self._grant, asked[0]
        _, holding = self._holdings.leased(grant.lease)
        egress = Limits(self._egress, holding.egress)
        count = self._there(holding, asked, egress.batch_blocks)
        manifest = holding.manifest(grant.rank, epoch=grant.epoch)
        blocks = [manifest.block(index) for index in asked[:count]]
        nbytes = sum(block.nbytes for block in blocks)
        self._pace(egress, nbytes)
        held, _ = self._holdings.leased(grant.lease)
        began = time.monotonic()
        with holding.reading(grant.rank, grant.epoch, first, count) as arena:
            head = [self._unsaid + pack(Kind.DATA, first, count)]
            self._within_data = True
            for block in blocks:
                self._wire.send(*head, arena.view(block.offset, block.nbytes))
                head = []
            self._within_data = False
            self._unsaid = b""
        self._unsaid = pack(Kind.GOOD, first, grant.epoch)
        self._note(held, nbytes)
        self._choose_run(time.monotonic() - began)
        return count

    def _choose_run(self, seconds: float) -> None:
        """Makes runs longer while they are quick: a slow reader shall see that something comes.

        Not those of what is being filled: in a chain everybody waits for all verdicts before.
        """
        longer = seconds < QUICK_SECONDS and self._grant.epoch < FILLING_EPOCH
        self._run_blocks = min(2 * self._run_blocks, RUN_BLOCKS) if longer else FEW_BLOCKS

    def _there(self, holding: Holding, asked: range, most: int) -> int:
        """Returns how many of the blocks to send now. Waits for the first, and for no other."""
        grant, first = self._grant, asked[0]
        most = min(len(asked), self._run_blocks, most)
        if there := holding.offered.there(grant.rank, first, grant.epoch, most):
            return there
        self._flush()
        self._arrive(grant.lease, grant.rank, first)
        return 1

    def _note(self, held: Lease, nbytes: int) -> None:
        """Counts what was sent. Booking wakes the event loop, which costs as much as a block."""
        sent = nbytes + (self._sent[1] if self._sent else 0)
        self._sent = held, sent
        if sent >= BOOK_BYTES:
            self._settle()

    def _settle(self) -> None:
        if self._sent:
            self._book(*self._sent)
            self._sent = None

    def _pace(self, limit: TokenBucket, nbytes: int) -> None:
        """Waits for a limit of our own, and tells the reader that it does."""
        delay = limit.delay(nbytes)
        while delay > 0:
            self._unsaid += pack(Kind.WAIT)
            self._flush()
            if self._closing.wait(min(delay, STEP_SECONDS)):
                raise ConnectionAbortedError
            delay -= STEP_SECONDS

    def _flush(self) -> None:
        if self._unsaid:
            self._wire.send(self._unsaid)
            self._unsaid = b""

    def _refuse(self, error: RelayError) -> None:
        if self._within_data:
            raise ConnectionAbortedError from error  # where a reason would pass for data
        refuse(self._wire, error, self._unsaid)


def refuse(wire: Wire, error: RelayError, before: bytes = b"") -> None:
    """Says why nothing more will come, after what else was to be said."""
    reason = f"{type(error).__name__}: {error.message}".encode()[:REASON_BYTES]
    wire.send_last(before + pack(Kind.FAILED, len(reason)) + reason)
