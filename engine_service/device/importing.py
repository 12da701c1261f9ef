"""Imports what a rank is made of, beside the first commands. Free of torch until then."""

from __future__ import annotations

import gc
import importlib
import sys

PATIENCE = 0.0005
"""Seconds for which a thread may keep the interpreter from others meanwhile, a tenth of the usual.

What the first commands move, block by block, asks for it after each block.
"""


def import_rank() -> None:
    """Imports all of it, torch among it, without looking for garbage there."""
    usual = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(PATIENCE)
    try:
        importlib.import_module("engine_service.device.rank")
    finally:
        gc.freeze()  # modules stay: no later collection need look at them either
        gc.enable()
        sys.setswitchinterval(usual)
