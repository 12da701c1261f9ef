"""How both services log: one line per event on stderr, as text or as JSON. Plain Python.

A record's `fields` (see `fields`) become keys of the JSON, or `key=value` in text.
Events carry them; blocks and tokens are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

MAX_TRANSFER_CHARS = 32
transfer_id: ContextVar[str] = ContextVar("transfer_id", default="")
"""Transfer that the running task works for; each of its lines says so, at both ends."""


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Returns `extra` for a logging call."""
    return {"fields": values}


def clean_transfer(text: str) -> str:
    """Returns what may stand in a log of a transfer's name that another process chose."""
    return "".join(c for c in text[:MAX_TRANSFER_CHARS] if c.isascii() and c.isalnum())


def set_up(log_format: str, instance: str = "") -> None:
    """Logs to stderr from here on, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(instance) if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


class JsonFormatter(logging.Formatter):
    """One object per line."""

    def __init__(self, instance: str = "") -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        """Returns time, level, logger, message, instance, transfer, and the fields."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "instance": self._instance,
            **_fields_of(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextFormatter(logging.Formatter):
    """One line for people; what others sent cannot begin another one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Returns the line with `key=value` at its end."""
        values = [f"{name}={value}" for name, value in _fields_of(record).items() if value != ""]
        return " ".join([super().formatMessage(record), *values]).replace("\n", "\\n")


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    values: dict[str, Any] = getattr(record, "fields", {})
    transfer = values.get("transfer") or transfer_id.get()
    return {**values, "transfer": transfer} if transfer else values
