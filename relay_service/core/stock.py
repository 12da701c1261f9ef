"""Finds what lies in arenas that somebody else has begun to fill. Plain Python.

A relay that was started anew knows nothing of what the one before has landed. Neither is
that one's word taken for it: what counts is what lies there now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import partial

from relay_service.core.receiver import Receiver
from relay_service.core.together import in_thread

_log = logging.getLogger(__name__)


async def take_stock(receivers: Iterable[Receiver]) -> None:
    """Digests the arenas of which it is unknown what they hold; of others none is read."""
    for receiver in [one for one in receivers if one.unknown]:
        stop = threading.Event()
        _log.info("looking for what lies in the arena of rank %d", receiver.layout.rank)
        await in_thread(partial(receiver.take_stock, stop.is_set), interrupt=stop.set)
